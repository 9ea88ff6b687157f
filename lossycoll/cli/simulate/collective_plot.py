"""A sweep of a simulated collective, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt
import numpy as np


def draw(name: str, rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Writes the picture to ``path``, a PNG: time beside its limit, and what is missing."""
    values = [row[name] for row in rows]
    figure, (time, missing) = plt.subplots(2, 1, figsize=(8, 7), layout="constrained", sharex=True)
    time.plot(values, [row["seconds"] for row in rows], marker="o", label="median")
    time.plot(values, [row["seconds_p99"] for row in rows], marker=".", label="99th percentile")
    intervals = np.array([row["seconds_interval"] for row in rows])
    if (intervals[:, 1] > intervals[:, 0]).any():
        label = "error of hosts that stand for others"
        time.fill_between(values, *intervals.T, alpha=0.2, label=label)
    limits = [row["limit_seconds"] for row in rows]
    time.plot(values, limits, color="black", linestyle=":", label="limit")
    time.set(ylabel="seconds", title=title, yscale="log")
    time.legend()
    missing.plot(values, [100 * row["missing"] for row in rows], marker="o")
    missing.set(xlabel=name.replace("_", " "), ylabel="missing, % of packets")
    missing.set_ylim(bottom=0)
    for axes in (time, missing):
        axes.grid(alpha=0.3)
    if min(values) > 0 and max(values) >= 8 * min(values):
        missing.set_xscale("log", base=2)
        missing.set_xticks(values, [f"{value:g}" for value in values])
    figure.savefig(path, dpi=130)
    plt.close(figure)
