"""The commits that the pages name, as what figures were measured at, are in the history."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md"]
NAME = re.compile(r"(?<!job )(?<!swarm )(?<![\w./#-])(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7,40}(?![\w-])")
"""Digits and letters: a number is no name, and neither is a word, or a job's or swarm's session."""


def named(text: str) -> list[str]:
    return NAME.findall(text)


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@cache
def history() -> tuple[str, ...]:
    return tuple(git("rev-list", "HEAD").stdout.split())


def test_what_is_a_name() -> None:
    commits = "at commit 239842cc74; a54462b, `7d71385`."
    sessions = "job 6c8293217bf8f4cc swarm 9d25f6de5c364733"
    others = "10000000 defaced 0xdeadbeef1 v1234abc f00.1abcdef 1abcdef-2"
    assert named(f"{commits} {sessions} {others}") == ["239842cc74", "a54462b", "7d71385"]
    assert sum(len(named(page.read_text(encoding="utf-8"))) for page in PAGES) > 5


def test_commits_that_are_named_are_in_the_history() -> None:
    shallow = git("rev-parse", "--is-shallow-repository").stdout.strip()
    if shallow != "false":
        pytest.skip(f"no whole history here: git calls this shallow: {shallow or 'no repository'}")
    lost = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in named(page.read_text(encoding="utf-8"))
        if not any(commit.startswith(name) for commit in history())
    ]
    assert not lost, f"name the nearest commit that landed instead of {lost}"
