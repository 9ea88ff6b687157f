"""`make reports` writes what stands between the marks of every page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import reports
from benchmarks.common import pictures, tables

ROOT = Path(__file__).resolve().parents[2]
MARKED = re.compile(r"(<!-- ([^>]+): begin -->)(.*?)(<!-- \2: end -->)", re.DOTALL)
OF_TOOLS = ("messages of", "answers", "types of", "values in the store")
"""Marks that tools fill from the code: tests/repository/test_message_tables.py."""


MOST_PANELS = 4


def panels(figure: Figure) -> list[Axes]:
    """The places in which a figure shows something: a twin and a bar of colours are no others."""
    shown = {one.get_subplotspec(): one for one in figure.axes if one.get_visible()}
    shown.pop(None, None)
    return [*shown.values()]


def named(axis: Axes) -> bool:
    """Whether both axes have names, or what stands beside or below has."""
    if axis.get_xlabel() and axis.get_ylabel():
        return True
    others = axis.figure.axes
    across = any(one.get_xlabel() for one in others)
    return across and (any(one.get_ylabel() for one in others) or bool(axis.get_yticklabels()))


def test_panels_are_counted_once() -> None:
    figure, axes = pictures.plt.subplots(2, 2)
    axes[0][0].twinx()
    axes[1][1].set_visible(False)
    assert len(panels(figure)) == 3
    assert not named(axes[0][0])
    axes[0][0].set(xlabel="seconds", ylabel="loss")
    assert named(axes[0][0])
    pictures.plt.close(figure)


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
    drawn, which takes most of the time, but have four panels at most, whose axes have names."""
    drawn: dict[str, list[Axes]] = {}

    def take(figure: Figure, path: Path, **_: object) -> None:
        drawn[Path(path).name] = panels(figure)

    monkeypatch.setattr(Figure, "savefig", take)
    monkeypatch.setattr(Figure, "draw", lambda *_, **__: None)
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(ROOT / "docs" / tables.KEPT, docs)
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
    assert len(drawn) > 20
    assert {name: len(found) for name, found in drawn.items() if len(found) > MOST_PANELS} == {}
    nameless = {name for name, found in drawn.items() if not all(map(named, found))}
    assert nameless == set()
