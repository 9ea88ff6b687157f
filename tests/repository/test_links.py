"""Every relative link and anchor of the documentation resolves, and every path it names exists."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("tools/*.md")),
    *sorted(ROOT.glob("benchmarks/**/*.md")),
]
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
NAMED = re.compile(
    r"`((?:lossycoll|native|tests|benchmarks|tools|examples|docs)/[\w./-]+\.(?:py|c|h|md|json|toml))`"
)
MODULE = re.compile(r"python -m ((?:lossycoll|benchmarks|tools|tests)(?:\.\w+)+)")
"""A command that a page gives."""
STUDY = re.compile(r"-m benchmarks (\w+)")
"""A study that a page runs."""


@cache
def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, by GitHub's rules."""
    found: list[str] = []
    seen: Counter[str] = Counter()
    for heading in HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(found)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`, 3!\n```\n# no heading\n```\n## A_b\n## A_b\n## What [is](x.md)?\n"
    )
    assert anchors(page) == {"one-two-3", "a_b", "a_b-1", "what-is"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    wrong = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            wrong.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(target):
            wrong.append(f"{link}: no such heading")
    assert not wrong, f"{name_of(page)}: {wrong}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=name_of)
def test_paths_and_modules_that_are_named_exist(page: Path) -> None:
    """CHANGELOG.md is excepted: it names what was."""
    text = page.read_text(encoding="utf-8")
    wrong = [path for path in NAMED.findall(text) if not (ROOT / path).exists()]
    for module in MODULE.findall(text):
        place = ROOT / module.replace(".", "/")
        if not place.is_dir() and not place.with_suffix(".py").exists():
            wrong.append(module)
    studies = ROOT / "benchmarks/studies"
    wrong += [name for name in STUDY.findall(text) if not (studies / name / "study.py").exists()]
    assert not wrong, f"{name_of(page)}: {sorted(set(wrong))}"


def test_every_picture_is_shown_by_a_page() -> None:
    """Pictures that nothing links go."""
    shown = {(page.parent / link).resolve() for page in PAGES for link in LINK.findall(prose(page))}
    pictures = [path for end in ("png", "svg") for path in (ROOT / "docs").glob(f"*.{end}")]
    assert len(pictures) > 30
    assert [name_of(path) for path in pictures if path not in shown] == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        paths = (link.partition("#")[0] for link in LINK.findall(prose(page)) if ":" not in link)
        ahead += [(page.parent / path).resolve() for path in paths if path]
    missed = set(ROOT.glob("docs/*.md")) - reached
    assert not missed, f"no way from README.md to {sorted(map(name_of, missed))}"
