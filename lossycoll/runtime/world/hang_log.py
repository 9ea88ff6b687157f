"""One log line for a call that takes too long: for whom it waits, and what those ranks do.

It repeats after twice the time, and so on. The line is made by a thread of its own, since the ranks
that are waited for are asked, and may not answer.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lossycoll.runtime.core.exits import start_thread
from lossycoll.runtime.core.logfmt import event
from lossycoll.runtime.engine import status_page
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.engine.status_record import CallRecord, GroupRecord, Record

from .job_status import being, doing, job_of, waiting_in

USUAL_TIMES: Final = 10
"""A call that usually takes long is told of after so many times as long."""
MOST_ASKED: Final = 4
"""Ranks that one line asks."""
NO_RANK_LATE: Final = (
    "no rank is known that hasn't made the call, so packets of it are missing; `lossycoll status` "
    "names links that lose"
)
"""Cause of a wait for packets, not for a rank."""
_LIBRARY: Final = re.compile(r"/lib/python3[^/]*/(?!(site|dist)-packages/)")
_FRAME: Final = re.compile(r'File "([^"]*)", line (\d+), in (.*)')


@dataclass(eq=False)
class HangLog:
    """Log of calls that hang, of one group at one rank."""

    where: Where
    page: Path
    number: int  # the group's, on the wire
    warn_after: float  # seconds; 0: nothing is ever logged
    job: Callable[[], Sequence[Record]]  # the records of the job on this machine
    # The record and the Python stacks of a process, or None of what it doesn't tell
    ask: Callable[[int], tuple[Record | None, str | None]]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _call: tuple[int, int, str] | None = field(default=None, init=False)
    _due: float = field(default=0.0, init=False)

    def look(self) -> None:
        """Called about once a second while a call takes long, by any thread."""
        if not self.warn_after or not self._lock.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(OSError, ValueError):
                mine = status_page.read_page(self.page)
                if self._is_due(mine):
                    start_thread(self._tell, "lossycoll-waits")
        finally:
            self._lock.release()

    def _waiting(self, record: Record) -> tuple[GroupRecord, CallRecord] | None:
        return waiting_in([group for group in record.groups if group.number == self.number])

    def _is_due(self, record: Record) -> bool:
        found = self._waiting(record)
        if found is None:
            self._call = None
            return False
        group, call = found
        if (name := (call.op, call.seq, call.text)) != self._call:
            self._call = name
            self._due = max(self.warn_after, USUAL_TIMES * group.usual)
        if call.began < self._due:
            return False
        self._due = 2 * call.began
        return True

    def _tell(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            mine = status_page.read_page(self.page)
            found = self._waiting(mine)
            if found is None or (found[1].op, found[1].seq, found[1].text) != self._call:
                return  # the call has ended meanwhile
            event(logging.WARNING, self.where, "waits", **self._fields(mine))

    def _fields(self, mine: Record) -> dict[str, Any]:
        records = [mine]
        with contextlib.suppress(OSError, ValueError):
            records += [one for one in self.job() if one.process != mine.process]
        entry = job_of(mine.session, records)["ranks"][mine.process]
        late = {peer.rank: process for process, peer in enumerate(mine.peers)}
        asked = [late[rank] for rank in entry["waits_for"] if rank in late][:MOST_ASKED]
        stacks: dict[int, str | None] = {}
        for process in asked:
            record, stacks[process] = self.ask(process)
            if record is not None and all(one.process != process for one in records):
                records.append(record)
        ranks = job_of(mine.session, records)["ranks"]
        now = ranks[mine.process]
        return {
            "seq": now["call_number"],
            "call": now["call"],
            "seconds": round(now["call_seconds"] or 0.0, 1),
            "waits_for": ",".join(map(str, now["waits_for"])) or "none that is known",
            "because": "; ".join(_what(ranks[one], stacks[one]) for one in asked) or NO_RANK_LATE,
        }


def _what(rank: Mapping[str, Any], stacks: str | None) -> str:
    text = f"{being(rank)}, {doing(rank)}"
    frame = innermost(stacks or "")
    return f"{text}, at {frame}" if frame else text


def innermost(stacks: str) -> str:
    """The innermost frame of the first thread, outside Python's library if there is one; or ""."""
    main = stacks.partition("\n\n")[0]
    frames = _FRAME.findall(main)
    if not frames:
        return ""
    own = [one for one in frames if not _LIBRARY.search(one[0])]
    file, line, name = (own or frames)[-1]
    return f"{Path(file).name}:{line} in {name}"
