"""The table of ranks: the worst first, at any width, and without a terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lossycoll.cli import top
from lossycoll.cli.launcher import EXIT_FAILED
from lossycoll.cli.main import EXIT_USAGE, main


def link(rank: int, loss: float = 0.0) -> dict[str, Any]:
    return {
        "rank": rank, "by": "udp", "heard_seconds": 0.1, "loss": loss, "burst": 1.0,
        "missing": 0.0, "rtt_seconds": 0.001, "queue_seconds": 0.002,
        "bytes_per_second": 2.5e6, "trouble": "",
    }  # fmt: skip


def rank(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "rank": number, "host": "node", "pid": 7, "control": "h:1", "state": "alive",
        "tells": True, "heard_seconds": 0.0, "groups": [], "call": None, "call_number": None,
        "call_group": None, "call_seconds": None, "waits_for": [], "last_call": None,
        "step_seconds": 0.25, "sealed": True, "missing": 0.01, "recovered": 3,
        "link": [link(number + 1)], **changes,
    }  # fmt: skip


def waiting(number: int, *others: int) -> dict[str, Any]:
    call = {"call": "all_reduce float32[9]", "call_number": 4, "call_seconds": 12.5}
    return rank(number, **call, waits_for=list(others))


def job(*ranks: dict[str, Any]) -> dict[str, Any]:
    return {"session": "ab" * 8, "world": len(ranks), "ranks": list(ranks)}


def shown(jobs: list[Any], width: int, height: int | None = None) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(top.view(jobs, width, height))
    return out.getvalue()


SICK = job(
    rank(0, link=[link(1, 0.2)]),
    waiting(1, 3),
    rank(2, state="stopped"),
    rank(3),
    rank(4, state="dead", tells=False, link=[], sealed=None, missing=None, recovered=None),
    rank(5),
)


def test_the_worst_come_first() -> None:
    assert [one["rank"] for one in top.worst_first(SICK)] == [3, 4, 2, 0, 1, 5]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 132, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = shown([SICK], width).splitlines()
    assert max(map(len, lines)) <= width
    table = [line.split() for line in lines]
    assert any(words[:2] == ["3", "alive"] for words in table) or width < 40
    assert any(words[:2] == ["2", "stopped"] for words in table) or width < 40


def test_wide_tables_have_all_columns() -> None:
    text = shown([SICK], 200)
    for word in ("12.5 s", "20.0% from 1", "all_reduce float32[9]", "2 MB/s", "udp*", "1.00%"):
        assert word in text, word
    assert "rank 3, which is alive: 1 wait for it" in text


def test_a_thousand_ranks_fit_a_screen_and_say_how_many_are_left() -> None:
    many = job(*(waiting(one, 999) for one in range(999)), rank(999))
    lines = shown([many], 80, 24).splitlines()
    assert len(lines) <= 24
    assert any(line.split()[:2] == ["999", "alive"] for line in lines)
    assert "more ranks" in lines[-1]


def test_jobs_that_are_over_come_last() -> None:
    over = job(rank(0, state="dead", tells=False, link=[]))
    text = shown([over | {"session": "00"}, SICK], 80)
    assert text.index("job abab") < text.index("job 00")


def test_without_a_terminal_one_table_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["top"]) == 0
    assert "no job of this user" in capsys.readouterr().out
    assert main(["top", "127.0.0.1:1"]) == EXIT_FAILED
    assert "nobody can be reached" in capsys.readouterr().out.replace("\n", " ")
    assert main(["top", "nowhere"]) == EXIT_USAGE
