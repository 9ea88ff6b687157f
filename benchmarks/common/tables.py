"""Tables of a page of docs: between its marks, and as text in tables.json beside it.

A micro-benchmark says once which table is its own (:class:`Table`), has the option ``--report
docs`` (:func:`add_report`), and hands over its rows. ``make reports`` writes them again.
"""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.results import source

KEPT = "tables.json"
"""Tables as text, by page and mark: of measurements that keep nothing else."""
BEGIN, END = "<!-- {name}: begin -->", "<!-- {name}: end -->"
MEASURED = "measured"
"""Heading of the column that says when and by which code a row was measured."""


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


def kept(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Lines by page and mark; none where there is no tables.json."""
    path = folder / KEPT
    found: dict[str, dict[str, list[str]]] = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    )
    return found


def fill_and_keep(page: Path, name: str, table: str) -> None:
    """:func:`fill`, and ``tables.json`` beside the page, of which it can be written again."""
    fill(page, {name: table})
    pages = kept(page.parent)
    pages.setdefault(page.name, {})[name] = table.splitlines()
    write_json(page.parent / KEPT, pages)


def publish(
    folder: Path,
    name: str,
    found: Any,
    page: str,
    tables: Mapping[str, str],
    draw: Callable[[Path], None] | None = None,
    *,
    indent: int | None = 1,
) -> None:
    """Writes what a study has found as JSON, its tables between their marks in a page, and its
    picture."""
    write_json(folder / f"{name}.json", found, indent)
    fill(folder / page, tables)
    if draw is not None:
        draw(folder / f"{name}.png")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a sentence where there are no rows."""
    if not rows:
        return "No runs yet."
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def write_json(path: Path, data: Any, indent: int | None = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=indent) + "\n", encoding="utf-8")


def add_report(parser: ArgumentParser, page: str) -> None:
    """The option ``--report DIR``."""
    parser.add_argument("--report", type=Path, help=f"folder of {page}, for the table")


def taken() -> str:
    """When, by which code and where a table was measured, and the load there."""
    found = source()
    return (
        f"Measured on {found['date']} at commit {found['commit']}, {found['machine']}, "
        f"load {os.getloadavg()[0]:.0f}."
    )


@dataclass(frozen=True)
class Table:
    """A table that one command measures, whole or a few rows in each run.

    Args:
        page: Its file's name.
        name: Of its marks.
        head: Headings, with " | " between them.
        keys: The first cells of a row, by which it replaces one of an earlier run. Such a table has
            a last column that says when each row was measured. 0: a run replaces the whole table,
            and a line below says when that was.
        dated: Whether that line is there. Pages for users have no commits: a study says it.
    """

    page: str
    name: str
    head: str
    keys: int = 0
    dated: bool = True

    def report(self, folder: Path | None, rows: Sequence[Sequence[str]], below: str = "") -> str:
        """The table of these rows, which it puts into the page and keeps if there is a folder.

        Args:
            folder: Of the page; None: nothing is written.
            rows: Without the last column.
            below: What else the rows say, in sentences.
        """
        head = self.head.split(" | ")
        table = markdown(head, rows)
        if folder is None:
            return table
        if self.keys:
            now = source()
            cell = f"{now['date']}, {now['commit']}"
            found = {row[: self.keys]: row for row in self.rows(folder)}
            found |= {tuple(row[: self.keys]): (*row, cell) for row in rows}
            text = markdown([*head, MEASURED], [*found.values()])
        else:
            text = f"{table}\n\n{taken()}" if self.dated else table
        if below:
            text += f"\n\n{below}"
        fill_and_keep(folder / self.page, self.name, text)
        return table

    def rows(self, folder: Path) -> list[tuple[str, ...]]:
        """Those that are kept, without the headings."""
        lines = kept(folder).get(self.page, {}).get(self.name, [])
        table = [line for line in lines if line.startswith("| ")]
        return [tuple(line[2:-2].split(" | ")) for line in table[2:]]
