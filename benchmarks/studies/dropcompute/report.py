"""docs/dropcompute.json, the picture, and the table between the marks of dropcompute.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.pictures import plt, save
from benchmarks.common.results import Result, one_budget
from benchmarks.common.tables import markdown, publish
from lossycoll.simulate.threshold import curve, grid
from lossycoll.simulate.times import Times, compute_seconds

from .runs import MICRO_BATCHES, RANKS, VARIANTS, Run

NAME = "dropcompute"
MARKS = "dropcompute-measured"
REFERENCE = "no threshold"
COLOURS = dict(zip(VARIANTS, ("black", "tab:red", "tab:orange", "tab:blue"), strict=True))
CUTS = {"started": "DropCompute", "threshold": "given up when late"}


def times_of(entry: Result) -> Times:
    """Seconds of compute [steps, ranks, micro-batches] of a run without a threshold, from the first
    step on in which others may drop."""
    first = Run.of(entry.settings).budget.measured_from
    times = np.array(entry.figures["laps"][first:], dtype=np.float64)
    if times.shape[1:] != (RANKS, MICRO_BATCHES):
        raise ValueError(
            f"a run without a threshold has times of the shape {times.shape}, wanted (steps, "
            f"{RANKS}, {MICRO_BATCHES})"
        )
    return times


def communication(entry: Result) -> float:
    """Seconds of a step that aren't compute, the median."""
    first = Run.of(entry.settings).budget.measured_from
    rest = np.array(entry.figures["step_seconds"][first:]) - compute_seconds(times_of(entry))
    return max(0.0, float(np.median(rest)))


def results(entries: Sequence[Result]) -> dict[str, Any]:
    """By factor of the delay and variant: what was predicted and measured. Raises ValueError for
    runs of different budgets, and where the run without a threshold is missing."""
    budget = one_budget(entries)
    found: dict[str, Any] = {}
    for factor in sorted({entry.settings["factor"] for entry in entries}):
        variants = {e.settings["variant"]: e for e in entries if e.settings["factor"] == factor}
        if REFERENCE not in variants:
            raise ValueError(
                f"delays times {factor:g} have no run of {REFERENCE!r} to compare with"
            )
        reference = variants[REFERENCE]
        found[f"{factor:g}"] = {
            "communication": communication(reference),
            "curves": {cut: _curve(reference, cut) for cut in CUTS},
            "variants": {n: _variant(variants[n], reference) for n in VARIANTS if n in variants},
        }
    return {
        "budget": budget,
        "commits": sorted({entry.commit for entry in entries}),
        "delays": found,
    }


def _curve(reference: Result, cut: str) -> list[tuple[float, float, float]]:
    """(threshold, dropped, speed-up) as predicted from the times without a threshold."""
    times = times_of(reference)
    points = curve(times, grid(times), communication(reference), cut=cut)  # type: ignore[arg-type]
    return [(p.threshold, p.drop_rate, p.speedup) for p in points]


def _variant(entry: Result, reference: Result) -> dict[str, Any]:
    """Steps from the first on in which something may be dropped."""
    run = Run.of(entry.settings)
    first = run.budget.measured_from
    whole = RANKS * MICRO_BATCHES * (run.budget.steps - first)
    done = sum(entry.figures["completed"][first:])
    seconds = sum(entry.figures["step_seconds"][first:])
    usual = sum(reference.figures["step_seconds"][first:])
    out = {
        "step_seconds": seconds / (run.budget.steps - first),
        "dropped": 1 - done / whole,
        "speedup": (done / seconds) / (whole / usual),
        "threshold": None,
        "promised": None,
        "predicted": None,
        "predicted_dropped": None,
        "losses": entry.figures["losses"],
        "seconds": _seconds(entry),
        "all_steps": [round(s, 6) for s in entry.figures["step_seconds"]],
    }
    threshold = entry.figures["threshold"]
    if threshold is not None and math.isfinite(threshold):
        times, rest = times_of(reference), communication(reference)
        cut: Any = VARIANTS[run.variant].cut
        (point,) = curve(times, np.array([threshold]), rest, cut=cut)
        out |= {
            "threshold": threshold,
            "promised": entry.figures["promised"],
            "predicted": point.speedup,
            "predicted_dropped": point.drop_rate,
        }
    return out


def _seconds(entry: Result) -> list[float]:
    """Of training, at each validation."""
    ends = np.concatenate([[0.0], np.cumsum(entry.figures["step_seconds"])])
    return [round(float(ends[step]), 4) for step, _ in entry.figures["losses"]]


def table(found: Mapping[str, Any]) -> str:
    head = [
        *("delay", "variant", "threshold, s", "step, s", "dropped (predicted)"),
        *("speed-up, measured", "predicted", "promised by the warm-up"),
        *("loss at the end", "seconds"),
    ]
    rows = []
    for factor, delay in found["delays"].items():
        for name, variant in delay["variants"].items():
            known = variant["threshold"] is not None
            rows.append(
                [
                    f"x {factor}",
                    name,
                    f"{variant['threshold']:.4f}" if known else "-",
                    f"{variant['step_seconds']:.4f}",
                    f"{variant['dropped']:.1%}"
                    + (f" ({variant['predicted_dropped']:.1%})" if known else ""),
                    f"{variant['speedup']:.3f}",
                    f"{variant['predicted']:.3f}" if known else "-",
                    f"{variant['promised']:.3f}" if known else "-",
                    f"{variant['losses'][-1][1]:.4f}",
                    f"{variant['seconds'][-1]:.1f}",
                ]
            )
    return markdown(head, rows)


def write(entries: Sequence[Result], folder: Path) -> str:
    """Writes all files; returns the table."""
    found = results(entries)
    text = table(found)
    publish(folder, NAME, found, f"{NAME}.md", {MARKS: text}, partial(draw, found), indent=None)
    return text


def draw(found: Mapping[str, Any], path: Path) -> None:
    """A row for each delay: speed-up over the threshold, and step times."""
    delays = found["delays"]
    size = (10, 3.9 * len(delays))
    figure, axes = plt.subplots(len(delays), 2, figsize=size, layout="constrained", squeeze=False)
    first = found["budget"]["skip"] + found["budget"]["warm_up"]
    for (factor, delay), row in zip(delays.items(), axes, strict=True):
        _draw_speedups(delay, row[0], factor)
        _draw_steps(delay, row[1], first)
        row[1].legend(fontsize=8)
    save(figure, path, dpi=100)


def _draw_speedups(delay: Mapping[str, Any], axis: Any, factor: str) -> None:
    for cut, name in CUTS.items():
        thresholds, _, speedups = zip(*delay["curves"][cut], strict=True)
        axis.plot(thresholds, speedups, color=COLOURS[name], label=f"predicted, {name}")
    for name, variant in delay["variants"].items():
        if variant["threshold"] is not None:
            label = f"measured, {name}"
            at = variant["threshold"], variant["speedup"]
            axis.plot(*at, "o", color=COLOURS[name], markeredgecolor="black", label=label)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set_title(f"the paper's delay times {factor}, {RANKS} ranks", fontsize=10)
    axis.set_xlabel("threshold, seconds")
    axis.set_ylabel("micro-batches in a second, over those without")
    axis.legend(fontsize=7)


def _draw_steps(delay: Mapping[str, Any], axis: Any, first: int) -> None:
    for name, variant in delay["variants"].items():
        seconds = np.sort(variant["all_steps"][first:])
        share = np.arange(1, len(seconds) + 1) / len(seconds)
        axis.step(seconds, share, where="post", color=COLOURS[name], label=name)
    axis.set_xlabel("seconds of a step")
    axis.set_ylabel("share of steps that took at most that")
