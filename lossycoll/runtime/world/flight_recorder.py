"""The latest calls of a job's ranks in the format of torch's flight recorder.

torch's reader (``python -m torch.distributed.flight_recorder.fr_trace``) compares the calls of all
ranks, and names the first that differ. Pure functions: records in, data for pickle and JSON out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from lossycoll.runtime.engine.status_record import CallRecord, GroupRecord, Record

from .job_status import latest

VERSION: Final = "2.10"
"""Version of the format, as torch 2.13 to 2.15 write it."""
PREFIX: Final = "lossycoll_rank_"
"""Prefix of a file's name; the rank follows."""
BACKEND: Final = "gloo"
"""The reader refuses names of backends that it doesn't know."""
NAMES: Final = {
    "monitored_barrier": "barrier",
    "all_gather_blocks": "all_gather",
    "reduce_scatter_blocks": "reduce_scatter",
}
"""Calls that torch has no name for, and the nearest that it has one for."""
_TEXT: Final = re.compile(r"(\w+)(?: (\w+)\[(\d+)\])?")
_STATES: Final = ("scheduled", "completed")

Dump = dict[str, Any]


def dumps(records: Iterable[Record]) -> dict[int, Dump]:
    """Dumps as torch's recorder would have written them, by rank, of the records of one job."""
    now = time.time_ns()
    known = {record.rank: record for record in latest(records).values()}
    begins = _common_begins(known.values())
    return {rank: _dump(record, begins, now) for rank, record in sorted(known.items())}


def _common_begins(records: Iterable[Record]) -> Mapping[int, int]:
    """First operation that all ranks of a group still know of, by group: the reader takes what one
    rank has forgotten for a call that it hasn't made."""
    begins: dict[int, int] = {}
    for record in records:
        for group in record.groups:
            if group.calls:
                begins[group.number] = max(begins.get(group.number, 0), group.calls[0].op)
    return begins


def _dump(record: Record, begins: Mapping[int, int], now: int) -> Dump:
    entries = [
        entry
        for group in record.groups
        for entry in _entries(group, begins.get(group.number, 0), now)
    ]
    entries.sort(key=lambda entry: entry["time_created_ns"])
    for number, entry in enumerate(entries):
        entry["record_id"] = number
    return {
        "version": VERSION,
        "comm_lib_version": "lossycoll",
        "pg_config": {group.name: _config(group, record) for group in record.groups},
        "pg_status": {group.name: _status(group) for group in record.groups},
        "entries": entries,
    }


def _config(group: GroupRecord, record: Record) -> dict[str, str]:
    ranks = [record.peers[one].rank for one in group.members if one < len(record.peers)]
    return {"name": group.name, "desc": _description(group), "ranks": str(ranks)}


def _description(group: GroupRecord) -> str:
    return "default_pg" if group.name == "0" else "undefined"


def _status(group: GroupRecord) -> dict[str, int]:
    made = max((call.seq for call in group.calls), default=-1)
    done = max((call.seq for call in group.calls if call.ended >= 0), default=-1)
    names = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    return dict(zip(names, (made, made, done), strict=True))


def _entries(group: GroupRecord, begin: int, now: int) -> list[Dump]:
    by_call: dict[int, list[CallRecord]] = {}
    for call in group.calls:
        if call.op >= begin:
            by_call.setdefault(call.seq if call.seq >= 0 else -call.op, []).append(call)
    calls = [_call(group, parts, now) for parts in by_call.values()]
    return calls + [_message(group, one, now) for one in group.messages if one.peer >= 0]


def _call(group: GroupRecord, operations: Sequence[CallRecord], now: int) -> Dump:
    """A call, of which the engine may have made several operations."""
    first = operations[0]
    found = _TEXT.match(first.text)
    name, dtype, elements = found.groups() if found is not None else (first.text, None, None)
    ended = min(one.ended for one in operations)  # -1: one of them hasn't
    shapes = _shapes(name, dtype, int(elements or 0), first.bytes, len(group.members))
    name = NAMES.get(name, name)
    number = first.seq if first.seq >= 0 else first.op - 1
    ids = {"collective_seq_id": number, "p2p_seq_id": 0, "op_id": first.op - 1, "is_p2p": False}
    return _entry(group, first, name, shapes, dtype or "unknown", ended, now) | ids


def _message(group: GroupRecord, one: CallRecord, now: int) -> Dump:
    kind = "recv" if one.text.startswith("rec") else "send"
    arrow = "<-" if kind == "recv" else "->"
    shapes = [[one.bytes]], [[one.bytes]]
    name = f"{kind} {group.rank}{arrow}{one.peer}"
    ids = {"collective_seq_id": 0, "p2p_seq_id": one.op, "op_id": one.op, "is_p2p": True}
    return _entry(group, one, name, shapes, "uint8", one.ended, now) | ids


def _entry(
    group: GroupRecord,
    call: CallRecord,
    name: str,
    shapes: tuple[list[list[int]], list[list[int]]],
    dtype: str,
    ended: float,
    now: int,
) -> Dump:
    began = now - int(call.began * 1e9)
    return {
        "record_id": 0,
        "pg_id": group.number,
        "process_group": (group.name, _description(group)),
        "profiling_name": f"{BACKEND}:{name}",
        "time_created_ns": began,
        "input_sizes": shapes[0],
        "input_dtypes": [dtype],
        "output_sizes": shapes[1],
        "output_dtypes": [dtype],
        "state": _STATES[ended >= 0],
        "time_discovered_started_ns": began,
        "time_discovered_completed_ns": now - int(ended * 1e9) if ended >= 0 else None,
        "duration_ms": (call.began - ended) * 1e3 if ended >= 0 else None,
        "retired": ended >= 0,
        "timeout_ms": 0,
        "frames": [],
    }


def _shapes(
    name: str, dtype: str | None, elements: int, result: int, world: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Sizes of a call's input and output, by the elements in its text and its result's bytes."""
    one = [[elements]]
    if name in ("all_gather", "gather"):
        return one, [[elements * world]]
    if name == "all_gather_blocks":
        return [[elements // world]], one
    if name.startswith("reduce_scatter"):
        bits = re.search(r"\d+$", dtype or "")
        is_result = bits is not None and elements * int(bits[0]) == 8 * result
        return ([[elements * world]], one) if is_result else (one, [[elements // world]])
    return ([[elements * world]], one) if name == "scatter" else (one, one)
