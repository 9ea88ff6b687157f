"""Residual loss against overhead, by parity and by resending: ``python -m
benchmarks.studies.fec.measure``.

Two ranks all-reduce 4 MiB over loopback in this process, and losses are injected, so the figures
depend on nothing of the machine (but for ``auto``, which hears of the loss from acknowledgements).
Writes fec.json, fec.png and the tables of performance.md. ``--lab`` measures the time of the same
operation between two hosts 80 ms apart instead, in the laboratory; ``--plots`` measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import ROOT, commit

sys.path.insert(0, str(ROOT))

import numpy as np
from rich.console import Console

from lossycoll.errors import LossyError
from lossycoll.lab import Lab, Link, Port
from lossycoll.lab import Network as Wire
from lossycoll.options.fields import Options
from lossycoll.plan import draw_order, transpose
from lossycoll.runtime.engine.reports import EngineStats
from tests.support.network import Network

from .report import ARMS, predicted, write

LOSSES = (0.001, 0.01, 0.05, 0.1)
BURSTS = (1, 4)
ELEMENTS = 1 << 20  # float32: 4 MiB
PAYLOAD = 1408
WARM = 0.25
"""Of the operations, those that are left out: auto learns the loss in them."""
WIRE = Wire(
    hosts=2,
    link=Link(loss=0.01, delay_ms=40),
    port=Port(up_mbit=1000, down_mbit=1000, queue_ms=25),
)
LAB_SECONDS = 600.0


def residual(arm: str, loss: float, burst: float, operations: int) -> dict[str, Any]:
    """One arm at one loss, both ranks together."""
    options = Options(**ARMS[arm])
    size, auto = options.parity_sets
    how = {"repair": options.repair, "fec": size, "fec_auto": auto}
    data = [np.ones(ELEMENTS, np.float32) for _ in range(2)]
    with Network(2, PAYLOAD, inject=f"loss={loss},burst={burst},seed=1") as network:
        before = [EngineStats()] * 2
        for number in range(operations):
            if number == int(WARM * operations):
                before = [engine.stats() for engine in network.engines]
            order = draw_order(0, 0, number, 2)
            plans = [
                transpose.all_reduce(2, rank, ELEMENTS, PAYLOAD // 4, order=order)
                for rank in range(2)
            ]
            for ended in network.run(plans, data, data, "f32", 1.0, **how):
                if ended.code:
                    raise RuntimeError(f"{arm} at {loss}: {ended.failure}")
        after = [engine.stats() for engine in network.engines]

    def total(name: str) -> int:
        pairs = zip(before, after, strict=True)
        return sum(getattr(b, name) - getattr(a, name) for a, b in pairs)

    if total("socket_overflow"):
        raise RuntimeError(f"{arm} at {loss}: the kernel lost packets, which nobody asked for")
    extra = total("parity_sent") + total("packets_resent")
    expected = total("packets_received") + total("packets_missing")
    return {
        "arm": arm,
        "loss": loss,
        "burst": burst,
        "packets": expected,
        "missing": total("packets_missing"),
        "recovered": total("packets_recovered"),
        "residual": total("packets_missing") / expected,
        "overhead": extra / (total("packets_sent") - extra),
        "predicted": predicted(arm, loss) if burst == 1 else None,
    }


def on_a_long_path(rounds: int) -> dict[str, Any]:
    """Seconds of the operation by arm, the last rank's. Raises LossyError where a rank fails."""
    from benchmarks.common.lab_job import run_job

    config = {"arms": ARMS, "elements": ELEMENTS, "rounds": rounds}
    with tempfile.TemporaryDirectory() as folder, Lab(WIRE) as lab:
        out = Path(folder) / "out"
        run_job(lab, "benchmarks.studies.fec.rank", config, out, LAB_SECONDS)
        ranks = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(WIRE.hosts)]
    arms = {}
    for arm in ARMS:
        pairs = zip(*(rank[arm]["seconds"] for rank in ranks), strict=True)
        missing = [share for rank in ranks for share in rank[arm]["missing"]]
        arms[arm] = {
            "seconds": [max(pair) for pair in pairs],
            "missing": sum(missing) / len(missing),
        }
    return {"commit": commit("studies/fec"), "arms": arms}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.fec.measure", description=__doc__
    )
    add = parser.add_argument
    add("--operations", type=int, default=240, help="at each loss, by each arm (240)")
    add("--lab", action="store_true", help="the time on an 80 ms path, in the laboratory")
    add("--rounds", type=int, default=24, help="of the laboratory, by each arm (24)")
    add("--plots", action="store_true", help="only table and picture, of what was measured before")
    add("--docs", type=Path, default=ROOT / "docs", help="folder of fec.json and performance.md")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    path = options.docs / "fec.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    try:
        if options.lab:
            found["lab"] = on_a_long_path(options.rounds)
        elif not options.plots:
            rows = []
            for burst in BURSTS:
                for loss in LOSSES:
                    for arm in ARMS:
                        rows.append(residual(arm, loss, burst, options.operations))
                        console.print(line(rows[-1]), markup=False)
            found["residual"] = {"commit": commit("studies/fec"), "rows": rows}
    except LossyError as error:
        console.print(str(error), markup=False)
        return 1
    path.write_text(json.dumps(found, indent=1) + "\n")
    write(found, options.docs)
    return 0


def line(row: dict[str, Any]) -> str:
    said = f"{row['loss']:.1%} in bursts of {row['burst']}, {row['arm']}: "
    return said + f"{row['residual']:.4%} left for {row['overhead']:.1%} more"


if __name__ == "__main__":
    sys.exit(main())
