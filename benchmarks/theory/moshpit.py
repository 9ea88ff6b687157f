"""Rounds of averaging, beside the published table: python -m benchmarks.theory.moshpit

Writes docs/moshpit.json and .png, and fills the marks of docs/moshpit.md; ``--tables`` does so from
the figures that are there. No network, no clock: seeded draws alone, so the same figures on every
machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common.results import ROOT, source
from benchmarks.common.tables import fill, markdown, write_json
from lossycoll.cli.answer import pyplot
from lossycoll.cli.simulate.command import draw_moshpit
from lossycoll.plan.grid import Grid
from lossycoll.simulate.averaging import METHODS, rounds_to
from tests.support.moshpit_published import COLUMNS, published

JSON = ROOT / "docs" / "moshpit.json"
GRID = Grid((32, 32))
TARGETS = (1e-9, 1e-4)
ALIKE = 10
"""Runs of a method whose draws are the paper's."""
OTHERS = 40
"""Runs of those that depend on where peers sit, which isn't known of the paper's."""
FILLS = (256, 512, 640, 768, 900, 1000, 1024)


def measure() -> dict[str, Any]:
    rows = []
    for peers, failure in published():
        rounds = {}
        for name, method in METHODS.items():
            seeds = OTHERS if name.startswith("moshpit") else ALIKE
            rounds[name] = rounds_to(method, peers, GRID, failure, TARGETS, seeds=seeds)
        rows.append({"peers": peers, "failure": failure, "rounds": rounds})
    fills = []
    for peers in FILLS:
        shown = ("moshpit", "moshpit_chunks", "random_groups")
        first = {
            name: rounds_to(METHODS[name], peers, GRID, 0.0, TARGETS[:1], seeds=OTHERS)[0]
            for name in shown
        }
        fills.append({"peers": peers, "rounds": first})
    return {"rows": rows, "fills": fills}


def tables(found: dict[str, Any]) -> dict[str, str]:
    wanted = published()
    body = []
    for row in found["rows"]:
        paper = wanted[row["peers"], row["failure"]]
        cells = [str(row["peers"]), f"{row['failure']:g}"]
        for name in ("moshpit", "random_groups", "all_reduce", "sgp", "gossip"):
            ours = row["rounds"][name]
            cells.append(f"{ours[0]:.1f} ({ours[1]:.1f})")
            if name == "moshpit":
                cells.append(f"{paper[name][0]:.1f} ({paper[name][1]:.1f})")
        chunks = row["rounds"]["moshpit_chunks"]
        body.append([*cells, f"{chunks[0]:.1f} ({chunks[1]:.1f})"])
    names = ("random groups", "all-reduce", "SGP", "gossip")
    head = ["peers", "failure", "Moshpit", "paper's", *names]
    fills = [
        [
            str(row["peers"]),
            f"{row['peers'] / GRID.cells:.0%}",
            *(f"{row['rounds'][name]:.1f}" for name in row["rounds"]),
        ]
        for row in found["fills"]
    ]
    head_of_fills = ["peers", "cells filled", "peers stay", "peers move", "random groups"]
    return {
        "moshpit": markdown([*head, "Moshpit, peers move"], body),
        "fills": markdown(head_of_fills, fills),
        "equal": _equal(found),
    }


def _equal(found: dict[str, Any]) -> str:
    """How near the paper's table all cells are."""
    exact, cells, farthest = 0, 0, 0.0
    for row in found["rows"]:
        paper = published()[row["peers"], row["failure"]]
        for name in COLUMNS:
            for ours, theirs in zip(row["rounds"][name], paper[name], strict=True):
                if name == "moshpit":
                    farthest = max(farthest, abs(ours - theirs))
                else:
                    cells += 1
                    exact += f"{ours:.1f}" == f"{theirs:.1f}"
    return (
        f"{exact} of {cells} figures of the other columns are the paper's to the last digit. "
        f"Moshpit's differ by {farthest:.1f} rounds at most."
    )


def report(found: dict[str, Any], folder: Path) -> None:
    """The tables between the marks of moshpit.md, and the picture."""
    fill(folder / "moshpit.md", tables(found))
    draw_moshpit(768, GRID, 0.005, pyplot(Console(stderr=True)), folder / "moshpit.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="from the figures that are there")
    if not parser.parse_args().tables:
        found = measure()
        found["measured"] = source(
            "benchmarks/theory/moshpit.py", "lossycoll/simulate", "lossycoll/plan/grid.py"
        )
        write_json(JSON, found, indent=None)
    report(json.loads(JSON.read_text(encoding="utf-8")), JSON.parent)


if __name__ == "__main__":
    main()
