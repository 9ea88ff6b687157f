"""The demo's picture: loss curves of all runs, what loss costs, and the drift of the replicas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt

COLOURS = {
    "gloo": "tab:blue",
    "clean": "tab:green",
    "lossy": "tab:red",
    "bounded": "tab:orange",
    "sharded": "tab:purple",
}
# Curves lie on top of one another: the first is drawn wide, the others within it.
WIDTHS = {"gloo": 6.0, "clean": 3.5, "lossy": 1.2, "bounded": 1.2, "sharded": 1.2}
SMOOTHED_STEPS = 20


def smooth(values: list[float], width: int = SMOOTHED_STEPS) -> list[float]:
    """The mean of the last ``width`` values at each point; fewer at the beginning."""
    out = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        out.append(sum(window) / len(window))
    return out


def excess(run: dict[str, Any], base: dict[str, Any]) -> list[tuple[int, float]]:
    """(step, change of the validation perplexity against ``base``, in %), where both have one."""
    wanted = dict(base["curves"]["validation"])
    return [
        (step, 100 * math.expm1(loss - wanted[step]))
        for step, loss in run["curves"]["validation"]
        if step in wanted
    ]


def draw(results: dict[str, Any], path: Path) -> None:
    figure, (losses, costs, drift) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    runs = results["runs"]
    base_name = next(iter(runs))
    for name, run in runs.items():
        curves = run["curves"]
        label = f"{name}, {run['injected_loss']:.0%} lost" if run["injected_loss"] else name
        style = {"color": COLOURS[name], "linewidth": WIDTHS[name], "label": label}
        steps = range(1, len(curves["train"]) + 1)
        losses.plot(steps, smooth(curves["train"]), color=COLOURS[name], alpha=0.35, linewidth=1)
        losses.plot(*zip(*curves["validation"], strict=True), **style)
        costs.plot(*zip(*excess(run, runs[base_name]), strict=True), "o-", markersize=4, **style)
        drift.plot(
            [step for step, _ in curves["drift"]],
            [100 * figures["relative_rms"] for _, figures in curves["drift"]],
            "o-",
            markersize=4,
            **style,
        )
    losses.set(xlabel="step", ylabel="nats per byte")
    losses.set_title("Loss: validation (bold), training (faint)")
    costs.set(xlabel="step", ylabel=f"% of the perplexity of {base_name}")
    costs.set_title(f"Validation perplexity against {base_name}")
    drift.set(xlabel="step", ylabel="% of the parameter norm")
    drift.set_title("Distance between replicas (RMS over pairs)")
    for axes in (losses, costs, drift):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
