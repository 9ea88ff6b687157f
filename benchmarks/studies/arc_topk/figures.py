"""What the report and its plots read off the results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.common.results import Result

from .cells import Cell

MBITS = (100.0, 1000.0)
Curve = Sequence[Sequence[float]]
"""(step, seconds, bytes, loss, share of right answers)."""


def trainings(entries: Sequence[Result]) -> dict[tuple[str, float, str], Curve]:
    """Curves by (task, loss of packets, variant)."""
    out = {}
    for entry in entries:
        cell = Cell.of(entry.settings)
        if cell.kind == "train":
            for variant, curve in entry.figures.items():
                out[cell.task, cell.loss, variant] = curve
    return out


def step_figures(entries: Sequence[Result]) -> dict[tuple[float, str], tuple[float, float, float]]:
    """(median seconds, least, bytes) by rate and variant."""
    out = {}
    for entry in entries:
        cell = Cell.of(entry.settings)
        if cell.kind == "steps":
            for variant, one in entry.figures.items():
                seconds, volume = one["seconds"], one["bytes"]
                out[cell.mbit, variant] = (
                    statistics.median(seconds),
                    min(seconds),
                    statistics.median(volume),
                )
    return out
