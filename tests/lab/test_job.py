"""Ranks of a laboratory's job as processes, without a network: what becomes of their output."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

from lossycoll.errors import LabError
from lossycoll.lab import job

MANY = "for number in range(100_000): print(number)"
"""More than a pipe holds."""


def test_a_rank_goes_on_and_the_job_ends_when_its_lines_can_not_be_handed_on() -> None:
    def sink(rank: int, line: str) -> None:
        raise BrokenPipeError

    failed: list[Exception] = []
    with subprocess.Popen([sys.executable, "-c", MANY], stdout=subprocess.PIPE, text=True) as rank:
        reader = job._reader(rank, 0, sink, failed)
        try:
            assert rank.wait(60) == 0
        finally:
            rank.kill()
        reader.join(10)
        with pytest.raises(BrokenPipeError):
            job._await([rank], None, 1.0, (), failed)
    assert len(failed) == 1


def test_a_full_disk_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 (closing it fails)
    monkeypatch.setattr(sys, "stdout", full)
    try:
        with pytest.raises(LabError, match="output can't be written: No space left on device"):
            job.prefixed(3, "line")
    finally:
        with contextlib.suppress(OSError):
            full.close()


def test_what_the_terminal_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(kept, encoding="ascii"))
    job.prefixed(3, "Verlust \u00fc\n")
    assert kept.getvalue() == b"[3] Verlust \\xfc\n"
