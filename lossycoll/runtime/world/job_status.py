"""A job as an operator sees it: one entry per rank, from what its processes tell of themselves.

Where a process tells nothing, the entry is made of what the others know of it. Pure functions:
records in, data for JSON out; docs/status-reference.md has its fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from lossycoll.runtime.core.logfmt import named
from lossycoll.runtime.engine import status_page
from lossycoll.runtime.engine.status_record import CallRecord, GroupRecord, PeerRecord, Record

from .rank_states import LOST_STATES, RankState

_WORST_FIRST: Final = (
    RankState.ENDED,
    RankState.STOPPED,
    RankState.SILENT,
    RankState.UNKNOWN,
    RankState.LEFT,
    RankState.PRESENT,
)
ALIVE, DEAD, LEFT, UNKNOWN = (
    s.word for s in (RankState.PRESENT, RankState.ENDED, RankState.LEFT, RankState.UNKNOWN)
)
STATES: Final = tuple(state.word for state in _WORST_FIRST)
"""The words of the states, the worst first."""
LINKS: Final = ("udp", "shared_memory", "rdma")
DIRECTIONS: Final = ("", "nothing comes", "nothing arrives there", "no data comes")
_KERNEL: Final = {
    status_page.DEAD: RankState.ENDED,
    status_page.STOPPED: RankState.STOPPED,
    status_page.RUNS: RankState.PRESENT,
}
_TOLD: Final = LOST_STATES | {RankState.LEFT}
"""States of a rank that others know better than it."""
RECENT_SHARE: Final = 0.25
"""Share of liveness after which an unheard rank without a record counts as silent."""
FIELDS: Final = (
    "rank", "host", "pid", "control", "state", "tells", "heard_seconds", "groups",
    "call", "call_number", "call_group", "call_seconds", "waits_for", "last_call",
    "step_seconds", "sealed", "missing", "recovered", "link",
)  # fmt: skip
"""What the entry of a rank has; None where nobody tells."""


def jobs_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The jobs that records are of, each as :func:`job_of` has it."""
    by_session: dict[str, list[Record]] = {}
    for record in records:
        by_session.setdefault(record.session, []).append(record)
    return [job_of(session, found) for session, found in sorted(by_session.items())]


def job_of(session: str, records: Sequence[Record]) -> dict[str, Any]:
    """One job. ``records``: of those of its processes that told something."""
    known = latest(records)
    world = max((record.world for record in records), default=0)
    states = {process: _state(process, known) for process in range(world)}
    ranks = [_rank(process, known, states) for process in range(world)]
    return {"session": session, "world": world, "ranks": ranks}


def is_over(job: Mapping[str, Any]) -> bool:
    """True if no rank of a job is left."""
    return all(rank["state"] in (DEAD, LEFT) for rank in job["ranks"])


def given_up(records: Sequence[Record]) -> set[int]:
    """The ranks that others have given up though nobody knows that their processes have ended."""
    known = latest(records)
    processes = range(max((record.world for record in records), default=0))
    return {_global_rank(p, known) for p in processes if _state(p, known) == RankState.LOST}


def latest(records: Iterable[Record]) -> dict[int, Record]:
    """One record per process: of several, one that isn't gone."""
    found: dict[int, Record] = {}
    for record in records:
        if record.process not in found or status_page.is_gone(found[record.process]):
            found[record.process] = record
    return found


def _others(process: int, known: Mapping[int, Record]) -> list[Record]:
    """What the processes beside one tell, but for those that are gone."""
    return [one for p, one in known.items() if p != process and not status_page.is_gone(one)]


def _heard(process: int, known: Mapping[int, Record]) -> float:
    """Seconds since any other process that runs heard it; -1: none ever has."""
    running = [one for one in _others(process, known) if one.state != status_page.STOPPED]
    heard = [one.peers[process].heard for one in running if process < len(one.peers)]
    return min((seconds for seconds in heard if seconds >= 0), default=-1.0)


def _state(process: int, known: Mapping[int, Record]) -> RankState:
    mine = known.get(process)
    by_kernel = _KERNEL.get(mine.state) if mine is not None else None
    if by_kernel is not None:
        return by_kernel
    others = _others(process, known)
    for other in others:
        if process < len(other.peers) and other.peers[process].state in _TOLD:
            return RankState(other.peers[process].state)
    if mine is not None:
        return RankState.SILENT if status_page.is_gone(mine) else RankState.PRESENT
    if all(other.state == status_page.STOPPED for other in others):  # nobody listens for it
        return RankState.UNKNOWN
    liveness = min((record.liveness for record in known.values()), default=0.0)
    heard = _heard(process, known)
    recent = 0 <= heard <= RECENT_SHARE * liveness
    return RankState.PRESENT if recent else RankState.SILENT


def _rank(
    process: int, known: Mapping[int, Record], states: Mapping[int, RankState]
) -> dict[str, Any]:
    mine = known.get(process)
    is_here = states[process] == RankState.PRESENT and mine is not None
    entry: dict[str, Any] = dict.fromkeys(FIELDS) | {
        "rank": _global_rank(process, known),
        "state": states[process].word,
        "tells": mine is not None,
        "heard_seconds": _seconds(0.0 if is_here else _heard(process, known)),
        "groups": [],
        "waits_for": [],
        "link": [],
    }
    if mine is None:
        return entry
    received = mine.stats.get("packets_received")
    lost = mine.stats.get("packets_missing", 0)
    entry |= {
        "host": mine.host,
        "pid": mine.pid,
        "control": mine.control or None,
        "sealed": mine.sealed,
        "groups": [_group(group, mine) for group in mine.groups],
        "step_seconds": _seconds(max((g.step_seconds for g in mine.groups), default=-1.0)),
        "missing": None if received is None else _share(lost, received),
        "recovered": mine.stats.get("packets_recovered"),
        "link": [_link(peer) for process, peer in enumerate(mine.peers) if process != mine.process],
    }
    waiting = waiting_in(mine.groups)
    if waiting is not None:
        group, call = waiting
        is_dead = mine.state == status_page.DEAD  # it waits no longer
        absent = set() if is_dead else _absent(group, call, mine, known, states)
        entry |= {
            "call": call.text,
            "call_number": call.seq if call.seq >= 0 else None,
            "call_group": group.name,
            "call_seconds": _seconds(call.began),
            "waits_for": sorted(_global_rank(process, known) for process in absent),
        }
    ended = [(g.last, g) for g in mine.groups if g.last is not None and g.last.ended >= 0]
    if ended:
        last, group = min(ended, key=lambda one: one[0].ended)
        entry["last_call"] = {
            "call": last.text,
            "call_number": last.seq if last.seq >= 0 else None,
            "call_group": group.name,
            "seconds": _seconds(last.ended),
            "failed": last.failed,
        }
    return entry


def waiting_in(groups: Sequence[GroupRecord]) -> tuple[GroupRecord, CallRecord] | None:
    """The call or message that a process has waited for longest in its groups, and its group."""
    found = [(group, group.waiting) for group in groups if group.waiting is not None]
    found += [(group, message) for group in groups for message in group.messages]
    return max(found, key=lambda one: one[1].began, default=None)


def _absent(
    group: GroupRecord,
    call: CallRecord,
    mine: Record,
    known: Mapping[int, Record],
    states: Mapping[int, RankState],
) -> set[int]:
    """The processes that a call waits for: those that haven't made it. If all have, those of them
    that aren't alive. Ranks that the waiting one has given up aren't waited for: its group has
    failed, or continues without them."""
    members = dict(enumerate(group.members))
    others = {rank: process for rank, process in members.items() if process != mine.process}
    if call.peer >= 0:
        return {members[call.peer]} if call.peer in members else set()
    given_up = {p for p, peer in enumerate(mine.peers) if peer.state in LOST_STATES}
    here = {
        r: p for r, p in others.items() if states.get(p) != RankState.LEFT and p not in given_up
    }
    if call.seq < 0:  # a receive from any rank
        return set(here.values())
    absent = set()
    for rank, process in here.items():
        theirs = known.get(process)
        if theirs is None:
            told = group.absent_of == call.op and rank in group.absent
            made = not told and group.absent_of == call.op
            if not made and (told or states.get(process) != RankState.PRESENT):
                absent.add(process)
        elif all(g.number != group.number or g.submitted < call.op for g in theirs.groups):
            absent.add(process)
    return absent or {p for p in here.values() if states.get(p) != RankState.PRESENT}


def _global_rank(process: int, known: Mapping[int, Record]) -> int:
    for record in known.values():
        if process < len(record.peers):
            return record.peers[process].rank
    return process


def _group(group: GroupRecord, mine: Record) -> dict[str, Any]:
    return {
        "name": group.name,
        "rank": group.rank,
        "ranks": [mine.peers[one].rank for one in group.members if one < len(mine.peers)],
        "operations": group.submitted,
        "pending": group.pending,
        "failed": bool(group.failed),
    }


def _link(peer: PeerRecord) -> dict[str, Any]:
    return {
        "rank": peer.rank,
        "by": LINKS[peer.link] if peer.link < len(LINKS) else "other",
        "heard_seconds": _seconds(peer.heard),
        "loss": round(peer.loss, 6),
        "burst": round(peer.burst, 3),
        "missing": _share(peer.packets_missing, peer.packets_received),
        "rtt_seconds": round(peer.rtt, 9),
        "queue_seconds": round(peer.queue, 9),
        "bytes_per_second": round(peer.rate, 1),
        "trouble": DIRECTIONS[peer.silence] if peer.silence < len(DIRECTIONS) else "",
    }


def _share(missing: int, received: int) -> float:
    return round(missing / (missing + received), 6) if missing else 0.0


def _seconds(value: float) -> float | None:
    return round(value, 6) if value >= 0 else None


# ---- in words ----


def doing(rank: Mapping[str, Any]) -> str:
    """Activity of a rank, in words."""
    if rank["state"] == UNKNOWN:
        return "no rank runs here that could tell of it"
    if not rank["tells"]:
        return f"heard {ago(rank['heard_seconds'])}, tells nothing of itself"
    if rank["call"] is not None:
        number = "" if rank["call_number"] is None else f"call #{rank['call_number']} "
        if rank["state"] in (DEAD, LEFT):
            return f"ended in {number}{rank['call']}"
        text = f"{in_words(rank['call_seconds'])} in {number}{rank['call']}"
        if rank["waits_for"]:
            text += f", waits for {named(rank['waits_for'])}"
        return text
    last = rank["last_call"]
    if last is None:
        return "has made no call"
    number = "" if last["call_number"] is None else f"#{last['call_number']} "
    return f"in no call; its last one, {number}{last['call']}, ended {ago(last['seconds'])}"


def being(rank: Mapping[str, Any]) -> str:
    """State of a rank as a sentence: ``rank 3 is alive``."""
    verb = "has" if rank["state"] == LEFT else "is"
    return f"rank {rank['rank']} {verb} {rank['state']}"


def in_words(seconds: float | None) -> str:
    """A time, as people say it."""
    if seconds is None:
        return "?"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def ago(seconds: float | None) -> str:
    """Age of something, in words."""
    return "never" if seconds is None else f"{in_words(seconds)} ago"
