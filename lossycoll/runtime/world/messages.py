"""Messages of the control plane: one frozen dataclass per kind, by the schema of runtime/control.

docs/control-messages.md has the table. A rank is the world's, or the group's in its messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import Annotated, Any, Final, TypeAlias

from lossycoll.options.ranges import Between
from lossycoll.runtime.control.schema import (
    PRINTABLE_LINES,
    Check,
    Coded,
    Length,
    Malformed,
    Schema,
    Version,
)

VERSION: Final = 3
PLANE: Final = "control"
"""The name of the keys that seal them."""
MOST_RANKS: Final = 1 << 16
"""Ranks of a world, at most."""


def _is_rank(value: int, size: int) -> int:
    if value >= size:
        raise Malformed(f"rank {value} of {size}")
    return value


def _ascend(ranks: tuple[int, ...], size: int) -> tuple[int, ...]:
    if any(one >= other for one, other in pairwise(ranks)):
        raise Malformed(f"ranks {ranks}, wanted ascending ones")
    return ranks


def _mask(text: Any, size: int) -> int:
    found = int(text, 16) if type(text) is str and len(text) <= size // 4 + 1 else 0
    if not 0 < found < 1 << size:
        raise Malformed(f"{text!r:.40} is no set of some of {size} ranks")
    return found


def _follow(views: tuple[View, ...], size: int) -> tuple[View, ...]:
    if views[0] != View(0, tuple(range(size))):
        raise Malformed("the first view is not of all ranks")
    for before, after in pairwise(views):
        if after.first < before.first or not set(after.members) < set(before.members):
            raise Malformed(f"view {after} can't follow {before}")
    if not views[-1].members:
        raise Malformed("the last view is of nobody")
    return views


def _names_kind(body: list[Any], size: int) -> list[Any]:
    if not body or type(body[0]) is not str:
        raise Malformed("no message in it")
    return body


Number: TypeAlias = Annotated[int, Between(-1, (1 << 64) - 1)]
Seconds: TypeAlias = Annotated[float, Between(0, 1e12)]
Text: TypeAlias = Annotated[str, Length(0, 1 << 16), PRINTABLE_LINES]
Rank: TypeAlias = Annotated[int, Between(0, MOST_RANKS), Check("a rank", _is_rank)]
Ranks: TypeAlias = Annotated[
    tuple[Rank, ...], Length(0, MOST_RANKS), Check("ascending, each once", _ascend)
]
RankSet: TypeAlias = Annotated[
    int, Coded("a text in hexadecimal, of which bit r is rank r", _mask, "{:x}".format)
]
Members: TypeAlias = Annotated[tuple[Number, ...], Length(1, MOST_RANKS)]
Fields: TypeAlias = dict[str, Any]
Body: TypeAlias = Annotated[list[Any], Check("a message of a group, passed on unread", _names_kind)]


@dataclass(frozen=True, slots=True)
class View:
    """Operations from number ``first`` on are those of ``members`` (ranks, ascending)."""

    first: Number
    members: Ranks


Views: TypeAlias = Annotated[
    tuple[View, ...],
    Length(1, MOST_RANKS),
    Check("the first of all ranks from 0 on, each later one of fewer", _follow),
]


# ---- of the world: ranks are those of the world ----


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message in both directions: who speaks, and that it knows the world's secret.

    ``purpose``: "member" of the world, or "question" whether the other one lives. A "probe" is the
    question of a process that is no rank of the world (yet): ``rank`` is the one asked for then.
    "rekey", over a sealed connection alone, asks for :class:`Rekey`; "status" and "stacks" for
    what queries.py has.
    """

    version: Annotated[int, Version(VERSION)]
    token: Text
    rank: Rank
    purpose: Text


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
class Welcome(Follow):
    """From the coordinator, the answer to :class:`Follow`. ``ready``: it has heard every rank."""

    ready: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """From the coordinator: it has heard every rank."""


@dataclass(frozen=True, slots=True)
class Dead:
    """Death of ``rank``, from the coordinator. ``silent`` in seconds; ``ended``: its process."""

    rank: Rank
    silent: Seconds
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
    """Message of a group, through the coordinator, which passes its ``body`` on unread."""

    sender: Rank
    to: RankSet
    group: Number
    body: Body


# ---- of a group: ranks are those of the group ----


@dataclass(frozen=True, slots=True)
class Abort:
    """The sender gives the group up; ``kind``: the error's type."""

    reason: Text
    kind: Text


@dataclass(frozen=True, slots=True)
class Bye:
    """The sender leaves the group after call number ``seq``; ``why``: its own error. ``stats``: its
    counters, which nobody can ask it for any more."""

    seq: Number
    why: Text
    stats: Fields


@dataclass(frozen=True, slots=True)
class Waiting:
    """The sender has waited for its call number ``seq`` for a while. ``digest``: of its
    definition (:class:`Defined`)."""

    seq: Number
    call: Text
    digest: Number


@dataclass(frozen=True)
class Defined:
    """The group as one rank defines it: that rank, torch's global rank of each rank, and the
    options that all must agree on."""

    rank: Number
    members: Members
    options: Fields

    @cached_property
    def digest(self) -> int:
        """64 bits, equal on ranks whose members and options are."""
        text = json.dumps([self.members, sorted(self.options.items())])
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class OwnHost:
    """The sender's options ask for a host that this group has alone: by those in ``options``."""

    options: Fields


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The sender's call number ``seq`` is ``call``, that of ``rank`` is ``other``."""

    seq: Number
    call: Text
    rank: Rank
    other: Text


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
    """The sender has stopped before operation ``next``, and gives ``lost`` up, of which those in
    ``ended`` are known to have ended."""

    lost: Ranks
    ended: Ranks
    next: Number
    views: Views


@dataclass(frozen=True, slots=True)
class ViewChange:
    """Views: the ranks left, from which operation on."""

    views: Views


GroupMessage: TypeAlias = (
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
Message: TypeAlias = Hello | Heartbeat | Follow | Welcome | Ready | Dead | Left | Rekey | Addressed

WORLD: Final[Schema[Message]] = Schema(Message)
GROUP: Final[Schema[GroupMessage]] = Schema(GroupMessage)
pack, unpack = WORLD.pack, WORLD.unpack
REPLAYED: Final = frozenset({"abort", "bye", "mismatch", "missed", "ownhost"})
"""Kinds that are said once, and so have to survive a coordinator."""


def bits(ranks: Sequence[int]) -> int:
    """A set of ranks as one number: bit r is rank r."""
    return sum({1 << rank for rank in ranks})


def ranks_in(mask: int) -> list[int]:
    """The ranks of a set, ascending."""
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
