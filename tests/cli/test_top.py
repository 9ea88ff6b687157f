"""The table of ranks: the worst first, at any width, and without a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lossycoll.cli import top
from lossycoll.cli.answer import EXIT_FAILED
from lossycoll.cli.main import EXIT_INTERRUPTED, EXIT_USAGE, main
from lossycoll.cli.status import Found
from tests.runtime.engine.test_status_page import made
from tests.support.waiting import until


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
    Console(file=out, width=width).print(top.view(Found(jobs), width, height))
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
    for word in ("12.5 s", "20.0% to 1", "all_reduce float32[9]", "2 MB/s", "udp*", "1.00%"):
        assert word in text, word
    assert "rank 3, which is alive: 1 waits for it" in text


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
    assert "no job or swarm of this user" in capsys.readouterr().out
    assert main(["top", "127.0.0.1:1"]) == EXIT_FAILED
    assert "nobody can be reached" in capsys.readouterr().err
    assert main(["top", "nowhere"]) == EXIT_USAGE


TOP = """
import signal, sys
from lossycoll.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
sys.exit(main(["top", "--every", "0.1"]))
"""


class Terminal:
    """``lossycoll top`` at a terminal of 40 columns and 12 lines."""

    def __init__(self) -> None:
        self._screen, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 40, 0, 0))
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", TOP],
            stdin=theirs, stdout=theirs, stderr=theirs, env={**env, "TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)
        os.set_blocking(self._screen, False)
        self._seen = ""

    def shows(self, text: str) -> None:
        """Returns once that is shown after all that was waited for before."""

        def look() -> bool:
            with contextlib.suppress(BlockingIOError):
                self._seen += os.read(self._screen, 1 << 16).decode(errors="replace")
            frames = self._seen.replace("\x1b[H", "\n")  # the last line stays open
            plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frames)
            if text not in plain:
                return False
            self.lines = plain.splitlines()
            self._seen = ""
            return True

        until(look)

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)

        def look() -> bool:
            with contextlib.suppress(OSError):  # it can't end while nobody reads what it writes
                os.read(self._screen, 1 << 16)
            return self.process.poll() is not None

        until(look, seconds=60)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._screen)


def test_ranks_and_jobs_come_and_go_at_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with contextlib.closing(Terminal()) as terminal:
        terminal.shows("no job or swarm of this user")
        page = made()
        terminal.shows("job 0000000000000abc: 2 silent, 1 alive")
        assert max(map(len, terminal.lines)) <= 40
        page.close()
        terminal.shows("no job or swarm of this user")
        again = made()
        terminal.shows("2 silent, 1 alive")
        assert terminal.end() == EXIT_INTERRUPTED
        again.close()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 132])
def test_columns_that_are_shown_are_whole_but_for_the_call(width: int) -> None:
    """Rank, state, times and loss are what a table is read for."""
    stopped = {"call": "all_reduce float32[6553600] SUM (lossy)", "call_seconds": 11.8}
    text = shown([job(rank(0, state="stopped", **stopped), rank(1, link=[link(0, 0.2)]))], width)
    assert "stopped" in text
    assert "11.8 s" in text
    table = text.splitlines()[-3:]
    assert not any("…" in line.partition("all_reduce")[0] for line in table)
    assert width < 80 or any("20.0% to 0" in line for line in table)
