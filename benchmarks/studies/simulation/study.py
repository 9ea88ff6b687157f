"""How right the simulator is: ``python -m benchmarks simulation --report docs``.

The same calls on the same networks, in the laboratory and in virtual time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.lab_job import run_job
from benchmarks.common.results import Piece, Result
from benchmarks.common.runner import Study, one_by_one
from benchmarks.common.tables import markdown, publish
from lossycoll.lab import Lab, Link, Network, Port
from lossycoll.options.fields import Options
from lossycoll.simulate.collective import simulate_collective

SETTLE, CALLS, RUNS = 2, 9, 3
NAP = 0.002
GAP = 0.3
"""Seconds between calls: ranks agree on when the next one begins."""
GOAL = 0.1
"""Most error of a time, as a share of the laboratory's."""


@dataclass(frozen=True)
class Cell(Piece):
    """A network and an all-reduce: of hosts with ports of one rate, both ways."""

    hosts: int
    mbit: float
    delay_ms: float
    mib: float
    queue_ms: float = 25.0
    policer_ms: float = 0.0
    loss: float = 0.0
    algorithm: str = "auto"
    pacing: str = Options().pacing

    @property
    def network(self) -> Network:
        return Network(
            hosts=self.hosts,
            link=Link(delay_ms=self.delay_ms, loss=self.loss),
            port=Port(
                up_mbit=self.mbit,
                down_mbit=self.mbit,
                queue_ms=None if self.policer_ms else self.queue_ms,
                policer_ms=self.policer_ms or None,
            ),
        )

    @property
    def name(self) -> str:
        words = [
            f"{self.hosts} hosts, {self.mbit:g} Mbit/s, {self.delay_ms:g} ms, {self.mib:g} MiB"
        ]
        words += [f"policer of {self.policer_ms:g} ms"] if self.policer_ms else []
        words += [f"queue of {self.queue_ms:g} ms"] if self.queue_ms != Cell.queue_ms else []
        words += [f"{self.loss:.0%} lost"] if self.loss else []
        words += [self.algorithm] if self.algorithm != Cell.algorithm else []
        return ", ".join(words)


CELLS = (
    Cell(2, 100, 10, 4),
    Cell(2, 50, 10, 4, policer_ms=10),
    Cell(2, 20, 2, 2, loss=0.05),
    Cell(2, 20, 50, 2, queue_ms=100),
    Cell(3, 50, 10, 4),
    Cell(4, 50, 10, 4),
    Cell(4, 50, 10, 4, loss=0.01),
    Cell(4, 20, 40, 2, queue_ms=100),
    Cell(4, 50, 10, 4, policer_ms=25),
    Cell(4, 50, 5, 4, queue_ms=10, algorithm="ring"),
    Cell(8, 20, 10, 2),
    Cell(8, 20, 10, 2, loss=0.02, algorithm="ring"),
)


def measure(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """Return the calls of all runs, in the laboratory and simulated."""
    runs = range(1, options.runs + 1)
    return {
        "laboratory": [in_laboratory(cell, seed) for seed in runs],
        "simulated": [simulated(cell, seed) for seed in runs],
    }


def in_laboratory(cell: Cell, seed: int) -> dict[str, Any]:
    environment = {"LOSSYCOLL_ALGORITHM": cell.algorithm, "LOSSYCOLL_PACING": cell.pacing}
    config = {"elements": round(cell.mib * (1 << 18)), "calls": CALLS, "gap": GAP}
    network = replace(cell.network, seed=seed)
    late: list[float] = []
    with tempfile.TemporaryDirectory() as folder, Lab(network) as lab, watched(late):
        out = Path(folder) / "calls"
        Path(f"{out}.times").write_bytes(bytes(8 * CALLS * cell.hosts))
        module = "benchmarks.studies.simulation.rank"
        ranks = run_job(lab, module, config, 120, environment, out=out)
        counters = lab.counters()
    seconds, missing = [], []
    for call in zip(*ranks, strict=True):
        begin, end, lost, came = zip(*call, strict=True)
        seconds.append(max(end) - max(begin))
        missing.append(sum(lost) / max(1, sum(lost) + sum(came)))
    ports = counters.hosts
    return {
        "seconds": seconds,
        "missing": missing,
        "sent": sum(port.up.packets for port in ports),
        "dropped": {
            "up": sum(port.up.dropped for port in ports),
            "down": sum(port.down.dropped for port in ports),
            "policed": sum(port.up.policed + port.down.policed for port in ports),
            "lost": sum(link.lost for link in counters.links.values()),
            "unasked": sum(port.unasked for port in ports),
        },
        "late_max_ms": max(port.late_max_ms for port in ports),
        "wakes_late_ms": 1e3 * statistics.quantiles(late, n=20)[-1],
    }


@contextmanager
def watched(late: list[float]) -> Iterator[None]:
    """Notes by how much a thread that sleeps for a moment wakes too late."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            begin = time.monotonic()
            time.sleep(NAP)
            late.append(time.monotonic() - begin - NAP)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def simulated(cell: Cell, seed: int) -> dict[str, Any]:
    begin = time.perf_counter()
    found = simulate_collective(
        replace(cell.network, seed=seed),
        round(cell.mib * (1 << 20)),
        options=Options(algorithm=cell.algorithm, pacing=cell.pacing),
        calls=CALLS,
        settle=SETTLE,
        gap=GAP,
    )
    counts = [call.counts for call in found.calls]
    return {
        "seconds": [call.seconds for call in found.calls],
        "missing": [call.missing for call in found.calls],
        "sent": sum(one.packets for one in counts),
        "dropped": {
            "up": sum(one.dropped_up for one in counts),
            "down": sum(one.dropped_down for one in counts),
            "policed": sum(one.policed for one in counts),
            "lost": sum(one.lost for one in counts),
            "unasked": sum(one.overflow for one in counts),
        },
        "wall": time.perf_counter() - begin,
    }


def steady(runs: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Return one figure of all calls that count."""
    return [value for run in runs for value in run[name][SETTLE:]]


def summary(result: Result) -> dict[str, Any]:
    """Return medians of both, the laboratory's quartiles, and how late 1 of 20 sleepers woke."""
    cell = Cell.of(result.settings)
    lab, sim = result.figures["laboratory"], result.figures["simulated"]
    seconds = [statistics.median(steady(runs, "seconds")) for runs in (lab, sim)]
    missing = [statistics.fmean(steady(runs, "missing")) for runs in (lab, sim)]
    low, _, high = statistics.quantiles(steady(lab, "seconds"), n=4)
    # Two standard errors of the difference of two shares of so many packets.
    packets = [sum(run["sent"] for run in runs) * (CALLS - SETTLE) / CALLS for runs in (lab, sim)]
    both = statistics.fmean(missing)
    counting = 2 * math.sqrt(both * (1 - both) * sum(1 / count for count in packets))
    return {
        "cell": cell.name,
        "pacing": cell.pacing,
        "laboratory_ms": 1e3 * seconds[0],
        "quartiles_ms": [1e3 * low, 1e3 * high],
        "simulated_ms": 1e3 * seconds[1],
        "error": seconds[1] / seconds[0] - 1,
        "missing": missing,
        "counted": abs(missing[0] - missing[1]) <= counting,
        "wakes_late_ms": statistics.fmean(run["wakes_late_ms"] for run in lab),
    }


def report(results: Sequence[Result], folder: Path) -> None:
    """Write simulation.json, and the table between the marks of simulate-accuracy.md."""
    rows = sorted(map(summary, results), key=lambda row: str(row["pacing"]), reverse=True)
    head = ["network", "pacing", "laboratory, ms", "simulated, ms", "error"]
    head += ["missing there", "simulated", "woke late, ms"]
    verdicts = [verdict(rows, pacing) for pacing in dict.fromkeys(row["pacing"] for row in rows)]
    text = {"laboratory": "\n\n".join([markdown(head, [line(row) for row in rows]), *verdicts])}
    found = [asdict(result) for result in results]
    publish(folder, "simulation", found, "simulate-accuracy.md", text)


def verdict(rows: Sequence[dict[str, Any]], pacing: str) -> str:
    """Return how many networks of a law reach the goal."""
    mine = [row for row in rows if row["pacing"] == pacing]
    near = sum(abs(row["error"]) <= GOAL for row in mine)
    counted = sum(row["counted"] for row in mine)
    return (
        f"With `pacing={pacing}`, {near} of {len(mine)} networks have times within {GOAL:.0%} of "
        f"the laboratory's (the goal: {len(CELLS)}), and {counted} a missing share within the "
        f"counting error (twice the standard error)."
    )


def line(row: dict[str, Any]) -> list[str]:
    low, high = row["quartiles_ms"]
    return [
        row["cell"],
        row["pacing"],
        f"{row['laboratory_ms']:.0f} ({low:.0f} to {high:.0f})",
        f"{row['simulated_ms']:.0f}",
        f"{row['error']:+.0%}",
        *(f"{share:.2%}" for share in row["missing"]),
        f"{row['wakes_late_ms']:.1f}",
    ]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=RUNS, help="of each network (%(default)s)")
    parser.add_argument("--pacing", default=Options().pacing, help="the option (%(default)s)")


STUDY = Study(
    name="simulation",
    description=__doc__,
    arguments=arguments,
    plan=lambda options: [replace(cell, pacing=options.pacing) for cell in CELLS],
    measuring=one_by_one(measure),
    report=report,
    report_help="folder of simulate-accuracy.md, for the table and simulation.json",
)
