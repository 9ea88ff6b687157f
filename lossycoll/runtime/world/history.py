"""A job's figures over time, as lines of JSON in a file: what `lossycoll report` draws.

One process of a machine writes the lines of all ranks there. Lines become rarer as the job gets
older, so that a file stays small however long it runs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from lossycoll.runtime.engine.status_record import Record

from .job_status import job_of

SUFFIX: Final = ".jsonl"
FIRST_SECONDS: Final = 1.0
"""Between the first lines;"""
LINES: Final = 500
"""and from then on the job's age, divided by this."""
MOST_LINKS: Final = 32
"""Links of each rank in a line: those that lose most."""
COUNTERS: Final = (
    "operations",
    "bytes_sent",
    "bytes_received",
    "packets_sent",
    "packets_resent",
    "packets_received",
    "packets_recovered",
    "packets_missing",
)
RANK: Final = (
    "rank", "host", "state", "call", "call_seconds", "waits_for", "step_seconds", "sealed",
)  # fmt: skip
LINK: Final = (
    "rank", "by", "loss", "missing", "rtt_seconds", "queue_seconds", "bytes_per_second",
)  # fmt: skip

measured: Final[dict[str, float]] = {}
"""Latest measurements of this process, equal on all ranks, by name."""


def line_of(records: Sequence[Record], now: float) -> dict[str, Any]:
    """One moment of a job's processes on this machine. ``now``: seconds since 1970."""
    job = job_of(records[0].session, records)
    counted = {record.rank: record.stats for record in records}
    ranks = [_rank(rank, counted[rank["rank"]]) for rank in job["ranks"] if rank["rank"] in counted]
    line = {"time": round(now, 3), "session": job["session"], "world": job["world"]}
    return line | {"measured": dict(measured), "ranks": ranks}


def _rank(rank: Mapping[str, Any], stats: Mapping[str, int]) -> dict[str, Any]:
    links = sorted(rank["link"], key=lambda one: -one["loss"])[:MOST_LINKS]
    return {
        **{name: rank[name] for name in RANK},
        "counters": {name: stats.get(name, 0) for name in COUNTERS},
        "link": [{name: link[name] for name in LINK} for link in links],
    }


def write(
    path: str,
    process: int,
    read: Callable[[], Sequence[Record]],
    wait: Callable[[float], bool],
) -> None:
    """Appends lines until the job is over; of a machine's processes the one with the lowest number.
    ``read``: the records of the job on this machine. ``wait``: waits for so many seconds; whether
    the job goes on. OSError: the file can't be written."""
    begin = time.monotonic()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    while wait(max(FIRST_SECONDS, (time.monotonic() - begin) / LINES)):
        records = read()
        if process == min((record.process for record in records), default=-1):
            text = json.dumps(line_of(records, time.time()), separators=(",", ":")) + "\n"
            file = os.open(path, flags, 0o600)
            try:
                os.write(file, text.encode())
            finally:
                os.close(file)
