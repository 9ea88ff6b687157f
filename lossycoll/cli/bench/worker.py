"""One rank of the benchmark. Started by command.py.

Backends take turns, iteration by iteration, through process groups of the same
processes: whatever else the machine does in the meantime hits them alike.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from lossycoll.cli.argtypes import human
from lossycoll.cli.demo.model import VOCABULARY, ByteGPT, next_byte_loss
from lossycoll.cli.launcher import RESULT, EventWriter
from lossycoll.options.fields import Options
from lossycoll.plan.codec import ENCODED, codec_of, phases

from . import nccl

Groups = dict[str, dist.ProcessGroup]

LEAST_ROUNDS = 3
MOST_ROUNDS = 2000
WARM_UP_ROUNDS = 2
MATRIX = torch.ones(256, 256, device="cpu")


def in_turns(
    names: Sequence[str], once: Callable[[str], float], seconds: float
) -> dict[str, list[float]]:
    """Calls ``once(name)``, which returns the seconds it took, in rounds of all names.

    The rounds fill about ``seconds`` by rank 0's clock, after some that don't count. All ranks of
    the default group do the same number. Returns the times by name.
    """
    taken: dict[str, list[float]] = {name: [] for name in names}

    def one_round(number: int) -> None:
        # The order turns around each time, so that nobody always runs second.
        for name in names if number % 2 == 0 else reversed(names):
            taken[name].append(once(name))

    started = time.perf_counter()
    for number in range(WARM_UP_ROUNDS):
        one_round(number)
    a_round = (time.perf_counter() - started) / WARM_UP_ROUNDS
    wanted = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(seconds / a_round)))
    rounds = torch.tensor(wanted, device="cpu")
    dist.broadcast(rounds, src=0)
    for times in taken.values():
        times.clear()
    for number in range(int(rounds)):
        one_round(number)
    return taken


LAYERS, WIDTH, CONTEXT, BATCH = 2, 128, 64, 4
"""Sizes of the model (0.43 million parameters) and of a rank's batch."""


def measure_steps(
    groups: Mapping[str, dist.ProcessGroup], seconds: float
) -> dict[str, list[float]]:
    """Seconds of every step, by backend: forward, backward with DDP's all-reduces, optimizer."""
    random = torch.Generator().manual_seed(dist.get_rank())
    text = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=random, device="cpu")
    replicas, optimizers = {}, {}
    for name, group in groups.items():
        torch.manual_seed(1)
        model = ByteGPT(LAYERS, WIDTH, CONTEXT)
        replicas[name] = DistributedDataParallel(model, process_group=group)
        optimizers[name] = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(name: str) -> float:
        dist.barrier()
        started = time.perf_counter()
        loss = next_byte_loss(replicas[name](text[:, :-1]), text[:, 1:])
        optimizers[name].zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers[name].step()
        return time.perf_counter() - started

    taken = in_turns(tuple(groups), step, seconds)
    replicas.clear()
    gc.collect()  # DDP is part of a reference cycle, and holds its group
    return taken


LARGEST = 3
"""Of a contribution's elements; the least is 0."""
FLOAT_BITS = {"bf16": 8, "fp16": 11}
"""Bits of a significand, the first one included."""
GRID_ERROR = 1.05
"""A grid's own ends and steps are rounded, too."""


def contribution(elements: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Small whole numbers, so that every dtype holds the sum over the ranks exactly."""
    return ((torch.arange(elements, device="cpu") * 7 + rank) % (LARGEST + 1)).to(dtype)


def tolerance(options: Options, dtype: torch.dtype, ranks: int) -> float:
    """The most by which the encoding of packets may move an element of the sum; 0: they have none.

    A step of contributions, and one of means that are gathered, half of it where indices are
    nearest. In a ring, sums are encoded anew at each rank.
    """
    first, second = phases(options.encoding)
    if dtype != torch.float32 or first == "same":
        return 0.0
    encoded = ranks - 1 if options.algorithm == "ring" else 1
    steps = encoded * _step(first) + _step(second)
    return GRID_ERROR * ranks * LARGEST * steps


def _step(encoding: str) -> float:
    """The most by which an encoding may move an element, as a share of the elements' range."""
    low = codec_of(encoding, ENCODED).low
    if low is None:
        return 0.5 / (1 << FLOAT_BITS[encoding])
    return (1.0 if low.stochastic else 0.5) / low.levels


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Reduces in place, and returns when the result is there."""
    dist.all_reduce(tensor, group=group)
    synchronize(tensor.device)


def work(seconds: float) -> None:
    """Multiplies matrices for so long, as a backward pass does: caches are full of other values,
    and threads that wait have gone to sleep."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(MATRIX, MATRIX)


def measure_size(
    groups: Groups, elements: int, config: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    dtype = getattr(torch, config["dtype"])
    source = contribution(elements, dtype, dist.get_rank()).to(device)
    tensor = source.clone()
    wanted = torch.zeros(elements, dtype=torch.float64, device="cpu")
    for rank in range(dist.get_world_size()):
        wanted += contribution(elements, torch.float64, rank)
    moved = tolerance(Options.from_env(), dtype, dist.get_world_size())
    wrong: dict[str, int] = {}

    def once(name: str, compute: float = 0.0) -> float:
        tensor.copy_(source)
        synchronize(device)
        work(compute)
        dist.barrier()
        started = time.perf_counter()
        reduce(tensor, groups[name])
        return time.perf_counter() - started

    def check() -> None:
        for name in groups if config["verify"] else ():
            once(name)
            # The lossy mean divides by a count and multiplies again: that may round.
            by = moved if name == "lossy" else 0
            right = torch.isclose(tensor.cpu().double(), wanted, rtol=1e-6, atol=by)
            wrong[name] = wrong.get(name, 0) + elements - int(right.sum())

    check()
    compute = config["compute_seconds"]
    each = config["seconds"] / 2 if compute else config["seconds"]
    seconds = in_turns(tuple(groups), once, each)
    after = in_turns(tuple(groups), partial(once, compute=compute), each) if compute else {}
    check()
    return {
        "bytes": elements * source.element_size(),
        "seconds": seconds,
        "after_compute": after,
        "wrong": wrong,
    }


def mean_by_round(ranks: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """An iteration's time is the mean over the ranks, as nccl-tests has it."""
    return {
        name: [sum(times) / len(times) for times in zip(*(own[name] for own in ranks), strict=True)]
        for name in ranks[0]
    }


def merge(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One entry per size of every rank's. ``wrong``: elements, summed over the ranks."""
    return [
        {
            "bytes": of_ranks[0]["bytes"],
            "seconds": mean_by_round([entry["seconds"] for entry in of_ranks]),
            "after_compute": mean_by_round([entry["after_compute"] for entry in of_ranks]),
            "wrong": summed([entry["wrong"] for entry in of_ranks]),
        }
        for of_ranks in zip(*ranks, strict=True)
    ]


def summed(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(one[name] for one in counts) for name in counts[0]}


def traffic(groups: Groups) -> dict[str, int] | None:
    """The lossy group's counters at this rank."""
    if "lossy" not in groups:
        return None
    figures = lossycoll.stats(groups["lossy"])
    names = ("packets_sent", "packets_resent", "packets_injected", "packets_missing", "bytes_sent")
    return {name: getattr(figures, name) for name in names}


def _gathered(own: object) -> list[Any]:
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return of_ranks


def seen_by_all() -> list[nccl.Seen]:
    return _gathered(nccl.look())


def take_part(config: dict[str, Any], report: EventWriter | None = None) -> dict[str, Any] | None:
    """Measures with the ranks of the default group, which only coordinates; rank 0 gets the result,
    and tells ``report`` how many sizes are done. Raises NcclMissing, at every rank, where NCCL is
    asked for and can't run."""
    device, setup = torch.device("cpu"), None

    def tell(size: int, done: int) -> None:
        if report is not None and dist.get_rank() == 0:
            report.write(done=done, note=f"all-reduce {human(size)}")

    with tempfile.TemporaryDirectory(prefix="lossycoll-bench-") as folder:
        account = Path(folder) / "nccl.log"
        if "nccl" in config["backends"]:
            setup = nccl.choose(seen_by_all())
            place = setup.places[dist.get_rank()]
            nccl.set_up(place, account)
            device = torch.device("cuda", place.device)
        groups = {name: dist.new_group(backend=name) for name in config["backends"]}
        itemsize = getattr(torch, config["dtype"]).itemsize
        measured = []
        for done, size in enumerate(config["sizes"]):
            tell(size, done)
            measured.append(measure_size(groups, size // itemsize, config, device))
            tell(size, done + 1)
        # DDP would hand a model on the GPU to backends of the CPU: those measure theirs.
        ours = {name: group for name, group in groups.items() if name != "nccl"}
        steps = measure_steps(ours, config["step_seconds"]) if config["step_seconds"] else {}
        connected = nccl.transports(account.read_text()) if account.exists() else ()
    own = {"sizes": measured, "steps": steps, "traffic": traffic(groups), "nccl": connected}
    gathered = _gathered(own)
    if dist.get_rank():
        return None
    return {
        "sizes": merge([rank["sizes"] for rank in gathered]),
        "steps": mean_by_round([rank["steps"] for rank in gathered]),
        "traffic": summed([rank["traffic"] for rank in gathered]) if "lossy" in groups else None,
        "measured": labels(config, setup),
        "nccl": None if setup is None else about_nccl(setup, [rank["nccl"] for rank in gathered]),
    }


def labels(config: dict[str, Any], setup: nccl.Setup | None) -> dict[str, str]:
    """Meaning of each backend's times, in words."""
    if setup is None:
        return dict.fromkeys(config["backends"], "CPU tensors")
    others = "GPU tensors; their copies to the host's memory and back are in the time"
    return dict.fromkeys(config["backends"], others) | {"nccl": f"GPU tensors; {setup.label}"}


def about_nccl(setup: nccl.Setup, connected: list[tuple[str, ...]]) -> dict[str, Any]:
    version: Any = torch.cuda.nccl.version
    return {
        "mode": setup.mode,
        "hosts": setup.hosts,
        "gpu": torch.cuda.get_device_name(),
        "version": ".".join(map(str, version())),
        "transports": sorted({name for names in connected for name in names}),
    }


def main() -> None:
    path = Path(sys.argv[1])
    config = json.loads(path.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    measured = take_part(config, EventWriter(config["events"]))
    if measured is not None:
        (path.parent / RESULT).write_text(json.dumps(measured), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
