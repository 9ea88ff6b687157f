"""The tables of long trainings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common.results import Result
from benchmarks.common.tables import markdown
from benchmarks.studies.quality.statistics import Estimate, estimate

from .variants import DENSE, INT8, LEVELS, SEEDS

Runs = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""A task's figures by variant and seed."""
Measure = Callable[[Mapping[str, Any]], float]


def runs_of(entries: Sequence[Result], task: str) -> Runs:
    """Those of ``task`` in results of any kind."""
    out: dict[str, dict[int, Mapping[str, Any]]] = {}
    for entry in entries:
        if entry.settings["kind"] == "long" and entry.settings["task"] == task:
            (variant,) = entry.settings["variants"]
            out.setdefault(variant, {})[entry.settings["seed"]] = entry.figures
    return out


def trained(figures: Mapping[str, Any]) -> float:
    """The loss of the last steps on what is trained, nats."""
    return float(figures["losses"][-1])


def held_out(figures: Mapping[str, Any]) -> float:
    """The loss on what isn't, nats."""
    return float(figures["held_out"]["loss"])


def accuracy(figures: Mapping[str, Any]) -> float:
    """Right answers on what isn't trained, in %."""
    return float(100 * figures["held_out"]["accuracy"])


def sent_late(figures: Mapping[str, Any]) -> float:
    """Bytes that a rank sends in a step, once not all is sent any more."""
    return float(figures["bytes"]["compressed"])


def sent_all(figures: Mapping[str, Any]) -> float:
    """Bytes that a rank sends in the whole training."""
    start, sent = figures["start"], figures["bytes"]
    late = figures["steps"] - start
    return float(start * sent["whole"] + late * sent["compressed"])


def over_seeds(runs: Runs, variant: str, measure: Measure) -> Estimate:
    """The mean over the seeds there are."""
    return estimate(measure(figures) for figures in runs[variant].values())


def bases(task: str, variant: str) -> tuple[str, ...]:
    """What a variant is compared with: all bytes; PowerSGD in as many bytes as the variant, the
    same in int8, and ARC-Top-K with ef14. "" where there is none."""
    level = next(names for names in LEVELS[task].values() if variant in names)
    factors = [name for name in level if name.startswith("PowerSGD")]
    plain = next((name for name in factors if INT8 not in name), "")
    coded = next((name for name in factors if INT8 in name), "")
    rows = (name for name in level if name.startswith("ARC") and name.endswith("ef14"))
    return DENSE, plain, coded, next(rows, "")


def difference(runs: Runs, variant: str, base: str, measure: Measure) -> Estimate | None:
    """What a variant has more than another, each seed by itself; None for itself, and without
    common seeds."""
    seeds = runs[variant].keys() & runs.get(base, {}).keys()
    if base == variant or not seeds:
        return None
    return estimate(
        measure(runs[variant][seed]) - measure(runs[base][seed]) for seed in sorted(seeds)
    )


HEAD = ("bytes", "variant", "kB a step", "MB in all", "training loss", "held-out loss")
MORE = "more than {}"
BASES = ("dense", "PowerSGD", "PowerSGD in int8", "ARC with ef14")
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
