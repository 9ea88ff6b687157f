"""docs/failures.md promises nothing that no test holds it to."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_promise_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    tests = set()
    for path in ROOT.glob("tests/**/test_*.py"):
        tests |= set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M))
    assert len(rows) > 20
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 5, row
        named = re.fullmatch(r"`(test_\w+)`", cells[4])
        assert named, f"names no test: {row}"
        assert named[1] in tests, f"{named[1]} doesn't exist"


def test_every_test_of_failures_is_a_promise() -> None:
    text = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    for path in ROOT.glob("tests/failures/test_*.py"):
        if path.name != Path(__file__).name:
            for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M):
                assert f"`{name}`" in text, f"docs/failures.md doesn't promise what {name} tests"
