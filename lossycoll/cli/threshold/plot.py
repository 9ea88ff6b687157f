"""A prediction as a picture: speed-up over threshold and over drop rate, and compute times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from lossycoll.simulate.times import compute_seconds

from .prediction import Prediction

CHOSEN: dict[str, Any] = {"color": "tab:red", "linestyle": "--", "linewidth": 1.2}


def draw(prediction: Prediction, path: Path) -> None:
    """Writes the picture of ``prediction`` to ``path``, a PNG."""
    figure, table = plt.subplots(2, 2, figsize=(10, 7.6), layout="constrained")
    gain, cost, spread, empty = table.flat
    empty.set_axis_off()
    what = "resampled" if prediction.resampled else "recorded"
    curves = (
        (prediction.choice.curve, f"{what} times", {"color": "tab:blue", "linewidth": 2.5}),
        (prediction.independent, "independent micro-batches", {"color": "tab:green"}),
        (prediction.fitted, "fitted distribution", {"color": "tab:orange", "linestyle": "--"}),
        (prediction.paper, "paper's normal formula", {"color": "tab:gray", "linestyle": ":"}),
    )
    for points, label, style in curves:
        speedups = [point.speedup for point in points]
        gain.plot([point.threshold for point in points], speedups, label=label, **style)
        cost.plot([100 * point.drop_rate for point in points], speedups, label=label, **style)
    if prediction.at is not None:
        label = f"chosen: {prediction.at.threshold:.4g} s"
        gain.axvline(prediction.at.threshold, label=label, **CHOSEN)
        label = f"{prediction.at.drop_rate:.1%} dropped: {prediction.at.speedup:.3f}"
        at = (100 * prediction.at.drop_rate, prediction.at.speedup)
        cost.plot(*at, "o", color="tab:red", label=label)
    for axes in (gain, cost):
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(ylabel="effective speed-up")
    gain.set(xlabel="threshold, s")
    gain.set_title("Speed-up against the threshold")
    cost.set(xlabel="micro-batches dropped, %")
    cost.set_title("Speed-up against what is dropped")
    _spread(spread, prediction)
    besides = f"{prediction.recorded.communication:.3g} s of a step besides compute"
    figure.suptitle(f"DropCompute, {prediction.workers} ranks, {besides}")
    for axes in (gain, cost, spread):
        axes.grid(alpha=0.3)
    # In a panel of its own: among three curves there is no room.
    handles, labels = gain.get_legend_handles_labels()
    empty.legend(handles, labels, loc="center")
    for axes in (cost, spread):
        axes.legend(*_own(axes, labels))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _own(axes: Axes, others: list[str]) -> tuple[list[Artist], list[str]]:
    """Entries that the legend below the figure does not have."""
    entries = zip(*axes.get_legend_handles_labels(), strict=True)
    own = [(handle, label) for handle, label in entries if label not in others]
    return [handle for handle, _ in own], [label for _, label in own]


def _spread(axes: Axes, prediction: Prediction) -> None:
    ranks = np.nansum(prediction.times, axis=2).ravel()
    for values, label, colour in (
        (ranks, "a rank", "tab:green"),
        (compute_seconds(prediction.times), "the slowest rank", "tab:purple"),
    ):
        axes.ecdf(values, label=label, color=colour, linewidth=2)
    if prediction.at is not None:
        axes.axvline(prediction.at.threshold, **CHOSEN)
    axes.margins(x=0.05)
    axes.set(xlabel="compute in a step, s", ylabel="share of the steps done by then")
    axes.set_title("What a threshold cuts off")
