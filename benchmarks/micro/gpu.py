"""CUDA tensors: python -m benchmarks.micro.gpu [--json FILE]

Two ranks on one GPU. Copies: pinned memory to the device and back, one way at a time. All-reduce:
tensors on the GPU beside those of the CPU, in turns, each until the device has done all. Calls: how
long an all-reduce keeps the host that is not waited for (issue), and its ``wait()`` (wait), behind
a kernel that takes long. Steps: of a GPT under DDP and FSDP2, with and without communication; what
share of that is hidden behind the kernels. Wires: all-reduces in few bits by UDP, whose floats the
host encodes, or the GPU. Kernels: those that encode and decode. Rank 0's clock; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.local_job import run_job
from benchmarks.common.pictures import plt, save
from benchmarks.common.results import commit, machine
from benchmarks.common.tables import fill, markdown, write_json
from lossycoll import _autoload, reliable
from lossycoll.cli.launcher import EventWriter

SIZES = (4096, 1 << 18, 1 << 20, 4 << 20, 25 << 20, 64 << 20)
TURNS = 15
WARM = 8
"""Steps that don't count: as long as more calls are under way than before, memory is pinned."""
LONG_KERNEL = 40_000_000
"""Cycles: about 20 ms."""

WHAT = ("copies", "gpu", "all_reduce", "calls", "ddp", "fsdp2", "wires", "kernels")
WIRES = ("int8", "int4", "int4/int8")
ENCODED = (1, 25, 64)
"""MiB of float32."""
FORMATS = ((8, 128), (4, 128), (4, 32))
"""Bits and groups, of kernels by themselves."""
KERNELS = "kernels"
COPIES = {"DtoH": "to the host", "HtoD": "to the device"}
ROWS = (KERNELS, *COPIES.values())


def timed(work: Callable[[], object]) -> float:
    """Seconds until the device has done what ``work`` asks for."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def median(work: Callable[[], object], turns: int = TURNS, warm: int = 1) -> float:
    """Of times from a barrier on: ranks share the GPU, so each has to do the same at a time."""
    found = []
    for turn in range(warm + turns):
        torch.cuda.synchronize()
        dist.barrier()
        seconds = timed(work)
        if turn >= warm:
            found.append(seconds)
    return statistics.median(found)


def copies() -> dict[str, float]:
    """Bytes per second of each rank one way, of 64 MiB, while the other rank copies too."""
    nbytes = 64 << 20
    there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return {
        "to_host": nbytes / median(lambda: here.copy_(there, non_blocking=True)),
        "to_device": nbytes / median(lambda: there.copy_(here, non_blocking=True)),
    }


def all_reduces(nbytes: int) -> dict[str, float]:
    """Seconds of an all-reduce, of both kinds of tensors."""
    tensors = {device: torch.ones(nbytes // 4, device=device) for device in ("cpu", "cuda")}
    seconds: dict[str, list[float]] = {device: [] for device in tensors}

    def once(tensor: Tensor) -> float:
        dist.barrier()
        return timed(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.AVG))

    for turn in range(TURNS + 1):
        for device in tensors if turn % 2 else reversed(tensors):
            taken = once(tensors[device])
            if turn:
                seconds[device].append(taken)
    return {device: statistics.median(found) for device, found in seconds.items()}


def calls() -> dict[str, float]:
    """Seconds of the host."""
    tensor = torch.ones((25 << 20) // 4, device="cuda")
    dist.all_reduce(tensor)
    issues, waits = [], []
    for _ in range(TURNS):
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG_KERNEL)  # type: ignore[no-untyped-call]
        begin = time.perf_counter()
        work = dist.all_reduce(tensor, async_op=True)
        issued = time.perf_counter()
        work.wait()
        waits.append(time.perf_counter() - issued)
        issues.append(issued - begin)
        torch.cuda.synchronize()
    return {"issue": statistics.median(issues), "wait": statistics.median(waits)}


class Gpt(nn.Module):
    """``layers`` blocks of ``width``, on random tokens' embeddings."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(
            block(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def step_of(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(x).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def steps_of(
    alone: nn.Module, parallel: nn.Module, x: Tensor, exchange: Callable[[], None]
) -> dict[str, Any]:
    """Seconds of a step's forward and backward pass without and with its collectives, and of these
    alone."""
    return {
        "parameters": parameters_of(alone),
        "compute": median(step_of(alone, x), 5),
        "communication": median(exchange, 5, WARM // 2),
        "step": median(step_of(parallel, x), 5, WARM),
        "timeline": timeline(step_of(parallel, x)),
    }


def ddp_steps(width: int, layers: int, batch: int) -> dict[str, Any]:
    """A step under DDP, and all-reduces of as many bytes."""
    from torch.nn.parallel import DistributedDataParallel

    x = torch.randn(batch, 256, width, device="cuda")
    alone = Gpt(width, layers).cuda()
    count = parameters_of(alone)
    parallel = DistributedDataParallel(Gpt(width, layers).cuda(), gradient_as_bucket_view=True)
    buckets = [torch.ones((25 << 20) // 4, device="cuda") for _ in range(count * 4 // (25 << 20))]

    def exchange() -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()

    return steps_of(alone, parallel, x, exchange)


def fsdp_steps(width: int, layers: int, batch: int) -> dict[str, Any]:
    """The same with FSDP2: parameters are gathered and gradients scattered, layer by layer."""
    from torch.distributed.fsdp import fully_shard

    x = torch.randn(batch, 256, width, device="cuda")
    alone, sharded = Gpt(width, layers).cuda(), Gpt(width, layers).cuda()
    count = parameters_of(alone)
    each = count // layers // 2
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    part = torch.ones(each, device="cuda")
    whole = torch.ones(2 * each, device="cuda")

    def exchange() -> None:
        works = []
        for _ in range(layers):
            # Parameters come for the forward and for the backward pass.
            works += [
                dist.all_gather_into_tensor(whole, part, async_op=True),
                dist.all_gather_into_tensor(whole, part, async_op=True),
                dist.reduce_scatter_tensor(part, whole, async_op=True),
            ]
        for work in works:
            work.wait()

    return steps_of(alone, sharded, x, exchange)


def wires(mib: int, wire: str, by: str) -> dict[str, Any]:
    """Seconds of a reliable all-reduce of so much float32; ``wire`` may be "same"."""
    tensor = torch.randn((mib << 20) // 4, device="cuda")
    how: dict[str, Any] = {"lossy_min_bytes": 0}
    if wire != "same":
        how["wire"] = wire
    with reliable(**how):
        seconds = median(lambda: dist.all_reduce(tensor), warm=3)
    return {"bytes": mib << 20, "wire": wire, "by": by, "seconds": seconds}


def kernels(bits: int, group: int) -> dict[str, Any]:
    """Bytes of float32 per second that kernels encode and decode, in packets of 1400 bytes."""
    from lossycoll.devices import lowbit_kernels
    from lossycoll.plan.codec import LowBit

    how, values = LowBit(bits, group), torch.randn(16 << 20, device="cuda")
    each = how.elements(1400)
    first = torch.arange(0, values.numel(), each, device="cuda")
    size = torch.clamp(values.numel() - first, max=each)
    packets = torch.stack([first, size, first // each * 1400], 1).contiguous()
    data = torch.empty(1400 * len(packets), dtype=torch.uint8, device="cuda")
    rates = {}
    works: dict[str, Callable[[], object]] = {
        "encode": lambda: lowbit_kernels.encode(values, packets, data, how, most_elements=each),
        "decode": lambda: lowbit_kernels.decode(data, packets, values, how, most_elements=each),
    }
    for name, work in works.items():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for turn in range(2 * TURNS):
            if turn == TURNS:
                begin.record()
            work()
        end.record()
        end.synchronize()
        rates[name] = values.nbytes * TURNS / (begin.elapsed_time(end) / 1e3)
    return {"bits": bits, "group": group, **rates}


def hidden(row: Mapping[str, Any]) -> float:
    """The share of what can be hidden (the shorter of both) that is."""
    could = min(row["compute"], row["communication"])
    both = row["compute"] + row["communication"]
    # Collectives that are issued at once may take longer than those of a step.
    return min(float((both - row["step"]) / could), 1.0)


def timeline(work: Callable[[], None]) -> dict[str, list[tuple[float, float]]]:
    """When the device was at kernels and at copies in one step of ``work``: begin and end, ms."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    results: Any = profiled.profiler.kineto_results
    spans: dict[str, list[tuple[float, float]]] = {row: [] for row in ROWS}
    for event in results.events():
        if event.device_type() != DeviceType.CUDA or not event.duration_ns():
            continue
        name, begin = event.name(), event.start_ns() / 1e6
        row = next((row for word, row in COPIES.items() if word in name), None)
        if row is None and "Mem" not in name:
            row = KERNELS
        if row is not None:
            spans[row].append((begin, begin + event.duration_ns() / 1e6))
    first = min(begin for row in spans.values() for begin, _ in row)
    return {row: joined(sorted(found), first) for row, found in spans.items()}


def joined(spans: Sequence[tuple[float, float]], first: float) -> list[tuple[float, float]]:
    """Sorted spans, those that nearly touch as one, from ``first`` on."""
    found: list[tuple[float, float]] = []
    for span in spans:
        begin, end = (round(at - first, 3) for at in span)
        if found and begin - found[-1][1] < 0.1:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def draw(row: Mapping[str, Any], path: Path) -> None:
    """A line for kernels, and one for the copies of each direction."""
    figure, axes = plt.subplots(figsize=(9, 2.4), layout="constrained")
    for place, spans in enumerate(row["timeline"].values()):
        bars = [(begin, end - begin) for begin, end in spans]
        axes.broken_barh(bars, (place - 0.4, 0.8), color=f"C{place}")
    axes.set_yticks(range(len(ROWS)), list(ROWS))
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    millions = row["parameters"] / 1e6
    axes.set_title(f"one step, {row['what'].upper()}, {millions:.0f} M parameters, rank 0")
    save(figure, path)


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """By their marks in gpu.md."""
    of = {what: [row for row in rows if row["what"] == what] for what in WHAT}
    reduces = markdown(
        ("bytes", "CPU tensors, ms", "CUDA tensors, ms", "ratio"),
        [
            (
                f"{row['bytes']:,}",
                *(f"{1e3 * row[device]:.2f}" for device in ("cpu", "cuda")),
                f"{row['cuda'] / row['cpu']:.2f}",
            )
            for row in of["all_reduce"]
        ],
    )
    (copied,), (called,) = of["copies"], of["calls"]
    singles = markdown(
        ("what", "figure"),
        [
            ("copies to the host, both ranks at once, each", f"{copied['to_host'] / 1e9:.1f} GB/s"),
            ("copies to the device, the same", f"{copied['to_device'] / 1e9:.1f} GB/s"),
            ("`all_reduce(async_op=True)` of 25 MiB returns", f"{1e6 * called['issue']:.0f} us"),
            ("its `wait()` returns", f"{1e6 * called['wait']:.0f} us"),
        ],
    )
    steps = markdown(
        ("", "parameters", "kernels alone, ms", "collectives alone, ms", "step, ms", "hidden"),
        [
            (
                row["what"].upper(),
                f"{row['parameters'] / 1e6:.0f} M",
                *(f"{1e3 * row[name]:.0f}" for name in ("compute", "communication", "step")),
                f"{100 * hidden(row):.0f}%",
            )
            for row in (*of["ddp"], *of["fsdp2"])
        ],
    )
    return {
        "gpu-all-reduce": reduces,
        "gpu-calls": singles,
        "gpu-steps": steps,
        **({"gpu-wires": _wires_table(of["wires"])} if of["wires"] else {}),
        "gpu-kernels": _kernels_table(of["kernels"]),
    }


def _wires_table(rows: Sequence[Mapping[str, Any]]) -> str:
    seconds = {(row["bytes"], row["wire"], row["by"]): row["seconds"] for row in rows}
    lines = []
    for nbytes, wire in dict.fromkeys((row["bytes"], row["wire"]) for row in rows):
        if wire == "same":
            continue
        exact = seconds[nbytes, "same", "the host"]
        host, gpu = seconds[nbytes, wire, "the host"], seconds[nbytes, wire, "the GPU"]
        lines.append(
            (
                f"{nbytes:,}",
                wire,
                *(f"{1e3 * s:.2f}" for s in (exact, host, gpu)),
                f"{host / gpu:.2f}",
            )
        )
    header = ("bytes", "wire", "float32, ms", "by the host, ms", "by the GPU, ms", "host / GPU")
    return markdown(header, lines)


def _kernels_table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ("wire", "group", "encoded, GB/s of float32", "decoded, GB/s")
    lines = [
        (
            f"int{row['bits']}",
            str(row["group"]),
            *(f"{row[n] / 1e9:.0f}" for n in ("encode", "decode")),
        )
        for row in rows
    ]
    return markdown(header, lines)


def report(found: Mapping[str, Any], folder: Path) -> None:
    """gpu.json, the tables in gpu.md, and a picture of each kind of step of the largest model."""
    write_json(folder / "gpu.json", found)
    fill(folder / "gpu.md", tables(found["rows"]))
    steps = [row for row in found["rows"] if "timeline" in row]
    largest = max((row["parameters"] for row in steps), default=0)
    for row in steps:
        if row["parameters"] == largest:
            draw(row, folder / f"gpu-{row['what']}-{row['parameters'] / 1e6:.0f}M.png")


def rank_main(config: dict[str, Any]) -> None:
    _autoload.register()
    torch.cuda.set_device(0)
    by = config.get("by")
    # Each rank counts as a host where floats are encoded: nothing is within one.
    disable = "device_wire" if by == "the host" else ""
    dist.init_process_group("lossy", pg_options={"link": "udp", "disable": disable} if by else None)
    events = EventWriter(config["events"]) if dist.get_rank() == 0 else None

    def tell(**row: Any) -> None:
        if events is not None:
            events.write(**row)

    if by:
        for mib in ENCODED:
            for wire in ("same", *WIRES):
                tell(what="wires", **wires(mib, wire, by))
        if by == "the GPU":
            for bits, group in FORMATS:
                tell(what="kernels", **kernels(bits, group))
    else:
        measure(config, tell)
    dist.barrier()
    dist.destroy_process_group()


def measure(config: Mapping[str, Any], tell: Callable[..., None]) -> None:
    """All but wires."""
    tell(what="copies", **copies())
    tell(what="gpu", name=torch.cuda.get_device_name(), torch=torch.__version__)
    for nbytes in SIZES:
        tell(what="all_reduce", bytes=nbytes, **all_reduces(nbytes))
    tell(what="calls", **calls())
    for kind, steps in (("ddp", ddp_steps), ("fsdp2", fsdp_steps)):
        for width, layers, batch in config["models"]:
            row = steps(width, layers, batch)
            torch.cuda.empty_cache()
            tell(what=kind, width=width, layers=layers, batch=batch, **row)


def show(row: Mapping[str, Any]) -> None:
    kept = {name: value for name, value in row.items() if name != "timeline"}
    print({name: round(v, 6) if isinstance(v, float) else v for name, v in kept.items()})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, help="write what was found to this file")
    add("--report", type=Path, help="folder of gpu.md, for its tables and pictures")
    add("--of", type=Path, help="report what --json has written, in place of measuring")
    add(
        "--models",
        default="1024x8x16,1280x20x16",
        help="width x layers x batch of 256 positions (%(default)s: 100 and 394 M parameters)",
    )
    args = parser.parse_args()
    if args.of:
        found = json.loads(args.of.read_text(encoding="utf-8"))
    elif not torch.cuda.is_available():
        print("this needs a GPU: torch.cuda isn't available", file=sys.stderr)
        return 1
    else:
        models = [[int(n) for n in model.split("x")] for model in args.models.split(",")]
        rows = []
        for config in ({"models": models}, {"by": "the host"}, {"by": "the GPU"}):
            rows += run_job("benchmarks.micro.gpu", config, 2, show)
        found = {"commit": commit(), "machine": machine(), "rows": rows}
    if args.json:
        write_json(args.json, found)
    if args.report:
        report(found, args.report)
    return 0


if __name__ == "__main__":
    if os.environ.get("RANK") is None:
        sys.exit(main())
    rank_main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
