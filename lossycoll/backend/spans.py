"""Spans of calls in torch.profiler, as gloo has them, and the engine's phases below them.

A call is one asynchronous event ``lossy:all_reduce`` from its submission to its end. Below it
``lossy::submit`` has bytes, group and sequence number as arguments. The engine's phases are known
only when the call has ended, which is too late for the profiler: :func:`export_chrome_trace` adds
them to the file.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lossycoll.runtime.core.call import Collective, Operation
from lossycoll.runtime.engine.reports import Report, Stream

PREFIX: Final = "lossy"
SUBMIT: Final = f"{PREFIX}::submit"
MESSAGES: Final = {"send": "send", "receive": "recv"}
MOST_KEPT: Final = 1 << 16
"""Calls whose phases are kept: the latest ones."""

_ops: Any = torch.ops.profiler
_fast: Any = torch._C._profiler._RecordFunctionFast


class Phase(NamedTuple):
    """A part of an operation, in nanoseconds since the call began."""

    name: str
    begin: int
    end: int
    arguments: dict[str, Any]


_kept: Final[deque[tuple[int, list[Phase]]]] = deque(maxlen=MOST_KEPT)
_numbers: Final = itertools.count(1)


class Span:
    """One call's span: a ``with`` block around the submission. ``size``: the call's bytes."""

    def __init__(self, group: str, call: Collective, tensors: Sequence[Tensor], size: int) -> None:
        self._group = group
        self._call = call
        self._tensors = tensors
        self._size = size
        self._number = next(_numbers)
        self._phases: list[Phase] = []
        self._lock = threading.Lock()
        self._left = 0

    def __enter__(self) -> Span:
        name = self._call.name
        name = MESSAGES.get(name.partition(" ")[0], name)  # that of a message has the other rank
        record = _ops._record_function_enter_new(f"{PREFIX}:{name}", None)
        self._future: torch.futures.Future[None] = torch.futures.Future()
        _ops._call_end_callbacks_on_jit_fut._RecordFunction(record, self._future)
        told = {
            "bytes": self._size,
            "group": self._group,
            "seq": self._call.seq,
            "call": str(self._call),
            "number": self._number,
        }
        self._began = time.monotonic_ns()
        self._submit = _fast(SUBMIT, list(self._tensors), told)
        self._submit.__enter__()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._submit.__exit__(None, None, None)
        self._submitted = time.monotonic_ns()
        if kind is not None:
            self._end()

    def ends_with(self, operations: Sequence[Operation]) -> None:
        self._left = len(operations)
        if not operations:
            self._end()
        for each in operations:
            each.on_done(self._one_is_done)

    def _one_is_done(self) -> None:
        with self._lock:
            self._left -= 1
            is_over = not self._left
        if is_over:
            self._end()

    def _end(self) -> None:
        _kept.append((self._number, self._phases))
        self._future.set_result(None)

    def observe(self, report: Report, streams: Sequence[Stream]) -> None:
        """Takes what the engine says of an operation that is done."""
        begin = getattr(self, "_submitted", time.monotonic_ns()) - self._began
        self._phases += phases_of(report, streams, begin)


def phases_of(report: Report, streams: Sequence[Stream], begin: int) -> list[Phase]:
    """The parts of an operation, one after another: until the first packet comes, until the last
    one has come, until what is missing is recovered or given up, and until it is done."""
    came = [one for one in streams if one.arrived]
    first = min((one.first_ns for one in came), default=0)
    last = max((one.last_ns for one in came), default=first)
    settled = max((one.settled_ns for one in streams), default=last)
    slowest = max(streams, key=lambda one: one.settled_ns, default=None)
    ends: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("wait", first, {}),
        ("receive", last, {"packets": report.packets_received, "bytes": report.bytes_received}),
        (
            "recover",
            settled,
            {
                "recovered": report.packets_recovered,
                "missing": report.packets_missing,
                "slowest": -1 if slowest is None else slowest.peer,
            },
        ),
        ("finish", report.elapsed_ns, {"sent": report.packets_sent, "cause": report.cause.name}),
    )
    found, at = [], 0
    for name, end, told in ends:
        if end > at:
            found.append(Phase(f"{PREFIX}::{name}", begin + at, begin + end, told))
            at = end
    return found


def export_chrome_trace(profile: Any, path: str | Path) -> None:
    """Write a profile as a Chrome trace, with the engine's phases below each call.

    Args:
        profile: A ``torch.profiler.profile`` that has ended.
        path: The file.
    """
    profile.export_chrome_trace(str(path))
    file = Path(path)
    trace = json.loads(file.read_text(encoding="utf-8"))
    trace["traceEvents"] += _added(trace["traceEvents"])
    file.write_text(json.dumps(trace), encoding="utf-8")


def _added(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events of phases, in a track of the call's group. Calls get their arguments, and move there:
    they overlap what the thread does meanwhile."""
    known = dict(_kept)
    calls = sorted(
        (e for e in events if str(e.get("name", "")).startswith(f"{PREFIX}:") and e["ph"] == "X"),
        key=lambda e: (e["ts"], e["name"] == SUBMIT),
    )
    added: list[dict[str, Any]] = []
    waiting: dict[tuple[Any, Any], dict[str, Any]] = {}
    for event in calls:
        place = event["pid"], event["tid"]
        if event["name"] != SUBMIT:
            waiting[place] = event
            continue
        call = waiting.pop(place, None)
        told = event.get("args", {})
        if call is None:
            continue
        track = f"lossy {told.get('group', '')}"
        call["args"] = call.get("args", {}) | {k: v for k, v in told.items() if k != "Ev Idx"}
        call["tid"] = track
        for phase in known.get(told.get("number", 0), ()):
            begin, end = (event["ts"] + at / 1000 for at in (phase.begin, phase.end))
            added.append(
                {
                    "ph": "X",
                    "cat": "user_annotation",
                    "name": phase.name,
                    "pid": event["pid"],
                    "tid": track,
                    "ts": begin,
                    "dur": max(0.0, min(end, call["ts"] + call["dur"]) - begin),
                    "args": phase.arguments,
                }
            )
    return added
