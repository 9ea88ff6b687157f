"""The glossary of docs/glossary.md is kept: the field's terms, and no word for what one of them
means."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

# What is read of all sources is kept for all words: by one worker.
pytestmark = pytest.mark.xdist_group("glossary")

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
WRITTEN = {path for path in (ROOT / "docs").glob("*.md") if path.name != "api.md"}
PAGES = [*WRITTEN, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
"""All but the one that is made of the docstrings."""
SOURCES = [*(ROOT / "lossycoll").rglob("*.py"), *(ROOT / "native").rglob("*.[ch]")]


def rows(head: str) -> list[list[str]]:
    """The cells of the table of docs/glossary.md with this head."""
    _, _, rest = GLOSSARY.read_text(encoding="utf-8").partition(f"{head}\n|---|---|\n")
    table = rest.partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def words(text: str) -> list[str]:
    """The words of names and of prose: of ``_retry_AllVotes``, retry, all and votes."""
    return re.findall(r"[a-z]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).lower())


@cache
def spaced(text: str) -> str:
    """Its words, with a space before and behind each: a text is searched for many terms."""
    return f" {' '.join(words(text))} "


def said(text: str, term: str) -> bool:
    """Whether a term stands in a text, or its plural."""
    wanted = " ".join(words(term))
    return f" {wanted} " in spaced(text) or f" {wanted}s " in spaced(text)


def prose(text: str) -> str:
    """A page without code, links' targets and tables' rules: names there may be another's."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.M)
    return re.sub(r"`[^`]*`|\]\([^)]*\)|GitHub", "", text)


@cache
def page_text(page: Path) -> str:
    """The prose of a page, without the tables of words that aren't used."""
    text = prose(page.read_text(encoding="utf-8"))
    if page == GLOSSARY:
        text = re.sub(r"^\| not( a name)? \|.*?\n\n", "", text, flags=re.M | re.S)
    return text


@cache
def own_texts() -> frozenset[tuple[Path, str]]:
    """The docstrings and texts of all Python sources of the package, by file, but for code."""
    return frozenset(
        (path, re.sub(r"``[^`]*``|\.\w+\(\)", "", node.value))
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


def terms_of(head: str) -> list[str]:
    """The terms in the first column of the table with this head."""
    return [term.strip() for row in rows(head) for term in row[0].split(",")]


UNUSED = terms_of("| not | but |")
NO_NAMES = terms_of("| not a name | but |")
"""Words of English that pages may use."""


def names_with(term: str) -> set[str]:
    """The names in the sources that have a term in them."""
    return {f"{path.relative_to(ROOT)}: {name}" for path, name in own_names() if said(name, term)}


def test_what_is_found() -> None:
    assert words("_retry_AllVotes") == ["retry", "all", "votes"]
    assert said("two heartbeats", "heartbeat")
    assert said("a time-out", "time-out")
    assert not said("the timeout of a heart", "time-out")
    assert prose("a `vote` [b](vote.md)\n\n    vote\n") == "a  [b\n\n\n"
    assert len(UNUSED) > 12
    assert len(NO_NAMES) > 1
    assert len(own_names()) > 5000
    assert len(own_texts()) > 3000


@pytest.mark.parametrize("term", UNUSED)
def test_a_word_that_is_not_used(term: str) -> None:
    found = names_with(term)
    found |= {
        f"{path.relative_to(ROOT)}: {' '.join(text.split())[:60]}"
        for path, text in own_texts()
        if said(text, term)
    }
    found |= {page.name for page in PAGES if said(page_text(page), term)}
    assert not found, f"use another word for {term!r} (docs/glossary.md)"


@pytest.mark.parametrize("term", NO_NAMES)
def test_a_word_that_is_no_name(term: str) -> None:
    found = names_with(term)
    assert not found, f"use another name than {term!r} (docs/glossary.md)"


def test_a_term_has_one_meaning() -> None:
    terms = terms_of("| term | meaning |")
    assert len(terms) > 60
    assert len(terms) == len({*terms}), sorted(term for term in terms if terms.count(term) > 1)
    assert not {*terms} & {*UNUSED, *NO_NAMES}
