"""Full grids, started again and again beside load: python -m benchmarks.micro.full_grids

Peers are processes, forked from one that has imported torch. They start at random times and call
``wait_for`` in different orders. The mean must be exact after as many rounds as the grid has axes.
Prints a markdown table, which ``--report docs`` puts into docs/moshpit.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from benchmarks.common.tables import Table, add_report
from benchmarks.micro.swarm_processes import free_ports
from lossycoll import MoshpitAverager, Swarm
from lossycoll.cli.argtypes import whole
from lossycoll.plan.grid import Grid, parse

ORDERS: Final = ("the swarm waits", "the averager waits", "nobody waits", "each another way")
"""What a peer calls: ``swarm.wait_for`` before its averager is made, ``averager.wait_for`` after
that, or neither. Peers that don't wait have all joined before."""
GRIDS: Final = ("2x2x2", "4x4", "2x2x2x2")
VALUES: Final = 100_000
MOST_ERROR: Final = 1e-6  # of the mean
SPREAD_SECONDS: Final = 1.0
TIMEOUT: Final = 120.0
SECRET: Final = "a secret of benchmarks"
HEAD: Final = (
    "grid",
    "peers",
    "busy processes",
    "starts with the exact mean, by order of the calls",
    "in all",
    "last peer's rounds over, s after the first start: median, longest",
)
TABLE: Final = Table("moshpit.md", "full-grids", " | ".join(HEAD))


@dataclass(frozen=True)
class Config:
    """A peer's. ``delay``: seconds before it joins, and again before it makes its averager."""

    number: int
    grid: Grid
    place: str
    order: str
    delay: float


def work(config: Config, joined: Any, out: Any) -> None:
    """A process of its own. ``joined``: barrier of all, for peers that don't wait otherwise."""
    torch.set_num_threads(1)
    try:
        rounds(config, joined)
    except Exception as error:  # of a process: the parent says it
        out.put((config.number, time.monotonic(), f"{error!r}"))
    else:
        out.put((config.number, time.monotonic(), ""))


def rounds(config: Config, joined: Any) -> None:
    """Have as many as the grid has axes. RuntimeError: the values aren't the mean of all."""
    peers, first = config.grid.cells, config.number == 0
    time.sleep(0.0 if first else config.delay)
    with Swarm(
        listen=config.place if first else "",
        join=() if first else [config.place],
        secret=SECRET,
        name=str(config.number),
        timeout=TIMEOUT,
    ) as swarm:
        values = torch.full((VALUES,), float(2**config.number))
        if joined is not None:
            joined.wait(TIMEOUT)
            time.sleep(config.delay)
        if config.order == "the swarm waits":
            swarm.wait_for(peers, TIMEOUT)
        averager = MoshpitAverager(swarm, [values], grid=config.grid.shape)
        if config.order == "the averager waits":
            averager.wait_for(peers, TIMEOUT)
        reports = [averager.step(timeout=TIMEOUT) for _ in config.grid.shape]
        off = float((values / ((2**peers - 1) / peers) - 1).abs().max())
        if off > MOST_ERROR:
            raise RuntimeError(f"{off:g} off: {reports}")


def start(grid: Grid, order: str, draw: random.Random, context: Any) -> tuple[bool, float, str]:
    """One start of all peers. Returns whether all have the exact mean, the seconds until the last
    has, and what was wrong."""
    place = f"127.0.0.1:{free_ports(1)[0]}"
    waits = order in ORDERS[:2]
    joined = None if waits else context.Barrier(grid.cells)
    out = context.Queue()
    begin = time.monotonic()
    processes = [
        context.Process(
            target=work,
            args=(
                Config(
                    number,
                    grid,
                    place,
                    draw.choice(ORDERS[:3]) if order == ORDERS[3] else order,
                    SPREAD_SECONDS * draw.random(),
                ),
                joined,
                out,
            ),
        )
        for number in range(grid.cells)
    ]
    for process in processes:
        process.start()
    try:
        found = [out.get(timeout=2 * TIMEOUT) for _ in processes]
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    wrong = [f"peer {number}: {error}" for number, _, error in found if error]
    return not wrong, max(at for _, at, _ in found) - begin, "; ".join(wrong)


def burn() -> None:
    while True:
        pass


@contextmanager
def busy(count: int, context: Any) -> Iterator[None]:
    """So many processes that compute all the time."""
    processes = [context.Process(target=burn, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def context_of() -> Any:
    """Of processes that have torch from the begin."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lossycoll"])
    return context


def row(grid: Grid, load: int, starts: int, seed: int) -> list[str]:
    """Of the table. Each start is a line of JSON."""
    context, draw = context_of(), random.Random(seed)
    found: dict[str, list[bool]] = {order: [] for order in ORDERS}
    seconds = []
    with busy(load, context):
        for number in range(starts):
            order = ORDERS[number % len(ORDERS)]
            is_exact, took, wrong = start(grid, order, draw, context)
            found[order].append(is_exact)
            seconds.append(took)
            said = {"grid": str(grid), "start": number, "order": order, "exact": is_exact}
            print(json.dumps({**said, "seconds": round(took, 2), "wrong": wrong}), flush=True)
    exact = sum(sum(one) for one in found.values())
    return [
        str(grid),
        f"{grid.cells}",
        f"{load}",
        ", ".join(f"{order}: {sum(one)} of {len(one)}" for order, one in found.items()),
        f"{exact} of {starts}",
        f"{statistics.median(seconds):.1f}, {max(seconds):.1f}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--grids", type=parse, nargs="+", default=[*map(parse, GRIDS)], help="(all)")
    add("--starts", type=whole(1), default=20, help="of each grid (%(default)s)")
    add("--busy", type=whole(0), default=4, help="processes beside them (%(default)s)")
    add("--seed", type=whole(0), default=1, help="of orders and delays (%(default)s)")
    add_report(parser, TABLE.page)
    options = parser.parse_args(arguments)
    table = [row(grid, options.busy, options.starts, options.seed) for grid in options.grids]
    print(TABLE.report(options.report, table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
