"""The log's line of a call that hangs: where the rank is that others wait for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.world import hang_log
from lossycoll.runtime.world.hang_log import HangLog, innermost
from tests.runtime.world.test_job_status import call, record, with_group

STACK = """thread MainThread:
  File "/home/me/train.py", line 7, in main
    for batch in loader:
  File "/usr/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1291, in _try
    data = self._data_queue.get(timeout=timeout)
  File "/usr/lib/python3.11/multiprocessing/queues.py", line 113, in get
    if not self._poll(timeout):
  File "/usr/lib/python3.11/selectors.py", line 415, in select
    fd_event_list = self._selector.poll(timeout)

thread other:
  File "/home/me/other.py", line 1, in other
    pass
"""


def test_the_innermost_frame_is_one_that_says_something() -> None:
    assert innermost(STACK) == "dataloader.py:1291 in _try"
    debian = STACK.replace("/site-packages/", "/dist-packages/")
    assert innermost(debian) == "dataloader.py:1291 in _try"
    library = STACK.replace("/usr/lib/python3.11/site-packages/torch", "/usr/lib/python3.11")
    assert innermost(library) == "train.py:7 in main"


def test_a_stack_of_the_library_alone_has_an_innermost_frame_too() -> None:
    alone = 'thread MainThread:\n  File "/usr/lib/python3.11/runpy.py", line 7, in run\n    x\n'
    assert innermost(alone) == "runpy.py:7 in run"
    assert innermost("") == ""


def _told_at(monkeypatch: pytest.MonkeyPatch, usual: float, warn_after: float = 30.0) -> list[int]:
    """The seconds after which lines are logged for a call that waits for ten minutes."""
    now = [0]
    told: list[int] = []

    def read(_: Path) -> Any:
        waiting = replace(call(7), began=float(now[0]))
        return with_group(record(0, 7), usual=usual, waiting=waiting)

    monkeypatch.setattr(hang_log.status_page, "read_page", read)
    monkeypatch.setattr(hang_log, "start_thread", lambda *_: told.append(now[0]))
    log = HangLog(Where(0, 4), Path(), 5, warn_after, list, lambda _: (None, None))
    for now[0] in range(600):
        log.look()
    return told


def test_lines_come_after_a_while_and_then_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _told_at(monkeypatch, 0.1) == [30, 60, 120, 240, 480]
    assert _told_at(monkeypatch, 0.1, 5.0) == [5, 10, 20, 40, 80, 160, 320]
    assert _told_at(monkeypatch, 0.1, 0.0) == [], "switched off"


def test_a_call_that_usually_takes_long_is_told_of_after_ten_times_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _told_at(monkeypatch, 7.0) == [70, 140, 280, 560]
