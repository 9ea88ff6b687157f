"""The control plane's messages: one frozen dataclass per kind, its bytes, and its checks.

A message travels as JSON, ``[kind, field, ...]``, in the order of the dataclass's fields. What is
unpacked has been checked field by field: a wrong number of fields, a wrong type, a rank that isn't
there or a view that can't be raises :class:`Malformed`. docs/control.md has the table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Final, TypeAlias

from .view_agreement import View

LONGEST_TEXT: Final = 1 << 16
MOST_MEMBERS: Final = 1 << 16
MOST: Final = 1 << 64
"""Every number is below it."""

# The names of these types choose the checks of the fields that have them.
Rank: TypeAlias = int
Ranks: TypeAlias = tuple[int, ...]
Numbers: TypeAlias = tuple[int, ...]
Views: TypeAlias = tuple[View, ...]
Fields: TypeAlias = Mapping[str, Any]
Packed: TypeAlias = list[Any]


class Malformed(ValueError):
    """Bytes that are no message."""


# ---- of the world: ranks are those of the world ----


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message in both directions: who speaks, and that it knows the world's secret.

    ``purpose``: "member" of the world, or "question" whether the other one lives. A "probe" is the
    question of a process that is no rank of the world (yet): ``rank`` is the one asked for then.
    "rekey", over a sealed connection alone, asks for :class:`Rekey`; "status" and "stacks" for
    what status_answer.py has.
    """

    version: int
    token: str
    rank: Rank
    purpose: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """From the coordinator: it lives. From the others: the answer."""


@dataclass(frozen=True, slots=True)
class Follow:
    """To the coordinator: the sender takes it for the coordinator, and knows of these."""

    lost: Ranks
    ended: Ranks
    left: Ranks


@dataclass(frozen=True, slots=True)
class Welcome:
    """From the coordinator, the answer to :class:`Follow`. ``ready``: it has heard every rank."""

    lost: Ranks
    ended: Ranks
    left: Ranks
    ready: bool


@dataclass(frozen=True, slots=True)
class AllHeard:
    """From the coordinator: it has heard every rank."""


@dataclass(frozen=True, slots=True)
class Dead:
    """Death of ``rank``, from the coordinator. ``silent`` in seconds; ``ended``: its process."""

    rank: Rank
    silent: float
    ended: bool


@dataclass(frozen=True, slots=True)
class Left:
    """From the rank that leaves, to the coordinator; and from the coordinator to the others."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Rekey:
    """To the coordinator, and from it to the others: seal with new keys from now on."""


@dataclass(frozen=True, slots=True)
class Addressed:
    """Message of a group, through the coordinator, from ``sender`` to ranks ``to`` (bits).

    ``body`` is one of the group's messages, packed: the coordinator passes it on unread.
    """

    sender: Rank
    to: int
    group: int
    body: Packed


# ---- of a group: ranks are those of the group ----


@dataclass(frozen=True, slots=True)
class Abort:
    """The sender gives the group up; ``kind``: the error's type."""

    reason: str
    kind: str


@dataclass(frozen=True, slots=True)
class Bye:
    """The sender leaves the group after call number ``seq``; ``why``: its own error.

    ``stats``: its counters, which nobody can ask it for any more.
    """

    seq: int
    why: str
    stats: Fields


@dataclass(frozen=True, slots=True)
class Waiting:
    """The sender has waited for its call number ``seq`` for a while.

    ``digest``: of what it takes the group for (:class:`Definition`).
    """

    seq: int
    call: str
    digest: int


@dataclass(frozen=True, slots=True)
class Defined:
    """Sender's definition of the group: the fields of its :class:`Definition`."""

    rank: int
    members: Numbers
    options: Fields


@dataclass(frozen=True, slots=True)
class OwnHost:
    """The sender's options ask for a host that this group has alone: by those in ``options``."""

    options: Fields


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The sender's call number ``seq`` is ``call``, that of ``rank`` is ``other``."""

    seq: int
    call: str
    rank: Rank
    other: str


@dataclass(frozen=True, slots=True)
class Missed:
    """The sender needs ``rank``, which has left: the group continues without it."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks for the counters of every rank."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The sender's counters."""

    stats: Fields


@dataclass(frozen=True, slots=True)
class State:
    """The sender has stopped before operation ``next``, and gives ``lost`` up.

    ``ended``: those of ``lost`` whose processes are known to have ended.
    """

    lost: Ranks
    ended: Ranks
    next: int
    views: Views


@dataclass(frozen=True, slots=True)
class ViewChange:
    """Views: the ranks left, from which operation on."""

    views: Views


Body: TypeAlias = (
    Abort
    | Bye
    | Waiting
    | Defined
    | OwnHost
    | Mismatch
    | Missed
    | Ask
    | Answer
    | State
    | ViewChange
)
Message: TypeAlias = (
    Hello | Heartbeat | Follow | Welcome | AllHeard | Dead | Left | Rekey | Addressed
)

REPLAYED: Final = frozenset({"abort", "bye", "mismatch", "missed", "ownhost"})
"""Kinds that are said once, and so have to survive a coordinator."""


def pack(message: Message | Body) -> bytes:
    """The bytes of a message."""
    return json.dumps(pack_list(message), separators=(",", ":")).encode()


def pack_list(message: Message | Body) -> Packed:
    """A message as what JSON can carry."""
    kind = _NAMES[type(message)]
    return [kind, *(_PLAIN.get(name, _same)(getattr(message, f)) for f, name, _ in _PARTS[kind])]


def unpack(packed: bytes, world: int) -> Message:
    """The message of a world of ``world`` ranks.

    Raises:
        Malformed: It isn't one.
    """
    return _checked(from_json(packed), world, _WORLD)  # type: ignore[no-any-return]


def from_json(packed: bytes) -> Any:
    """What bytes of a stranger's carry.

    Raises:
        Malformed: It isn't JSON.
    """
    try:
        return json.loads(packed)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no JSON: {error}") from None


def unpack_body(packed: Packed, size: int) -> Body:
    """The message of a group of ``size`` ranks.

    Raises:
        Malformed: It isn't one.
    """
    return _checked(packed, size, _GROUP)  # type: ignore[no-any-return]


def bits(ranks: Sequence[int]) -> int:
    """A set of ranks as one number: bit r is rank r."""
    total = 0
    for rank in ranks:
        total |= 1 << rank
    return total


def ranks_in(mask: int) -> list[int]:
    """The ranks of a set, ascending."""
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


# ---- checks ----


def _number(value: Any, world: int) -> int:
    del world
    if type(value) is not int or not -1 <= value < MOST:
        raise Malformed(f"{value!r} is no number")
    return value


def _seconds(value: Any, world: int) -> float:
    del world
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise Malformed(f"{value!r} is no time")
    return float(value)


def _flag(value: Any, world: int) -> bool:
    del world
    if type(value) is not bool:
        raise Malformed(f"{value!r} is no flag")
    return value


def _text(value: Any, world: int) -> str:
    del world
    if type(value) is not str or len(value) > LONGEST_TEXT:
        raise Malformed("no text, or too long")
    return value


def _rank(value: Any, world: int) -> int:
    if type(value) is not int or not 0 <= value < world:
        raise Malformed(f"rank is {value!r}, wanted one of {world}")
    return value


def _ranks(value: Any, world: int) -> Ranks:
    if type(value) is not list:
        raise Malformed(f"{value!r} are no ranks")
    found = tuple(_rank(rank, world) for rank in value)
    if list(found) != sorted(set(found)):
        raise Malformed(f"ranks are {value!r}, wanted ascending ones")
    return found


def _numbers(value: Any, world: int) -> Numbers:
    if type(value) is not list or not value or len(value) > MOST_MEMBERS:
        raise Malformed("no members, or too many")
    return tuple(_number(entry, world) for entry in value)


def _mask(value: Any, world: int) -> int:
    try:
        found = int(value, 16) if type(value) is str and len(value) <= world // 4 + 1 else -1
    except ValueError:
        found = -1
    if not 0 < found < 1 << world:
        raise Malformed(f"{value!r} is no set of some of {world} ranks")
    return found


def _views(value: Any, world: int) -> Views:
    """The first is of all ranks from operation 0 on; each later one of fewer, and not earlier."""
    if type(value) is not list or not value or len(value) > world:
        raise Malformed(f"{value!r} are no views")
    found: list[View] = []
    for entry in value:
        if type(entry) is not list or len(entry) != 2:
            raise Malformed(f"{entry!r} is no view")
        found.append(View(_number(entry[0], world), _ranks(entry[1], world)))
    if found[0] != View(0, tuple(range(world))):
        raise Malformed("the first view is not of all ranks")
    for before, after in pairwise(found):
        if after.first < before.first or not set(after.members) < set(before.members):
            raise Malformed(f"view {after} can't follow {before}")
    if not found[-1].members:
        raise Malformed("the last view is of nobody")
    return tuple(found)


def _fields(value: Any, world: int) -> Fields:
    del world
    if type(value) is not dict:
        raise Malformed(f"{value!r} are no fields")
    return value


def _packed(value: Any, world: int) -> Packed:
    del world
    if type(value) is not list or not value or type(value[0]) is not str:
        raise Malformed("no message in it")
    return value


def _same(value: Any) -> Any:
    return value


_CHECKS: Final[Mapping[str, Callable[[Any, int], Any]]] = {
    "int": _number,
    "float": _seconds,
    "bool": _flag,
    "str": _text,
    "Rank": _rank,
    "Ranks": _ranks,
    "Numbers": _numbers,
    "Views": _views,
    "Fields": _fields,
    "Packed": _packed,
    "to": _mask,
}
"""By the type of the field; the set of receivers by its name."""
_PLAIN: Final[Mapping[str, Callable[[Any], Any]]] = {
    "Ranks": list,
    "Numbers": list,
    "Views": lambda views: [[view.first, list(view.members)] for view in views],
    "to": lambda mask: f"{mask:x}",
}


def _parts(cls: type) -> list[tuple[str, str, Callable[[Any, int], Any]]]:
    found = []
    for entry in fields(cls):
        name = "to" if entry.name == "to" else str(entry.type)
        found.append((entry.name, name, _CHECKS[name]))
    return found


# The names on the wire; a renamed class keeps its name there.
_WORLD: Final[Mapping[str, type]] = {
    "hello": Hello,
    "heartbeat": Heartbeat,
    "follow": Follow,
    "welcome": Welcome,
    "ready": AllHeard,
    "dead": Dead,
    "left": Left,
    "rekey": Rekey,
    "addressed": Addressed,
}
_GROUP: Final[Mapping[str, type]] = {
    "abort": Abort,
    "bye": Bye,
    "waiting": Waiting,
    "defined": Defined,
    "ownhost": OwnHost,
    "mismatch": Mismatch,
    "missed": Missed,
    "ask": Ask,
    "answer": Answer,
    "state": State,
    "viewchange": ViewChange,
}
_NAMES: Final[Mapping[type, str]] = {cls: name for name, cls in {**_WORLD, **_GROUP}.items()}
_PARTS: Final = {name: _parts(cls) for cls, name in _NAMES.items()}


def _checked(values: Any, world: int, kinds: Mapping[str, type]) -> Any:
    if type(values) is not list or not values or type(values[0]) is not str:
        raise Malformed("no message")
    kind = kinds.get(values[0])
    if kind is None:
        raise Malformed(f"{values[0]!r} is no kind of message here")
    parts = _PARTS[values[0]]
    if len(values) != len(parts) + 1:
        raise Malformed(f"{values[0]} has {len(values) - 1} fields, wanted {len(parts)}")
    return kind(
        *(check(value, world) for value, (_, _, check) in zip(values[1:], parts, strict=True))
    )
