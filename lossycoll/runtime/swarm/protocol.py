"""Messages of peers and directories of a swarm, by the schema of runtime/control
(docs/swarm-messages.md has the table), and the settings that peers of a round must agree on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

from lossycoll.options.ranges import Between
from lossycoll.runtime.control.schema import (
    PRINTABLE,
    Address,
    Check,
    Count,
    Host,
    Length,
    Malformed,
    Port,
    Schema,
    Version,
)

VERSION: Final = 10
MOST_PEERS: Final = 4096  # peers that a swarm has room for: numbers are below it
MOST_MEMBERS: Final = 128  # most members of a group
MOST_NAMES: Final = 1024
"""In one message: whatever they are, it is no longer than a connection takes."""
START: Final = 16  # leading digits of an incarnation, equal for all connections of a process
MOST_WEIGHT: Final = 1e6
LONGEST_NAME: Final = 64
MOST_DIRECTORIES: Final = 16
MOST_OTHERS: Final = 2  # further addresses of a peer
MOST_EPOCH: Final = 1 << 40
AVERAGE: Final = "average"  # a setting, and its value where no training says what the values are
TENSORS: Final = "tensors"
SHAPES: Final = "shapes"  # the setting that is a digest of them
_HEX: Final = re.compile("[0-9a-f]{16,64}")
SILENT, LATE_AGAIN, ELSEWHERE, OUT_OF_REACH, OLDER = range(5)
WHY_ABSENT: Final = (
    "it hasn't said what it averages",
    "it wasn't ready in time",
    "it averages in another round",
    "no route leads to it from all members",
    "its state is older, and it is to take the newer one",
)


def _printable(name: str, size: int) -> str:
    if not name.isprintable():
        raise Malformed(f"{name!r} is no name: it has characters that can't be printed")
    return name


def _hex(text: str, size: int) -> str:
    if not _HEX.fullmatch(text):
        raise Malformed(f"{text!r:.80} is no digest")
    return text


def _whole_bytes(text: str, size: int) -> str:
    if len(text) % 2:  # connectivity messages have its last bytes
        raise Malformed(f"{text!r} is no incarnation: half a byte is too much")
    return text


def _once(members: tuple[Member, ...], size: int) -> tuple[Member, ...]:
    if len({one.number for one in members}) != len(members):
        raise Malformed("a member twice")
    return members


Name: TypeAlias = Annotated[str, Length(1, LONGEST_NAME), Check("printable", _printable)]
Hex: TypeAlias = Annotated[str, Length(16, 64), Check("hexadecimal digits", _hex)]
Incarnation: TypeAlias = Annotated[Hex, Check("whole bytes", _whole_bytes)]
Digest: TypeAlias = Annotated[
    str,
    Length(0, 64),
    Check("hexadecimal digits, or none", lambda text, size: text and _hex(text, size)),
]
Number: TypeAlias = Annotated[int, Between(0, MOST_PEERS - 1)]
Epoch: TypeAlias = Annotated[int, Between(0, MOST_EPOCH)]
Flag: TypeAlias = Annotated[int, Between(0, 1)]
Id: TypeAlias = Annotated[int, Between(1, (1 << 32) - 1)]
Weight: TypeAlias = Annotated[float, Between(0, MOST_WEIGHT)]
Text: TypeAlias = Annotated[str, Length(0, 4096), PRINTABLE]
Names: TypeAlias = Annotated[tuple[Name, ...], Length(0, MOST_NAMES)]
Starts: TypeAlias = Annotated[tuple[Hex, ...], Length(0, MOST_PEERS)]
DirectoryList: TypeAlias = Annotated[tuple[Address, ...], Length(0, MOST_DIRECTORIES)]
Others: TypeAlias = Annotated[tuple[Address, ...], Length(0, MOST_OTHERS)]
Incarnations: TypeAlias = Annotated[tuple[Incarnation, ...], Length(1, MOST_MEMBERS)]
Why: TypeAlias = Annotated[int, Between(0, len(WHY_ABSENT) - 1)]
Absent: TypeAlias = Annotated[tuple[tuple[Name, Why], ...], Length(0, MOST_MEMBERS)]


@dataclass(frozen=True, slots=True)
class Member:
    """Member of a group: all that another needs to exchange packets with it. ``others``: as in
    Here."""

    number: Number
    host: Host
    port: Port
    incarnation: Incarnation
    weight: Weight
    rate: Count = 0
    others: Others = ()


Members: TypeAlias = Annotated[
    tuple[Member, ...], Length(1, MOST_MEMBERS), Check("each once", _once)
]
Two: TypeAlias = Annotated[tuple[Member, Member], Check("not the same", _once)]


@dataclass(frozen=True, slots=True)
class Join:
    """From a peer, first of all. ``number``, ``session`` and ``round``: what it has had since it
    came; MOST_PEERS, zeros and 0 if nothing. ``incarnation``: drawn for each connection, but
    for START digits."""

    version: Annotated[int, Version(VERSION)]
    name: Name
    incarnation: Incarnation
    number: Count
    session: Hex
    round: Count
    epoch: Epoch = 0


@dataclass(frozen=True, slots=True)
class Joined:
    """To a peer: what it is here, and what all have in common. ``session``: of packets."""

    number: Number
    session: Hex
    round: Count
    lease: Weight
    epoch: Epoch = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """To a peer that can't take part. The connection ends."""

    reason: Text


@dataclass(frozen=True, slots=True)
class Here:
    """From a peer that has joined: where its packets come from. ``others``: further places, [host,
    port] each: where the world sees them come from, if that isn't the same."""

    host: Host
    port: Port
    others: Others = ()


@dataclass(frozen=True, slots=True)
class Serves:
    """From a peer that has joined: it has a directory that others may turn to if this one ends.
    ``spare``: it opens that only if all others have gone."""

    host: Host
    port: Port
    spare: Flag = 0


@dataclass(frozen=True, slots=True)
class DirectoryStatus:
    """Status of a directory, to another one and back. ``peers``: heard from just now; ``free``: how
    many more it has room for; ``schema`` and ``wire``: of what they average; ``host`` and ``port``:
    where it is; ``takes``, in the answer: the peers of the one that asks may come, which then
    yields."""

    session: Hex
    id: Hex
    epoch: Epoch
    peers: Count
    free: Count
    round: Count
    schema: Digest
    wire: Name
    host: Host
    port: Port
    takes: Flag


@dataclass(frozen=True, slots=True)
class Redirect:
    """To a peer: it is to turn to that directory when its round is over. From a peer: it does."""

    host: Host
    port: Port


@dataclass(frozen=True, slots=True)
class Directories:
    """To all peers: whom to turn to in turn, [host, port] each."""

    addresses: DirectoryList


@dataclass(frozen=True, slots=True)
class Averages:
    """From a peer: what it is going to average, and on which grid ("": as the directory likes).
    ``wire``: how its packets carry floats. ``rate``: bytes/s of its link; 0: it doesn't say.
    ``settings``: what ``schema`` is a digest of, as in ``every=10, outer=SGD``. ``draft``: more
    settings follow before its first round. ``peers``: it is answered when so many, itself included,
    have said the same. ``target``: samples of all peers after which a round is due; 0: whenever
    peers are ready."""

    schema: Hex
    grid: Text
    wire: Name = "same"
    rate: Count = 0
    settings: Text = ""
    draft: Flag = 0
    peers: Count = 0
    target: Count = 0


@dataclass(frozen=True, slots=True)
class Agreed:
    """To a peer: it may average that. ``reason``: why it may not; "" if it may."""

    reason: Text


@dataclass(frozen=True, slots=True)
class Who:
    """From a peer, or from somebody who looks from outside: who is there?"""


@dataclass(frozen=True, slots=True)
class Peers:
    """To whoever has asked: the names of all peers, in order of their numbers, some in each
    message. ``more``: there is another one."""

    names: Names
    more: Flag


@dataclass(frozen=True, slots=True)
class Ready:
    """From a peer: it has something to average, which counts so much."""

    weight: Weight


@dataclass(frozen=True, slots=True)
class Due:
    """To a peer: all peers together have seen enough samples for a round. It is to be ready after
    its present step."""


@dataclass(frozen=True, slots=True)
class Group:
    """To each of its members: a round begins. ``number``: the group's, of packets. ``absent``: who
    is on the same row and isn't a member, [name, index of WHY_ABSENT] each. ``samples``: that the
    swarm has had. ``newer``: samples of a state that its only member is to take; 0: none."""

    round: Count
    number: Id
    members: Members
    absent: Absent = ()
    samples: Count = 0
    newer: Count = 0


@dataclass(frozen=True, slots=True)
class Unreachable:
    """From a peer: no route leads to these members of its latest group, or other ends of
    transfers."""

    incarnations: Incarnations


@dataclass(frozen=True, slots=True)
class Offers:
    """From a peer: whether it has a state that newcomers may take, 1 or 0, and its progress.
    ``samples``: that the swarm had had in its latest round. ``since``: its own since then.
    ``claims``: its state comes from a checkpoint; the newest wins."""

    has: Flag
    samples: Count = 0
    since: Count = 0
    claims: Flag = 0


@dataclass(frozen=True, slots=True)
class Seek:
    """From a peer: it wants the state of others, of so many at most."""

    donors: Number


@dataclass(frozen=True, slots=True)
class Transfer:
    """To both of its members: the first has a state for the second. ``number``: of the group, of
    packets."""

    number: Id
    members: Two


@dataclass(frozen=True, slots=True)
class Found:
    """To a peer that seeks: so many transfers have been told."""

    transfers: Count


@dataclass(frozen=True, slots=True)
class Gone:
    """To members of its latest group: this peer is lost, or has left. Another incarnation of it may
    be there already."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Present:
    """To all peers, of a directory that has taken over: the first START digits of the incarnations
    that are here. Of others nobody else says that they are lost."""

    starts: Starts


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Both ways: whoever says it lives. ``peers``: how many there are, as the directory knows. From
    a newcomer, before it joins: is this the directory in use? One that isn't names others."""

    peers: Count


@dataclass(frozen=True, slots=True)
class Probe:
    """To a peer whose name another process wants: it answers by a heartbeat at once, if it
    lives."""


@dataclass(frozen=True, slots=True)
class Leave:
    """From a peer that goes, or to all peers of a directory that does."""


Message: TypeAlias = (
    Join
    | Joined
    | Refused
    | Here
    | Serves
    | DirectoryStatus
    | Redirect
    | Directories
    | Averages
    | Agreed
    | Who
    | Peers
    | Ready
    | Due
    | Group
    | Unreachable
    | Offers
    | Seek
    | Transfer
    | Found
    | Gone
    | Present
    | Heartbeat
    | Probe
    | Leave
)

SWARM: Final[Schema[Message]] = Schema(Message)
pack, unpack = SWARM.pack, SWARM.unpack


def text_of(settings: Mapping[str, object]) -> str:
    """Settings as a message carries them. ``settings``: names and values, none of which has a comma
    or an equals sign."""
    return ", ".join(f"{name}={value}" for name, value in sorted(settings.items()))


def digest_of(settings: str) -> str:
    return hashlib.sha256(settings.encode()).hexdigest()[:32]


def difference(own: Averages, other: Averages) -> str:
    """Values in which a peer differs from another, so that they can't be in one round.

    Of a draft only what both have said is compared. A peer that averages tensors by itself may
    begin a training later, so its settings may lack those of one.

    Returns as in ``every=5, wanted 10``; "": none.
    """
    mine, theirs = _items(own.settings), _items(other.settings)
    is_partial = own.draft or other.draft or TENSORS in (mine.get(AVERAGE), theirs.get(AVERAGE))
    names = mine.keys() & theirs.keys() if is_partial else mine.keys() | theirs.keys()
    if is_partial:
        names -= {AVERAGE}
    differ = [
        "tensors of other shapes or types"  # their digest tells nobody anything
        if name == SHAPES and name in mine and name in theirs
        else f"{name}={mine.get(name, 'not set')}, wanted {theirs.get(name, 'not set')}"
        for name in sorted(names)
        if mine.get(name) != theirs.get(name)
    ]
    if not differ and not is_partial and own.schema != other.schema:
        differ = [f"schema {own.schema}, wanted {other.schema}"]
    return "; ".join(differ)


def _items(settings: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in settings.split(", ") if item]
    return {name: value for name, _, value in pairs}
