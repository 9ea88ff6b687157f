"""Residual loss against overhead, by parity and by resending: ``python -m benchmarks fec``.

Two ranks all-reduce 4 MiB over loopback in this process, and losses are injected, so the figures
depend on nothing of the machine (but for ``auto`` and ``max_missing``, which hear of the loss from
acknowledgements, and the latter of the round trip too).
The last piece, ``part=lab``, is the time of the same operation between two hosts 80 ms apart, in
the laboratory (``lossycoll lab check``).
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.common.lab_job import run_job
from benchmarks.common.runner import PieceFailed, Study, one_by_one
from lossycoll.lab import Lab
from lossycoll.options.fields import Options
from lossycoll.plan import draw_order, hierarchical
from lossycoll.runtime.engine.reports import EngineStats
from tests.support.network import Network

from .cells import ELEMENTS, PAYLOAD, VARIANTS, WIRE, Cell, cells, predicted

WARM = 0.25
"""Of the operations, those that are left out: what is chosen by the loss is learnt in them."""
LAB_SECONDS = 600.0


def measure(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """Raises LossyError where a rank fails, PieceFailed for figures that are worth nothing."""
    if cell.part == "lab":
        return on_a_long_path(options.rounds)
    return residual(cell, options.operations)


def residual(cell: Cell, operations: int) -> dict[str, Any]:
    """One variant at one loss, both ranks together."""
    variant, loss, burst = cell.variant, cell.loss, cell.burst
    options = Options(**VARIANTS[variant])
    code, most_parity, missing = options.recovery
    how = {
        "repair": options.repair,
        "code": code,
        "most_parity": most_parity,
        "max_missing": missing,
        "choose_rounds": options.chooses_rounds,
    }
    data = [np.ones(ELEMENTS, np.float32) for _ in range(2)]
    with Network(2, PAYLOAD, inject=f"loss={loss},burst={burst},seed=1") as network:
        before = [EngineStats()] * 2
        for number in range(operations):
            if number == int(WARM * operations):
                before = [engine.stats() for engine in network.engines]
            order = draw_order(0, 0, number, 2)
            plans = [
                hierarchical.all_reduce(2, rank, ELEMENTS, PAYLOAD // 4, order=order)
                for rank in range(2)
            ]
            for ended in network.run(plans, data, data, "f32", 1.0, **how):
                if ended.code:
                    raise PieceFailed(f"{variant} at {loss}: {ended.failure}")
        after = [engine.stats() for engine in network.engines]

    def total(name: str) -> int:
        pairs = zip(before, after, strict=True)
        return sum(getattr(b, name) - getattr(a, name) for a, b in pairs)

    if total("socket_overflow"):
        raise PieceFailed(f"{variant} at {loss}: the kernel lost packets, which nobody asked for")
    extra = total("parity_sent") + total("packets_resent")
    expected = total("packets_received") + total("packets_missing")
    return {
        "packets": expected,
        "missing": total("packets_missing"),
        "recovered": total("packets_recovered"),
        "residual": total("packets_missing") / expected,
        "overhead": extra / (total("packets_sent") - extra),
        "predicted": predicted(variant, loss, burst),
    }


def on_a_long_path(rounds: int) -> dict[str, Any]:
    """Seconds of the operation by variant, the last rank's."""
    config = {"variants": VARIANTS, "elements": ELEMENTS, "rounds": rounds}
    with Lab(WIRE) as lab:
        ranks = run_job(lab, "benchmarks.studies.fec.rank", config, LAB_SECONDS)
    found = {}
    for variant in VARIANTS:
        pairs = zip(*(rank[variant]["seconds"] for rank in ranks), strict=True)
        missing = [share for rank in ranks for share in rank[variant]["missing"]]
        found[variant] = {
            "seconds": [max(pair) for pair in pairs],
            "missing": sum(missing) / len(missing),
        }
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--operations", type=int, default=240, help="at each loss, by each variant (240)")
    add("--rounds", type=int, default=24, help="of the laboratory, by each variant (24)")


STUDY = Study(
    name="fec",
    description=__doc__,
    arguments=arguments,
    plan=lambda options: list(cells()),
    measuring=one_by_one(measure),
    report_help="folder of performance.md, for tables, fec.json and fec.png",
)
