"""The glossary of docs/design.md is kept: no word for what another one means."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DESIGN = ROOT / "docs" / "design.md"
WRITTEN = {path for path in (ROOT / "docs").glob("*.md") if path.name != "api.md"}
PAGES = [*WRITTEN, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
"""All but the one that is made of the docstrings."""
SOURCES = [*(ROOT / "lossycoll").rglob("*.py"), *(ROOT / "native").rglob("*.[ch]")]


def rows(head: str) -> list[list[str]]:
    """The cells of the table of docs/design.md with this head."""
    _, _, rest = DESIGN.read_text(encoding="utf-8").partition(f"{head}\n|---|---|\n")
    table = rest.partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def words(text: str) -> list[str]:
    """The words of names and of prose: of ``_retry_AllVotes``, retry, all and votes."""
    return re.findall(r"[a-z]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).lower())


def said(text: str, term: str) -> bool:
    """Whether a term stands in a text, or its plural."""
    wanted, found = words(term), words(text)
    plural = [*wanted[:-1], wanted[-1] + "s"]
    length = len(wanted)
    runs = [found[i : i + length] for i in range(len(found) - length + 1)]
    return wanted in runs or plural in runs


def prose(text: str) -> str:
    """A page without code, links' targets and tables' rules: names there may be another's."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.M)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


@cache
def own_texts() -> frozenset[tuple[Path, str]]:
    """The docstrings and texts of all Python sources of the package, by file."""
    return frozenset(
        (path, node.value)
        for path in SOURCES
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    )


@cache
def own_names() -> frozenset[tuple[Path, str]]:
    """What all sources call things, by file."""
    return frozenset((path, name) for path in SOURCES for name in names(path))


def names(path: Path) -> Iterator[str]:
    """What a source calls things: names that it binds, not those that it uses of others."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        text = re.sub(r"/\*.*?\*/|//[^\n]*|\"[^\"\n]*\"", " ", text, flags=re.S)
        yield from re.findall(r"\blc_\w+|\bLC_\w+|\b[a-z]\w+(?=\s*[;,=)\[])", text)
        return
    yield path.stem
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


UNUSED = [term.strip() for row in rows("| not | but |") for term in row[0].split(",")]


def test_what_is_found() -> None:
    assert words("_retry_AllVotes") == ["retry", "all", "votes"]
    assert said("two heartbeats", "heartbeat")
    assert said("a time-out", "time-out")
    assert not said("the timeout of a heart", "time-out")
    assert prose("a `vote` [b](vote.md)\n\n    vote\n") == "a  [b\n\n\n"
    assert len(UNUSED) > 6
    assert len(own_names()) > 5000
    assert len(own_texts()) > 3000


@pytest.mark.parametrize("term", UNUSED)
def test_a_word_that_is_not_used(term: str) -> None:
    found = {f"{path.relative_to(ROOT)}: {name}" for path, name in own_names() if said(name, term)}
    found |= {
        f"{path.relative_to(ROOT)}: {' '.join(text.split())[:60]}"
        for path, text in own_texts()
        if said(re.sub(r"``[^`]*``|\.\w+\(\)", "", text), term)
    }
    for page in PAGES:
        text = prose(page.read_text(encoding="utf-8"))
        if page == DESIGN:
            text = re.sub(r"^\| not \|.*?\n\n", "", text, flags=re.M | re.S)
        if said(text, term):
            found.add(page.name)
    assert not found, f"use another word for {term!r} (docs/design.md, Glossary)"


def test_a_term_has_one_meaning() -> None:
    terms = [term.strip() for row in rows("| term | meaning |") for term in row[0].split(",")]
    assert len(terms) > 60
    assert len(terms) == len({*terms}), sorted(term for term in terms if terms.count(term) > 1)
    assert not {*terms} & {*UNUSED}
