"""Tables of what the paper claims: linear speed-up, contraction, and the time of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.results import Result
from benchmarks.common.tables import markdown
from benchmarks.studies.quality.statistics import estimate

from .figures import MBITS, step_figures
from .speedup import RANKS, RULES

DENSE, ARC = "dense, gloo", "ARC 0.2, gloo"
PAPER = {"60M": 0.278, "130M": 0.446, "350M": 0.573, "1B": 0.607}
"""Of the dense step's time, what ARC-Top-K saves by the paper's table V, by model."""
PAPER_BYTES = 0.2 + 4 / 1024
"""Rows and a sketch of 4, of matrices with 1,024 columns."""


def speedup(entries: Sequence[Result], task: str = "") -> str:
    """N times the error of N ranks, relative to the dense error of one; intervals over seeds.
    ``task``: of quadratics, or NETWORK."""
    errors = {
        (entry.settings["seed"], row["rule"], row["ranks"]): row["error"]
        for entry in entries
        if (entry.settings["kind"], entry.settings["task"]) == ("speedup", task)
        for row in entry.figures
    }
    seeds = sorted({seed for seed, _, _ in errors})
    lines = []
    for rule in RULES if seeds else ():
        base = [errors[seed, "dense", 1] for seed in seeds]
        cells = []
        for ranks in RANKS:
            values = [ranks * errors[s, rule, ranks] / b for s, b in zip(seeds, base, strict=True)]
            found = estimate(values)
            half = "" if found.half is None else f" ± {found.half:.2f}"
            cells.append(f"{found.mean:.2f}{half}")
        lines.append([rule, *cells])
    return markdown(["variant", *(f"N = {ranks}" for ranks in RANKS)], lines)


def contraction(rows: Sequence[dict[str, Any]]) -> str:
    """What is kept, and the least of it over K / m, of the mean and of single ranks."""
    by = {(row["kind"], row["ratio"], row["of"]): row for row in rows}
    whose = list(dict.fromkeys(row["of"] for row in rows))[::-1]
    lines = []
    for kind, ratio in dict.fromkeys((row["kind"], row["ratio"]) for row in rows):
        found = [by[kind, ratio, of] for of in whose]
        lines.append([
            *(kind, f"{ratio:g}", str(found[0]["gradients"])),
            *(f"{r['kept']:.2f}; {r['least']:.2f}; {r['below']}" for r in found),
        ])  # fmt: skip
    head = ["parameters", "ratio", "gradients"]
    return markdown([*head, *(f"{of}: kept; least over K/m; below" for of in whose)], lines)


def shares(entries: Sequence[Result]) -> str:
    """What is saved of a step if the network has as much of it as in the paper, by the steps that
    were measured on two links: a step is ``fixed + volume / rate``."""
    found = step_figures(entries)
    if any((mbit, name) not in found for mbit in MBITS for name in (DENSE, ARC)):
        return "No runs yet."
    (dense, dense_mbit), (arc, arc_mbit) = (_fitted(found, name) for name in (DENSE, ARC))
    bytes_saved = 1 - found[MBITS[0], ARC][2] / found[MBITS[0], DENSE][2]
    lines = []
    for model, saved in PAPER.items():
        share = saved / (1 - PAPER_BYTES)
        wire = dense * share / (1 - share)  # seconds
        here = 1 - (arc + arc_mbit / dense_mbit * wire) / (dense + wire)
        # (arc + ratio * w) / (dense + w) = 1 - saved
        enough = (arc - (1 - saved) * dense) / (1 - saved - arc_mbit / dense_mbit)
        lines.append([
            *(model, f"{saved:.1%}", f"{share:.0%}", f"{share * bytes_saved:.0%}"),
            *(f"{dense_mbit / wire:.0f}", f"{here:.0%}", f"{enough / (dense + enough):.0%}"),
        ])  # fmt: skip
    head = ["model", "the paper saves", "the network's share, at least", "by bytes alone, here"]
    return markdown([*head, "Mbit/s", "saved here", "share that saves as much here"], lines)


def _fitted(found: Mapping[tuple[float, str], tuple[float, ...]], name: str) -> tuple[float, float]:
    """(seconds besides the network, Mbit on it) of a step, by the medians on two links."""
    slow, fast = (found[mbit, name][0] for mbit in MBITS)
    volume = (slow - fast) / (1 / MBITS[0] - 1 / MBITS[1])
    return fast - volume / MBITS[1], volume
