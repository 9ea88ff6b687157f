"""Rates that follow from a line of the results."""

from __future__ import annotations

from typing import Any

from benchmarks.common.results import Result

from .cells import RAW_BASE, bus_factor

Row = dict[str, Any]


def bus(entry: Result, row: Row, variant: str) -> float:
    """GB/s."""
    factor = bus_factor(row["collective"], entry.settings["ranks"])
    return float(1e-9 * factor * row["bytes"] / row["variants"][variant]["p50"])


def cpu_per_gb(entry: Result, row: Row, variant: str) -> float:
    """CPU seconds of a rank for each GB that it has to send and to receive."""
    factor = bus_factor(row["collective"], entry.settings["ranks"])
    return float(row["variants"][variant]["cpu"] / (1e-9 * factor * row["bytes"]))


def raw_share(entry: Result, size: int) -> float:
    """All-reduce's bytes per second against those of bare sockets on the same wire."""
    row = next(row for row in entry.figures["rows"] if row["bytes"] == size)
    return bus(entry, row, "lossy") / float(entry.figures["raw"][RAW_BASE]["gb_per_s"])
