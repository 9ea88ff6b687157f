"""All-reduce on bad wires: ``python -m benchmarks.studies.lossy_links.measure --report docs``.

Needs the laboratory (root, or user namespaces: ``lossycoll lab check``). Every cell is appended to
a file when it is done; what is done is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common.lab_job import run_job
from benchmarks.common.results import ROOT, append_entry, commit, entries, in_time
from lossycoll.errors import LossyError
from lossycoll.lab.laboratory import Lab

from .cells import Cell, cells, ways

ROUNDS = {"lossy": 30, "repair": 10, "reliable": 10, "gloo": 7, "gloo-bbr": 7}
CELL_SECONDS = 900.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.lossy_links.measure", description=__doc__
    )
    add = parser.add_argument
    add(
        "--results",
        type=Path,
        default=ROOT / "benchmarks" / "studies" / "lossy_links" / "results.jsonl",
    )
    add("--report", type=Path, help="folder of performance.md, for the table and the plot")
    add("--limit-minutes", type=float, default=0, help="start no more after so long (no limit)")
    add("--hosts", type=int, help="only cells with so many hosts")
    add("--mbit", type=float, help="only cells of this rate")
    add("--rtt", type=float, help="only cells of this round trip, ms")
    add("--loss", type=float, help="only cells of this share of packets lost")
    add("--rounds", type=int, help="of the lossy way; the others have fewer in proportion")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    done = load(options.results)
    left = [
        cell
        for cell in cells()
        if cell not in done
        and options.hosts in (None, cell.hosts)
        and options.mbit in (None, cell.mbit)
        and options.rtt in (None, cell.rtt_ms)
        and options.loss in (None, cell.loss)
    ]
    networks = groupby(left, key=lambda cell: cell.network)
    for _, group in in_time(networks, options.limit_minutes):
        wanted = list(group)
        try:
            found = run(wanted, options.rounds)
        except LossyError as error:
            console.print(str(error), markup=False)
            return 1
        for entry in found:
            append_entry(options.results, entry)
            console.print(line(entry), markup=False)
    if options.report:
        from .report import write

        write(list(load(options.results).values()), options.report)
    return 0


def load(path: Path) -> dict[Cell, dict[str, Any]]:
    """The entries of a results file by cell; none where there is no file."""
    return {Cell(**entry["cell"]): entry for entry in entries(path)}


def rounds_of(lossy: int | None) -> dict[str, int]:
    if lossy is None:
        return ROUNDS
    return {way: max(3, n * lossy // ROUNDS["lossy"]) for way, n in ROUNDS.items()}


def run(group: Sequence[Cell], lossy_rounds: int | None) -> list[dict[str, Any]]:
    """Measures cells of one network. Raises LossyError where a rank fails."""
    config = {
        "what": [("step" if cell.what == "step" else cell.mib, ways(cell)) for cell in group],
        "rounds": rounds_of(lossy_rounds),
    }
    with tempfile.TemporaryDirectory() as folder, Lab(group[0].network) as lab:
        out = Path(folder) / "out"
        run_job(lab, "benchmarks.studies.lossy_links.rank", config, out, CELL_SECONDS * len(group))
        counters = lab.counters()
        ranks = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(group[0].hosts)]
    offered = sum(link.offered for link in counters.links.values())
    lost = sum(link.lost for link in counters.links.values())
    measured = []
    for i, cell in enumerate(group):
        seconds = {
            way: [
                between_ranks(times)
                for times in zip(*(rank[i]["times"][way] for rank in ranks), strict=True)
            ]
            for way in ways(cell)
        }
        missing = {
            way: [share for rank in ranks for share in rank[i]["missing"][way]]
            for way in ways(cell)
        }
        measured.append(
            {
                "cell": cell.as_dict(),
                "commit": commit("studies/lossy_links"),
                "limit": cell.limit,
                "seconds": seconds,
                "missing": {way: sum(s) / len(s) for way, s in missing.items() if s},
                "network": {
                    "loss": lost / offered if offered else 0.0,
                    "queue_drops": sum(h.up.dropped + h.down.dropped for h in counters.hosts),
                    "packets": offered,
                    "unasked": sum(host.unasked for host in counters.hosts),
                },
            }
        )
    return measured


def between_ranks(times: Sequence[tuple[float, float]]) -> float:
    """Seconds from where the last rank has begun, since none can end without it, to where the last
    one has ended. A barrier lets ranks go a one-way delay apart."""
    return max(end for _, end in times) - max(begin for begin, _ in times)


def line(entry: dict[str, Any]) -> str:
    from .report import median

    cell = Cell(**entry["cell"])
    times = ", ".join(f"{way} {1e3 * median(entry, way):.0f}" for way in entry["seconds"])
    return f"{cell.name}: limit {1e3 * cell.limit:.0f} ms; {times}"


if __name__ == "__main__":
    sys.exit(main())
