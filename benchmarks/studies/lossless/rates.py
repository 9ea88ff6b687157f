"""Rates that follow from a line of the results."""

from __future__ import annotations

from typing import Any

from .cells import RAW_BASE, bus_factor

Entry = dict[str, Any]
Row = dict[str, Any]


def bus(entry: Entry, row: Row, way: str) -> float:
    """GB/s."""
    factor = bus_factor(row["collective"], entry["job"]["ranks"])
    return float(1e-9 * factor * row["bytes"] / row["ways"][way]["p50"])


def cpu_per_gb(entry: Entry, row: Row, way: str) -> float:
    """CPU seconds of a rank for each GB that it has to send and to receive."""
    factor = bus_factor(row["collective"], entry["job"]["ranks"])
    return float(row["ways"][way]["cpu"] / (1e-9 * factor * row["bytes"]))


def raw_share(entry: Entry, size: int) -> float:
    """All-reduce's bytes per second against those of bare sockets on the same wire."""
    row = next(row for row in entry["found"]["rows"] if row["bytes"] == size)
    return bus(entry, row, "lossy") / float(entry["found"]["raw"][RAW_BASE]["gb_per_s"])
