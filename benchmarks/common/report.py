"""Reports: tables between the marks of a page of docs, JSON, pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

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

KEPT = "tables.json"
"""Tables as text, by page and mark: of measurements that keep nothing else."""
BEGIN, END = "<!-- {name}: begin -->", "<!-- {name}: end -->"


def between(text: str, name: str, table: str) -> str:
    """The text with what stands between the marks of ``name`` replaced; unchanged without them."""
    begin, end = BEGIN.format(name=name), END.format(name=name)
    head, mark, rest = text.partition(begin)
    _, other, tail = rest.partition(end)
    return f"{head}{mark}\n\n{table}\n\n{other}{tail}" if mark and other else text


def fill(page: Path, tables: Mapping[str, str]) -> None:
    """Puts each table between its marks; does nothing where there is no such page."""
    if not page.exists():
        return
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = between(text, name, table)
    page.write_text(text, encoding="utf-8")


def fill_and_keep(page: Path, name: str, table: str) -> None:
    """:func:`fill`, and ``tables.json`` beside the page, of which it can be written again."""
    fill(page, {name: table})
    path = page.parent / KEPT
    pages = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    pages.setdefault(page.name, {})[name] = table.splitlines()
    write_json(path, pages)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a sentence where there are no rows."""
    if not rows:
        return "No runs yet."
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def write_json(path: Path, data: Any, indent: int | None = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=indent) + "\n", encoding="utf-8")


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
