"""The tables of long trainings."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.report import markdown
from benchmarks.common.results import Result
from benchmarks.studies.quality.statistics import Estimate

from .figures import (
    Runs,
    accuracy,
    bases,
    difference,
    held_out,
    over_seeds,
    runs_of,
    sent_all,
    sent_late,
    trained,
)
from .variants import LEVELS, SEEDS

HEAD = ("bytes", "variant", "kB a step", "MB in all", "training loss", "held-out loss")
MORE = "more than {}"
BASES = ("dense", "PowerSGD", "PowerSGD in int8")
PERCENT = "conv"
"""The task of which right answers are shown: shares of right bytes say what the loss says."""


def tables(entries: Sequence[Result]) -> dict[str, str]:
    """By name of the mark."""
    return {f"long-{task}": table(entries, task) for task in LEVELS}


def table(entries: Sequence[Result], task: str) -> str:
    """A line for each variant that has runs; a note where some seeds are missing."""
    runs = runs_of(entries, task)
    rows = [
        [level, *line(runs, task, name)]
        for level, names in LEVELS[task].items()
        for name in names
        if name in runs
    ]
    right = ["right answers"] if task == PERCENT else []
    return markdown([*HEAD, *right, *(MORE.format(base) for base in BASES)], rows)


def line(runs: Runs, task: str, name: str) -> list[str]:
    """All that is said of a variant."""
    seeds = len(runs[name])
    right = [shown(over_seeds(runs, name, accuracy), 1) + "%"] if task == PERCENT else []
    return [
        name if seeds == len(SEEDS) else f"{name} ({seeds} of {len(SEEDS)} seeds)",
        f"{over_seeds(runs, name, sent_late).mean / 1e3:.1f}",
        f"{over_seeds(runs, name, sent_all).mean / 1e6:.0f}",
        shown(over_seeds(runs, name, trained), 3),
        shown(over_seeds(runs, name, held_out), 3),
        *right,
        *(shown_difference(difference(runs, name, b, held_out)) for b in bases(task, name)),
    ]


def shown(found: Estimate, digits: int, sign: str = "") -> str:
    """A mean, and half of its interval where there is one."""
    half = "" if found.half is None else f" ± {found.half:.{digits}f}"
    return f"{found.mean:{sign}.{digits}f}{half}"


def shown_difference(found: Estimate | None) -> str:
    """In bold where the interval is without 0."""
    if found is None:
        return "-"
    text = shown(found, 3, "+")
    return f"**{text}**" if found.low > 0 or found.high < 0 else text
