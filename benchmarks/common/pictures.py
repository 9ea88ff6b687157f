"""Pictures of reports: curves, panels, and matplotlib without a display."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

__all__ = ["Point", "band", "by_time", "panels", "plt", "save"]

Point = tuple[float, int, float]
"""Seconds, step and loss."""


def panels(count: int, wide: float, high: float) -> tuple[Figure, list[Axes]]:
    """Panels in rows of two, of so many inches each; the last of an odd number is twice as wide."""
    rows: Any = [[number, number + 1] for number in range(0, count - 1, 2)]
    rows += [[count - 1] * min(2, count)] if count % 2 else []
    size = (wide * len(rows[0]), high * len(rows))
    figure, axes = plt.subplot_mosaic(rows, figsize=size, layout="constrained")
    return figure, [axes[number] for number in range(count)]


def band(
    axis: Axes, xs: Sequence[float], curves: Sequence[Sequence[float]], label: str, **style: Any
) -> None:
    """Draws the median of several runs' curves, and a band from the least to the greatest."""
    points = list(zip(*curves, strict=True))
    (line,) = axis.plot(xs, [statistics.median(one) for one in points], label=label, **style)
    if len(curves) > 1:
        low, high = [min(one) for one in points], [max(one) for one in points]
        axis.fill_between(xs, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def by_time(axis: Axes, curves: Sequence[Sequence[Point]], **style: Any) -> Line2D:
    """Draws several runs' losses over seconds, of the steps that all have had: the medians, and a
    band from the fastest to the slowest."""
    at = [list(zip(*points, strict=True)) for points in zip(*curves, strict=False)]
    losses = [statistics.median(loss) for _, _, loss in at]
    (line,) = axis.plot([statistics.median(seconds) for seconds, _, _ in at], losses, **style)
    first, last = ([end(seconds) for seconds, _, _ in at] for end in (min, max))
    axis.fill_betweenx(losses, first, last, color=line.get_color(), alpha=0.2, linewidth=0)
    return line


def save(figure: Figure, path: Path, dpi: int = 110) -> None:
    """Writes the picture and closes it."""
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
