"""The demo's picture: loss curves of all runs, and the drift of the replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt

COLOURS = {"gloo": "tab:blue", "clean": "tab:green", "lossy": "tab:red"}
SMOOTHED_STEPS = 20


def smooth(values: list[float], width: int = SMOOTHED_STEPS) -> list[float]:
    """The mean of the last ``width`` values at each point; fewer at the beginning."""
    out = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        out.append(sum(window) / len(window))
    return out


def draw(results: dict[str, Any], path: Path) -> None:
    figure, (losses, drift) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, run in results["runs"].items():
        colour = COLOURS[name]
        curves = run["curves"]
        label = f"{name}, {run['injected_loss']:.0%} lost" if name == "lossy" else name
        steps = range(1, len(curves["train"]) + 1)
        losses.plot(steps, smooth(curves["train"]), color=colour, alpha=0.35, linewidth=1)
        losses.plot(*zip(*curves["validation"], strict=True), "o-", color=colour, label=label)
        drift.plot(
            [step for step, _ in curves["drift"]],
            [100 * figures["relative_rms"] for _, figures in curves["drift"]],
            "o-",
            color=colour,
            label=label,
        )
    losses.set(xlabel="step", ylabel="nats per byte")
    losses.set_title("Loss: validation (dots), training (faint)")
    losses.legend()
    drift.set(xlabel="step", ylabel="% of the parameter norm")
    drift.set_title("Distance between replicas (RMS over pairs)")
    drift.legend()
    for axes in (losses, drift):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
