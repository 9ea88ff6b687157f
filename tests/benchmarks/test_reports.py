"""`make reports` writes what stands between the marks of every page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from benchmarks import reports
from benchmarks.common import report

ROOT = Path(__file__).resolve().parents[2]
MARKED = re.compile(r"(<!-- ([^>]+): begin -->)(.*?)(<!-- \2: end -->)", re.DOTALL)
OF_TOOLS = ("messages of", "answers", "types of", "values in the store")
"""Marks that tools fill from the code: tests/repository/test_message_tables.py."""


def emptied(text: str) -> str:
    def without(found: re.Match[str]) -> str:
        if found[2].startswith(OF_TOOLS):
            return found[0]
        return f"{found[1]}\nempty\n{found[4]}"

    return MARKED.sub(without, text)


def test_emptied_is_what_reports_fill() -> None:
    assert emptied("a <!-- x: begin -->1<!-- x: end --> b") == (
        "a <!-- x: begin -->\nempty\n<!-- x: end --> b"
    )
    kept = "<!-- answers: begin -->1<!-- answers: end -->"
    assert emptied(kept) == kept


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_table_is_written_from_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the pages without their tables gets them back, to the last figure. Pictures aren't
    drawn: they take most of the time."""
    for name in ("savefig", "draw"):
        monkeypatch.setattr(report.Figure, name, lambda *_, **__: None)
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(ROOT / "docs" / report.KEPT, docs)
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    count = 0
    for page in pages:
        text = page.read_text(encoding="utf-8")
        count += len(MARKED.findall(text))
        (tmp_path / page.relative_to(ROOT)).write_text(emptied(text), encoding="utf-8")
    assert count > 70

    assert reports.write(docs) == 0
    for page in pages:
        written = (tmp_path / page.relative_to(ROOT)).read_text(encoding="utf-8")
        assert written == page.read_text(encoding="utf-8"), f"{page.name}: run make reports"
