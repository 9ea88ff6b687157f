"""The speed of parity: what is measured, and what is said of the goal."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.micro import parity

SPEEDS = {("avx2", "encode", 4): 6.0, ("plain", "encode", 4): 1.0, ("plain", "restore", 4): 0.5}


def test_the_goal_is_for_the_fastest() -> None:
    assert "reached (avx2: 6.0 GB/s)" in parity.verdict(SPEEDS)
    assert "reached (avx2" in parity.verdict({**SPEEDS, ("isa-l", "encode", 4): 9.0})
    assert "missed (plain: 1.0 GB/s)" in parity.verdict({("plain", "encode", 4): 1.0})


def test_the_table_has_a_line_for_each(tmp_path: Path) -> None:
    page = tmp_path / "parity-speed.md"
    page.write_text("<!-- parity-speed: begin -->\n<!-- parity-speed: end -->\n")
    parity.report(tmp_path, SPEEDS)
    text = page.read_text()
    assert "| avx2 | encode | 6.00 |" in text
    assert "| plain | restore | 0.50 |" in text


@pytest.mark.long
def test_every_variant_is_measured() -> None:
    speeds = parity.measure(0.001)
    assert min(speeds.values()) > 0
    assert {m for _, _, m in speeds} == {1, 2, 4, 8, 16, 32}
    for what in ("encode", "restore"):
        assert ("plain", what, 32) in speeds
