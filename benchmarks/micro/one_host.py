"""Calls on one host, lossy beside gloo in the same processes: python -m benchmarks.micro.one_host

The backends take turns, a block of calls each, on the same tensors, so that both meet the same
machine; the order within a round alternates. As in a loop of training, no barrier comes between two
calls (--apart puts one before each, and --compute-ms computing before that). A time is the mean
over the ranks, the median over the calls; the first three of a block, in which the other backend's
threads are still at work, don't count. CPU seconds are of all threads of all ranks, kernel
included, over whole blocks. A trip is a tensor that is sent to the other rank and back.
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
from rich.console import Console
from rich.table import Table

from benchmarks.common.local_job import run_job
from benchmarks.common.results import source
from benchmarks.common.tables import Table as Kept
from benchmarks.common.tables import fill, markdown, write_json
from lossycoll.cli.argtypes import human, names, real
from lossycoll.cli.bench.command import sizes
from lossycoll.cli.bench.worker import work
from lossycoll.cli.launcher import EventWriter

BACKENDS = ("lossy", "gloo")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "trip")
SMALL = 4096
"""The one size of a barrier, which has none."""
TRIP_MOST = 1 << 20
WARM_UP = 3
BLOCK_SECONDS, BLOCK_CALLS = 0.05, (6, 40)
"""How long a block takes about; how many calls it has at least and at most, those of WARM_UP among
them."""
LEAST_ROUNDS = 4
CPU_GOAL = 0.6
"""Of gloo's CPU seconds."""
AFTER = Kept(
    "performance.md",
    "one-host-after",
    "ranks | call | size | lossy, us | gloo, us | times gloo's speed | goal | load",
    keys=3,
)
AFTER_GOAL = 2.0
"""Times gloo's speed, of calls after computing."""

Call = Callable[[], object]
Block = tuple[list[float], float]
"""Seconds of each call, and CPU seconds of all."""


def goal(collective: str, size: int) -> float:
    """How many times gloo's speed is wanted."""
    if collective in ("barrier", "trip"):
        return 1.0
    if collective == "broadcast":
        return 2.0
    return 5.0 if size <= SMALL else 3.0


def cells(world: int, chosen: Sequence[str], of: Sequence[int]) -> list[tuple[str, int]]:
    """What is measured: collective and bytes."""
    return [
        (name, size)
        for size in of
        for name in chosen
        if (name != "barrier" or size == SMALL)
        and (name != "trip" or (world == 2 and size <= TRIP_MOST))
    ]


def call_of(name: str, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Call:
    """One call of a collective with ``tensors``: a whole one and a rank's part of one."""
    whole, part = tensors
    there, back = (dist.send, dist.recv) if dist.get_rank() == 0 else (dist.recv, dist.send)

    def trip() -> None:
        there(whole, 1 - dist.get_rank(), group=group)
        back(whole, 1 - dist.get_rank(), group=group)

    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "barrier": lambda: dist.barrier(group=group),
        "trip": trip,
    }
    return calls[name]


def cpu_seconds() -> float:
    return time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)


def block(call: Call, calls: int, first: Call | None) -> Block:
    """Times ``calls`` calls. CPU seconds leave out ``first``, which comes before each."""
    times, cpu = [], 0.0
    before = cpu_seconds()
    for _ in range(calls):
        if first is not None:
            first()
            before = cpu_seconds()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
        if first is not None:
            cpu += cpu_seconds() - before
    return times, cpu if first is not None else cpu_seconds() - before


def over_ranks(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum."""
    dist.all_reduce(value, group=group)
    return value


def measure(
    name: str, size: int, groups: Mapping[str, dist.ProcessGroup], config: Mapping[str, Any]
) -> dict[str, Any]:
    """A row: medians and CPU seconds per call, by backend, equal on all ranks."""
    world, gloo = dist.get_world_size(), groups["gloo"]

    def barrier() -> None:
        dist.barrier(gloo)

    def first() -> None:
        work(1e-3 * config["compute_ms"])
        barrier()

    apart = config["apart"] or config["compute_ms"]
    # Of zeros, so that no sum grows from call to call.
    tensors = torch.zeros(size // 4 // world * world), torch.zeros(size // 4 // world)
    calls = {one: call_of(name, tensors, groups[one]) for one in BACKENDS}
    least, most = BLOCK_CALLS
    slowest = max(statistics.median(block(calls[one], least, None)[0]) for one in BACKENDS)
    longest = float(over_ranks(torch.tensor(slowest), gloo)) / world
    count = max(least, min(most, round(BLOCK_SECONDS / longest)))
    times: dict[str, list[list[float]]] = {one: [] for one in BACKENDS}
    cpu = dict.fromkeys(BACKENDS, 0.0)
    begin, turn, done = time.perf_counter(), 0, False
    while not done:
        for one in BACKENDS if turn % 2 else BACKENDS[::-1]:
            barrier()
            taken, spent = block(calls[one], count, first if apart else None)
            times[one].append(taken)
            cpu[one] += spent
        turn += 1
        # Rank 0's clock decides for all.
        late = dist.get_rank() == 0 and time.perf_counter() - begin > config["seconds"]
        done = turn >= LEAST_ROUNDS and bool(over_ranks(torch.tensor(float(late)), gloo) > 0)
    row: dict[str, Any] = {"ranks": world, "collective": name, "bytes": size}
    row |= {"goal": AFTER_GOAL} if config["compute_ms"] else {}
    for one in BACKENDS:
        means = over_ranks(torch.tensor(times[one], dtype=torch.float64), gloo) / world
        counted = means if apart else means[:, WARM_UP:]
        p10, p50 = 1e6 * counted.flatten().quantile(torch.tensor([0.1, 0.5], dtype=counted.dtype))
        row[f"{one}_us"], row[f"{one}_p10_us"] = float(p50), float(p10)
        total = float(over_ranks(torch.tensor(cpu[one]), gloo))
        row[f"{one}_cpu_us"] = 1e6 * total / means.numel()
        row["calls"] = counted.numel()
    return row


def rank_main(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    assert dist.group.WORLD is not None
    groups = {"lossy": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    report = EventWriter(config["events"]) if dist.get_rank() == 0 else None
    for name, size in cells(dist.get_world_size(), config["collectives"], config["sizes"]):
        row = measure(name, size, groups, config)
        if report is not None:
            report.write(**row)
    dist.barrier(groups["gloo"])
    dist.destroy_process_group()


def speed(row: Mapping[str, Any]) -> float:
    """How many times gloo's."""
    return float(row["gloo_us"] / row["lossy_us"])


def wanted(row: Mapping[str, Any]) -> float:
    """Times gloo's speed: of calls after computing what the row says."""
    return float(row.get("goal", goal(row["collective"], row["bytes"])))


def cpu_share(row: Mapping[str, Any]) -> float:
    """Of gloo's CPU seconds for the same bytes."""
    return float(row["lossy_cpu_us"] / row["gloo_cpu_us"])


HEADINGS = (
    *("ranks", "call", "size", "lossy, us", "gloo, us", "times gloo's speed", "goal"),
    *("lossy, CPU us", "gloo, CPU us", "of gloo's"),
)


def shown(row: Mapping[str, Any]) -> list[str]:
    """A row's cells, under HEADINGS."""
    return [
        str(row["ranks"]),
        row["collective"],
        "" if row["collective"] == "barrier" else human(row["bytes"]),
        f"{row['lossy_us']:.0f}",
        f"{row['gloo_us']:.0f}",
        f"{speed(row):.2f}",
        f"{wanted(row):g}" + ("" if speed(row) >= wanted(row) else ", missed"),
        f"{row['lossy_cpu_us']:.0f}",
        f"{row['gloo_cpu_us']:.0f}",
        f"{cpu_share(row):.2f}" + ("" if cpu_share(row) <= CPU_GOAL else ", missed"),
    ]


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    reached = sum(speed(row) >= wanted(row) for row in rows)
    spared = sum(cpu_share(row) <= CPU_GOAL for row in rows)
    least = min(rows, key=lambda row: speed(row) / wanted(row))
    worst = max(rows, key=cpu_share)
    return (
        f"Speed: {reached} of {len(rows)} reach their goals; the one that is furthest from it is "
        f"{least['collective']} of {human(least['bytes'])}, {least['ranks']} ranks. CPU seconds: "
        f"{spared} of {len(rows)} are at most {CPU_GOAL:g} of gloo's; the most is "
        f"{cpu_share(worst):.2f}, {worst['collective']} of {human(worst['bytes'])}, "
        f"{worst['ranks']} ranks."
    )


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    out = Table(title="One host, microseconds a call")
    for heading in HEADINGS:
        out.add_column(heading, justify="left" if heading == "call" else "right", no_wrap=True)
    for row in rows:
        out.add_row(*shown(row))
    return out


def report(found: Mapping[str, Any], folder: Path) -> None:
    """The table between the marks of performance.md, and every figure in one-host.json."""
    rows = found["rows"]
    when = f"{found['date']}, commit {found['commit']}, {found['machine']}."
    text = "\n\n".join([when, markdown(HEADINGS, list(map(shown, rows))), verdict(rows)])
    fill(folder / "performance.md", {"one-host": text})
    write_json(folder / "one-host.json", found)


def report_after(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """The rows of calls after computing, between their marks of performance.md."""
    load = f"{os.getloadavg()[0]:.0f}"
    AFTER.report(folder, [[*shown(row)[:7], load] for row in rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--ranks", default="2,4", help="(%(default)s)")
    add("--sizes", type=sizes, default=sizes("4k,1m,4m,25m,100m"), help="(4k,1m,4m,25m,100m)")
    add("--collectives", type=names(COLLECTIVES), default=COLLECTIVES, help="(all)")
    add("--seconds", type=real(0.01), default=3.0, help="for each of them and size (%(default)g)")
    add("--apart", action="store_true", help="a barrier, of gloo's, before each call")
    text = "of computing and a barrier before each call, with a table of their own (%(default)g)"
    add("--compute-ms", type=real(0), default=0.0, metavar="MS", help=text)
    add("--report", type=Path, help="folder of performance.md, for the table")
    add("--json", action="store_true", help="print the figures instead of a table")
    options = parser.parse_args()
    asked = ("sizes", "collectives", "seconds", "apart", "compute_ms")
    config = {name: getattr(options, name) for name in asked}

    def show(row: dict[str, Any]) -> None:
        print(*shown(row), sep="  ", file=sys.stderr, flush=True)

    rows: list[dict[str, Any]] = []
    for world in map(int, options.ranks.split(",")):
        rows += run_job("benchmarks.micro.one_host", config, world, show)
    if options.json:
        print(json.dumps(rows))
    else:
        Console(width=130).print(table(rows), verdict(rows))
    if options.report and options.compute_ms:
        report_after(rows, options.report)
    elif options.report:
        report({**source(), "rows": rows}, options.report)
    return 0


if __name__ == "__main__":
    if os.environ.get("RANK") is None:
        sys.exit(main())
    rank_main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
