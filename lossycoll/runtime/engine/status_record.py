"""Status of a process as data: read from its status page, or sent by it as JSON.

Times are seconds before the reading, so that they mean the same on every machine; -1 is never.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from types import NoneType
from typing import Annotated, Any, Final, TypeAlias, get_args, get_origin, get_type_hints

from lossycoll.options.ranges import Between, is_real, is_whole

MOST_TEXT: Final = 4096
MOST_ENTRIES: Final = 1 << 16
MOST_REAL: Final = 1e18
"""Of seconds and rates: a thousand million of these are still a float."""
COUNT: Final = Between(0, (1 << 64) - 1)
OrNone: TypeAlias = Annotated[int, Between(-1, (1 << 63) - 1)]
Byte: TypeAlias = Annotated[int, Between(0, 255)]
Code: TypeAlias = Annotated[int, Between(-(1 << 31), (1 << 31) - 1)]


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call, a send or a receive."""

    op: int  # Number of its operation in the group and one: equal on all ranks
    seq: OrNone  # Number of the call, as errors name it; -1: of a message
    text: str  # The call, as errors name it
    bytes: int  # Of its result
    peer: OrNone  # Of a message, the other rank in the group; -1: any, or it is a call
    began: float  # When it began
    ended: float  # When it ended; -1: it is waited for
    failed: bool  # It ended by an error


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group at one rank."""

    number: int  # On the wire: equal on all ranks
    name: str  # torch's
    rank: int  # Of the process, in the group
    members: tuple[int, ...]  # Processes by rank
    submitted: int  # Operations so far
    failed: Code  # The engine's code of what ended the group; 0: it is sound
    usual: float  # Seconds that a call took on average, of the latest ones
    waiting: CallRecord | None  # The oldest call that isn't over
    pending: int  # How many aren't
    last: CallRecord | None  # The latest call
    messages: tuple[CallRecord, ...]  # Sends and receives that aren't over
    absent_of: int  # ``op`` of the operation that ``absent`` is of; 0: of none
    absent: tuple[int, ...]  # Ranks of the group whose call the engine hasn't heard of
    step_seconds: float  # Seconds between repetitions of the same calls; -1: none are repeated
    # The latest calls, the oldest first, where they were asked for
    calls: tuple[CallRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """State of another process, as packets and the control plane tell it."""

    rank: int  # torch's global rank
    heard: float  # When it was last heard
    state: Byte  # A RankState
    silence: Byte  # Which direction of the link is dead (lc_silence); 0: neither
    link: Byte  # 0: UDP, 1: shared memory, 2: RDMA
    packets_sent: int  # Packets that went there
    packets_received: int  # Packets that came from there
    packets_missing: int  # Packets from there that were given up
    rtt: float  # Round trip, in seconds
    queue: float  # How long packets wait in queues on the way, in seconds
    rate: float  # What may be sent, in bytes/s
    loss: float  # Share of packets there that the link loses, before anything is brought back
    burst: float  # Mean length of its losses


@dataclass(frozen=True, slots=True)
class Record:
    """A process of a job."""

    session: str  # The job's, 16 hex digits
    world: int  # Processes of the job
    process: int  # Its number among them
    rank: int  # torch's global rank
    pid: int  # Its number on its machine
    host: str  # The machine's name
    control: str  # Where its control plane listens
    sealed: bool  # Whether what leaves the machine is sealed
    liveness: float  # Seconds within which a silent rank is named
    state: str  # Of the process, as the kernel of its machine says (``state_of`` in status_page.py)
    written: float  # When the engine last wrote its figures
    groups: tuple[GroupRecord, ...]  # Its groups
    peers: tuple[PeerRecord, ...]  # By process
    stats: Mapping[str, int]  # The engine's counters, of all groups

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Record:
        found: Record = _read(cls, value)
        if not 0 <= found.process < found.world == len(found.peers):
            raise ValueError("process, world and peers don't fit together")
        for group in found.groups:
            size = len(group.members)
            if not group.rank < size or max(group.members) >= found.world:
                raise ValueError("a group's rank, members and the world don't fit together")
            if max(group.absent, default=0) >= size:
                raise ValueError("a group's members and absent ranks don't fit together")
        return found


def step_seconds(calls: Sequence[tuple[Hashable, float]]) -> float:
    """Duration of a step: the time between the same call of two steps, where the latest calls
    repeat one sequence; other calls now and then, as for a validation, end it for a while only. In
    seconds; -1 where nothing is repeated."""
    latest = calls[len(calls) // 4 :]  # what came before the first step may be among the oldest
    names = [name for name, _ in latest]
    best = (0, 0)
    for period in range(1, len(names) // 2 + 1):
        alike = period
        while alike < len(names) and names[-1 - alike] == names[-1 - alike + period]:
            alike += 1
        if alike == len(names) or alike >= max(3 * period, 2 * len(names) // 3):
            best = max(best, (alike, -period))
    length, period = best
    return latest[-1][1] - latest[-1 + period][1] if length else -1.0


_hints = functools.cache(functools.partial(get_type_hints, include_extras=True))


def _read(kind: Any, value: Any) -> Any:
    """A value of JSON that a stranger has sent, as ``kind``: a record, or the type of a field."""
    origin, inner, is_record = get_origin(kind), get_args(kind), is_dataclass(kind)
    if is_record:
        hints = _hints(kind)
        if type(value) is dict and value.keys() == hints.keys():
            return kind(**{name: _read(hint, value[name]) for name, hint in hints.items()})
    elif NoneType in inner:
        return None if value is None else _read(inner[0], value)
    elif origin is tuple:
        if type(value) is list and len(value) <= MOST_ENTRIES:
            return tuple([_read(inner[0], one) for one in value])
    elif origin is Mapping:
        if type(value) is dict and len(value) <= MOST_ENTRIES:
            return {_read(inner[0], k): _read(inner[1], one) for k, one in value.items()}
    elif kind is str:
        if type(value) is str and len(value) <= MOST_TEXT:  # without what would move a cursor
            return "".join(one if one.isprintable() else "?" for one in value)
    elif kind is int or origin is Annotated:
        bounds = inner[1] if inner else COUNT
        if is_whole(value, int(bounds.least), int(bounds.most)):
            return value
    elif kind is float:
        if is_real(value, -MOST_REAL, MOST_REAL):
            return float(value)
    elif type(value) is kind:
        return value
    raise ValueError(f"{value!r:.40}, wanted a {getattr(kind, '__name__', kind)}")
