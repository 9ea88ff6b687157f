"""What the report and its picture read off long trainings: means over seeds, and differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common.results import Result
from benchmarks.studies.quality.statistics import Estimate, estimate

from .variants import DENSE, INT8, LEVELS

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


def bases(task: str, variant: str) -> tuple[str, str, str]:
    """What a variant is compared with: all bytes; PowerSGD in as many bytes as the variant, and the
    same in int8. "" where there is none."""
    level = next(names for names in LEVELS[task].values() if variant in names)
    factors = [name for name in level if name.startswith("PowerSGD")]
    plain = next((name for name in factors if INT8 not in name), "")
    return DENSE, plain, next((name for name in factors if INT8 in name), "")


def difference(runs: Runs, variant: str, base: str, measure: Measure) -> Estimate | None:
    """What a variant has more than another, each seed by itself; None for itself, and without
    common seeds."""
    seeds = runs[variant].keys() & runs.get(base, {}).keys()
    if base == variant or not seeds:
        return None
    return estimate(
        measure(runs[variant][seed]) - measure(runs[base][seed]) for seed in sorted(seeds)
    )
