"""The picture of long trainings: loss over steps, at each level of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.pictures import band, plt, save
from benchmarks.common.results import Result

from .report import Runs, runs_of
from .variants import DENSE, LEVELS, SEEDS

TITLES = {"gpt": "GPT, AdamW", "conv": "convolutions, SGD"}
FIRST = 4
"""Points that are left out: the first losses are far above all others."""


def write(entries: Sequence[Result], path: Path) -> None:
    """Draws what there are runs of."""
    levels = [name for name in next(iter(LEVELS.values())) if name != "all"]
    figure, table = plt.subplots(
        len(levels), len(LEVELS), figsize=(12, 4.2 * len(levels)), layout="constrained"
    )
    for column, task in enumerate(LEVELS):
        runs = runs_of(entries, task)
        for line, level in enumerate(levels):
            axis = table[line][column]
            known = [name for name in (DENSE, *LEVELS[task][level]) if name in runs]
            for name in known:
                draw(axis, runs, name)
            if known:
                axis.legend(fontsize=8)
            axis.set_title(f"{TITLES[task]}: {level} of the bytes", fontsize=10)
            axis.set_xlabel("step")
            axis.set_ylabel("training loss, nats")
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
            axis.grid(alpha=0.3, which="both")
    figure.suptitle(f"Median of {len(SEEDS)} seeds, and a band from the least to the greatest")
    save(figure, path, dpi=90)


def draw(axis: Any, runs: Runs, name: str) -> None:
    """The seeds' median, and a band of all."""
    found = list(runs[name].values())
    curves = [one["losses"] for one in found]
    every = found[0]["steps"] / len(curves[0])
    steps = [every * (i + 1) for i in range(len(curves[0]))][FIRST:]
    band(axis, steps, [one[FIRST:] for one in curves], name, linewidth=1.3, **style(name))


def style(name: str) -> dict[str, str]:
    """A colour for what is sent, a line for how errors are remembered."""
    colours = {
        DENSE: "black",
        "Rand-K": "tab:brown",
        "Top-K": "tab:purple",
        "PowerSGD": "tab:cyan" if "int8" in name else "tab:blue",
        "ARC": "tab:red" if "int8" in name or name.startswith("ARC 0.2") else "tab:orange",
    }
    dashes = {DENSE: "--", "none": ":", "ef21m": "-."}.get(name.rpartition(" ")[2], "-")
    return {"color": colours[name.partition(" ")[0]], "linestyle": dashes}
