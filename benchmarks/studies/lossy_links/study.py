"""All-reduce on bad wires: ``python -m benchmarks lossy_links --report docs``.

Needs the laboratory (root, or user namespaces: ``lossycoll lab check``). Cells of one network are
measured in one job.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from benchmarks.common.lab_job import run_job
from benchmarks.common.rank_kit import between_ranks
from benchmarks.common.runner import Study, batch_by_batch
from lossycoll.lab.laboratory import Lab

from .cells import Cell, cells, variants

ROUNDS = {"lossy": 30, "repair": 10, "reliable": 10, "gloo": 7, "gloo-bbr": 7}
CELL_SECONDS = 900.0


def rounds_of(lossy: int | None) -> dict[str, int]:
    if lossy is None:
        return ROUNDS
    return {variant: max(3, n * lossy // ROUNDS["lossy"]) for variant, n in ROUNDS.items()}


def measure(group: Sequence[Cell], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures cells of one network. Raises LossyError where a rank fails."""
    config = {
        "what": [
            (cell.mib if cell.what == "all-reduce" else cell.what, variants(cell)) for cell in group
        ],
        "rounds": rounds_of(options.rounds),
    }
    with Lab(group[0].network) as lab:
        module = "benchmarks.studies.lossy_links.rank"
        ranks = run_job(lab, module, config, CELL_SECONDS * len(group))
        counters = lab.counters()
    offered = sum(link.offered for link in counters.links.values())
    lost = sum(link.lost for link in counters.links.values())
    measured = []
    for i, cell in enumerate(group):
        seconds = {
            variant: [
                between_ranks(times)
                for times in zip(*(rank[i]["times"][variant] for rank in ranks), strict=True)
            ]
            for variant in variants(cell)
        }
        missing = {
            variant: [share for rank in ranks for share in rank[i]["missing"][variant]]
            for variant in variants(cell)
        }
        measured.append(
            {
                "limit": cell.limit,
                "seconds": seconds,
                "missing": {variant: sum(s) / len(s) for variant, s in missing.items() if s},
                "network": {
                    "loss": lost / offered if offered else 0.0,
                    "queue_drops": sum(h.up.dropped + h.down.dropped for h in counters.hosts),
                    "packets": offered,
                    "unasked": sum(host.unasked for host in counters.hosts),
                },
            }
        )
    return measured


def arguments(parser: argparse.ArgumentParser) -> None:
    help_rounds = "of the lossy variant; the others have fewer in proportion"
    parser.add_argument("--rounds", type=int, help=help_rounds)


def by_network(left: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    for _, group in groupby(left, key=lambda cell: cell.network):
        yield list(group)


STUDY = Study(
    name="lossy_links",
    description=__doc__,
    arguments=arguments,
    plan=lambda options: list(cells()),
    batches=by_network,
    measuring=batch_by_batch(measure),
    report_help="folder of performance.md, for the table, wire.json and wire.png",
)
