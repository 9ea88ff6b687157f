"""Tables that a command writes into a page, whole or row by row."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common import tables
from benchmarks.common.tables import Table, kept

TAKEN = {"date": "2026-11-29", "commit": "1a86be21", "machine": "2 cores, x86_64"}


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a page that has a place for a table."""
    monkeypatch.setattr(tables, "source", lambda: TAKEN)
    (tmp_path / "a.md").write_text("Before.\n\n<!-- x: begin -->\n\n<!-- x: end -->\n\nBehind.\n")
    return tmp_path


def test_a_whole_table_says_when_it_was_measured(docs: Path) -> None:
    table = Table("a.md", "x", "size | ms")
    assert table.report(None, [["1", "2"]]) == "| size | ms |\n| --- | --- |\n| 1 | 2 |"
    assert kept(docs) == {}
    table.report(docs, [["1", "2"], ["3", "4"]], below="All is well.")
    table.report(docs, [["1", "5"]], below="All is well.")
    lines = kept(docs)["a.md"]["x"]
    assert lines[:3] == ["| size | ms |", "| --- | --- |", "| 1 | 5 |"]
    assert lines[4].startswith("Measured on 2026-11-29 at commit 1a86be21, 2 cores, x86_64, load ")
    assert lines[5:] == ["", "All is well."]
    text = "\n".join(lines)
    assert (docs / "a.md").read_text() == (
        f"Before.\n\n<!-- x: begin -->\n\n{text}\n\n<!-- x: end -->\n\nBehind.\n"
    )


def test_rows_are_replaced_by_their_keys(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table("a.md", "x", "ranks | size | ms", keys=2)
    table.report(docs, [["2", "1 MiB", "5"], ["4", "1 MiB", "6"]])
    monkeypatch.setattr(tables, "source", lambda: TAKEN | {"date": "2026-11-30"})
    table.report(docs, [["2", "1 MiB", "7"], ["8", "1 MiB", "8"]])
    assert table.rows(docs) == [
        ("2", "1 MiB", "7", "2026-11-30, 1a86be21"),
        ("4", "1 MiB", "6", "2026-11-29, 1a86be21"),
        ("8", "1 MiB", "8", "2026-11-30, 1a86be21"),
    ]
