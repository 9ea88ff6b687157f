"""The demo's picture: what loss costs, and the drift of the replicas beside theory's."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt

from .report import demo_runs

PARTS = 8


def means(curve: list[tuple[int, dict[str, Any]]], name: str) -> list[tuple[float, float]]:
    """The mean step and the mean of figure ``name``, of each of PARTS equal parts of the steps;
    left out are those that a log axis can't show."""
    last = curve[-1][0]
    parts: dict[int, list[tuple[int, float]]] = {}
    for step, figures in curve:
        parts.setdefault(math.ceil(PARTS * step / last), []).append((step, figures[name]))
    points = [
        (statistics.fmean(step for step, _ in part), statistics.fmean(value for _, value in part))
        for _, part in sorted(parts.items())
    ]
    return [(step, value) for step, value in points if value > 0]


def excess(run: dict[str, Any], base: dict[str, Any]) -> list[tuple[int, float]]:
    """(step, change of the validation perplexity against ``base``, in %), where both have one."""
    wanted = dict(base["curves"]["validation"])
    return [
        (step, 100 * math.expm1(loss - wanted[step]))
        for step, loss in run["curves"]["validation"]
        if step in wanted
    ]


def draw(results: dict[str, Any], path: Path) -> None:
    """Costs on the left, drift on the right, a line for each run."""
    figure, (costs, drift) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    runs, known = results["runs"], demo_runs()
    base_name = next(iter(runs))
    equal: list[str] = []
    for name, run in runs.items():
        label = f"{name}, {run['injected_loss']:.0%} lost" if run["injected_loss"] else name
        colour, width = known[name].colour, known[name].width
        style = {"color": colour, "marker": "o", "markersize": 4}
        points = zip(*excess(run, runs[base_name]), strict=True)
        costs.plot(*points, **style, linewidth=width, label=label)
        curve = run["curves"]["drift"]
        if measured := means(curve, "mean_square_distance"):
            drift.plot(*zip(*measured, strict=True), **style, linewidth=width)
        else:
            equal.append(name)
        if curve[-1][1]["expected"]:
            expected = zip(*means(curve, "expected"), strict=True)
            drift.plot(*expected, "--", color=colour, linewidth=2.4)
    zeros = f" (0: {', '.join(equal)})" if equal else ""
    drift.plot([], [], "--", color="tab:gray", linewidth=2.4, label="by theory")
    costs.set(xlabel="step", ylabel=f"% of the perplexity of {base_name}")
    costs.set_title(f"Validation perplexity against {base_name}")
    drift.set(xlabel="step", ylabel="squared L2 distance", yscale="log")
    drift.set_title(f"Distance between replicas{zeros}")
    for axes in (costs, drift):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(runs) + 1)
    figure.savefig(path, dpi=110)
    plt.close(figure)
