"""docs/dropcompute.json, the picture, and the table between the marks of dropcompute.md."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt

from benchmarks.studies.quality.report import between, markdown
from lossycoll.simulate.threshold import curve, grid
from lossycoll.simulate.times import Times, compute_seconds

from .runs import MICRO_BATCHES, RANKS, WAYS, Run

NAME = "dropcompute"
MARKS = "dropcompute-measured"
REFERENCE = "no threshold"
COLOURS = dict(zip(WAYS, ("black", "tab:red", "tab:orange", "tab:blue"), strict=True))
CUTS = {"started": "DropCompute", "threshold": "given up when late"}


def times_of(entry: Mapping[str, Any]) -> Times:
    """Seconds of compute [steps, ranks, micro-batches] of a run without a threshold, from the first
    step on in which others may drop."""
    first = Run.of(entry["run"]).budget.measured_from
    times = np.array(entry["laps"][first:], dtype=np.float64)
    if times.shape[1:] != (RANKS, MICRO_BATCHES):
        raise ValueError(
            f"a run without a threshold has times of the shape {times.shape}, wanted (steps, "
            f"{RANKS}, {MICRO_BATCHES})"
        )
    return times


def communication(entry: Mapping[str, Any]) -> float:
    """Seconds of a step that aren't compute, the median."""
    first = Run.of(entry["run"]).budget.measured_from
    rest = np.array(entry["step_seconds"][first:]) - compute_seconds(times_of(entry))
    return max(0.0, float(np.median(rest)))


def results(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By factor of the delay and way: what was predicted, and what was measured. Raises ValueError
    for runs of different budgets, and where the run without a threshold is missing."""
    budgets = {json.dumps(entry["run"]["budget"], sort_keys=True) for entry in entries}
    if len(budgets) != 1:
        raise ValueError(f"runs of {len(budgets)} budgets, wanted one: {sorted(budgets)}")
    found: dict[str, Any] = {}
    for factor in sorted({entry["run"]["factor"] for entry in entries}):
        ways = {e["run"]["way"]: e for e in entries if e["run"]["factor"] == factor}
        if REFERENCE not in ways:
            raise ValueError(
                f"delays times {factor:g} have no run of {REFERENCE!r} to compare with"
            )
        reference = ways[REFERENCE]
        found[f"{factor:g}"] = {
            "communication": communication(reference),
            "curves": {cut: _curve(reference, cut) for cut in CUTS},
            "ways": {name: _way(ways[name], reference) for name in WAYS if name in ways},
        }
    return {
        "budget": json.loads(*budgets),
        "commits": sorted({entry["commit"] for entry in entries}),
        "delays": found,
    }


def _curve(reference: Mapping[str, Any], cut: str) -> list[tuple[float, float, float]]:
    """(threshold, dropped, speed-up) as predicted from the times without a threshold."""
    times = times_of(reference)
    points = curve(times, grid(times), communication(reference), cut=cut)  # type: ignore[arg-type]
    return [(p.threshold, p.drop_rate, p.speedup) for p in points]


def _way(entry: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Steps from the first on in which something may be dropped."""
    run = Run.of(entry["run"])
    first = run.budget.measured_from
    whole = RANKS * MICRO_BATCHES * (run.budget.steps - first)
    done, seconds = sum(entry["completed"][first:]), sum(entry["step_seconds"][first:])
    usual = sum(reference["step_seconds"][first:])
    out = {
        "step_seconds": seconds / (run.budget.steps - first),
        "dropped": 1 - done / whole,
        "speedup": (done / seconds) / (whole / usual),
        "threshold": None,
        "promised": None,
        "predicted": None,
        "predicted_dropped": None,
        "losses": entry["losses"],
        "seconds": _seconds(entry),
        "all_steps": [round(s, 6) for s in entry["step_seconds"]],
    }
    threshold = entry["threshold"]
    if threshold is not None and math.isfinite(threshold):
        times, rest = times_of(reference), communication(reference)
        cut: Any = WAYS[run.way].cut
        (point,) = curve(times, np.array([threshold]), rest, cut=cut)
        out |= {
            "threshold": threshold,
            "promised": entry["promised"],
            "predicted": point.speedup,
            "predicted_dropped": point.drop_rate,
        }
    return out


def _seconds(entry: Mapping[str, Any]) -> list[float]:
    """Of training, at each validation."""
    ends = np.concatenate([[0.0], np.cumsum(entry["step_seconds"])])
    return [round(float(ends[step]), 4) for step, _ in entry["losses"]]


def table(found: Mapping[str, Any]) -> str:
    head = [
        *("delay", "way", "threshold, s", "step, s", "dropped (predicted)"),
        *("speed-up, measured", "predicted", "promised by the warm-up"),
        *("loss at the end", "seconds"),
    ]
    rows = []
    for factor, delay in found["delays"].items():
        for name, way in delay["ways"].items():
            known = way["threshold"] is not None
            rows.append(
                [
                    f"x {factor}",
                    name,
                    f"{way['threshold']:.4f}" if known else "-",
                    f"{way['step_seconds']:.4f}",
                    f"{way['dropped']:.1%}"
                    + (f" ({way['predicted_dropped']:.1%})" if known else ""),
                    f"{way['speedup']:.3f}",
                    f"{way['predicted']:.3f}" if known else "-",
                    f"{way['promised']:.3f}" if known else "-",
                    f"{way['losses'][-1][1]:.4f}",
                    f"{way['seconds'][-1]:.1f}",
                ]
            )
    return markdown(head, rows)


def write(entries: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Writes all files; returns the table."""
    found = results(entries)
    (folder / f"{NAME}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    page = folder / f"{NAME}.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(between(text, MARKS, table(found)), encoding="utf-8")
    draw(found, folder / f"{NAME}.png")
    return table(found)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """A row for each delay: speed-up over the threshold, step times, loss over steps and time."""
    delays = found["delays"]
    size = (17, 3.9 * len(delays))
    figure, axes = plt.subplots(len(delays), 4, figsize=size, layout="constrained", squeeze=False)
    first = found["budget"]["skip"] + found["budget"]["warm_up"]
    for (factor, delay), row in zip(delays.items(), axes, strict=True):
        _draw_speedups(delay, row[0], factor)
        _draw_steps(delay, row[1], first)
        for axis, by in ((row[2], "steps"), (row[3], "seconds")):
            for name, way in delay["ways"].items():
                steps = [step for step, _ in way["losses"]]
                losses = [loss for _, loss in way["losses"]]
                x = steps if by == "steps" else way["seconds"]
                axis.plot(x, losses, color=COLOURS[name], linewidth=1.2, label=name)
            axis.set_xlabel(by if by == "steps" else "seconds of training")
            axis.set_ylabel("validation loss, nats per byte")
        row[2].legend(fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_speedups(delay: Mapping[str, Any], axis: Any, factor: str) -> None:
    for cut, name in CUTS.items():
        thresholds, _, speedups = zip(*delay["curves"][cut], strict=True)
        axis.plot(thresholds, speedups, color=COLOURS[name], label=f"predicted, {name}")
    for name, way in delay["ways"].items():
        if way["threshold"] is not None:
            label = f"measured, {name}"
            at = way["threshold"], way["speedup"]
            axis.plot(*at, "o", color=COLOURS[name], markeredgecolor="black", label=label)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set_title(f"the paper's delay times {factor}, {RANKS} ranks", fontsize=10)
    axis.set_xlabel("threshold, seconds")
    axis.set_ylabel("micro-batches in a second, over those without")
    axis.legend(fontsize=7)


def _draw_steps(delay: Mapping[str, Any], axis: Any, first: int) -> None:
    for name, way in delay["ways"].items():
        seconds = np.sort(way["all_steps"][first:])
        share = np.arange(1, len(seconds) + 1) / len(seconds)
        axis.step(seconds, share, where="post", color=COLOURS[name], label=name)
    axis.set_xlabel("seconds of a step")
    axis.set_ylabel("share of steps that took at most that")
