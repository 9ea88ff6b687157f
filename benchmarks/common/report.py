"""Reports: pictures, beside the tables and JSON of :mod:`benchmarks.common.tables`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from benchmarks.common.tables import (
    KEPT,
    between,
    fill,
    fill_and_keep,
    markdown,
    write_json,
)

__all__ = [
    "KEPT",
    "between",
    "fill",
    "fill_and_keep",
    "markdown",
    "plt",
    "publish",
    "save",
    "write_json",
]


def publish(
    folder: Path, name: str, found: Any, text: str, draw: Callable[[Any, Path], None], page: str
) -> str:
    """Writes what a study has found as JSON, its table between its marks in a page, and its
    picture; returns the table."""
    write_json(folder / f"{name}.json", found, indent=None)
    fill(folder / page, {name: text})
    draw(found, folder / f"{name}.png")
    return text


def save(figure: Figure, path: Path, dpi: int = 110) -> None:
    """Writes the picture and closes it."""
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
