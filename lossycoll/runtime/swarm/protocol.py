"""Messages of peers and directories: JSON lists, ``[kind, field, ...]``, each field checked before
anything is made of it. docs/swarm-reference.md has the table.

Long because there are many kinds of messages, each with its fields and their checks.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

from lossycoll.runtime.world.messages import Malformed, from_json

VERSION: Final = 8
MOST_PEERS: Final = 4096
"""Peers that a swarm has room for: numbers are below it."""
MOST_MEMBERS: Final = 128
"""Of a group."""
MOST_NAMES: Final = 1024
"""In one message: whatever they are, it is no longer than a connection takes."""
START: Final = 16
"""Of an incarnation: the digits that all connections of a process have in common."""
MOST_WEIGHT: Final = 1e6
LONGEST_NAME: Final = 64
MOST_DIRECTORIES: Final = 16
MOST_OTHERS: Final = 2
"""Further places of a peer."""
MOST_EPOCH: Final = 1 << 40
_HEX: Final = re.compile("[0-9a-f]{16,64}")
SILENT, LATE_AGAIN, ELSEWHERE, OUT_OF_REACH, OLDER = range(5)
WHY_ABSENT: Final = (
    "it hasn't said what it averages",
    "it wasn't ready in time",
    "it averages in another round",
    "no route leads to it from all members",
    "its state is older, and it is to take the newer one",
)

# The names of these types choose the checks of the fields that have them.
Name: TypeAlias = str
Hex: TypeAlias = str
Incarnation: TypeAlias = str
Schema: TypeAlias = str
Host: TypeAlias = str
Port: TypeAlias = int
Number: TypeAlias = int
Count: TypeAlias = int
Epoch: TypeAlias = int
Flag: TypeAlias = int
Id: TypeAlias = int
Weight: TypeAlias = float
Text: TypeAlias = str
Names: TypeAlias = tuple[str, ...]
Starts: TypeAlias = tuple[str, ...]
Places: TypeAlias = tuple[tuple[str, int], ...]
Others: TypeAlias = tuple[tuple[str, int], ...]
Incarnations: TypeAlias = tuple[str, ...]
Absent: TypeAlias = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Join:
    """From a peer, first of all. ``number``, ``session`` and ``round``: what it has had since it
    came; MOST_PEERS, zeros and 0 if nothing. ``incarnation``: drawn for each connection, but
    for START digits."""

    version: Count
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
    """From a peer that has joined: it has a directory that others may turn to if this one ends."""

    host: Host
    port: Port


@dataclass(frozen=True, slots=True)
class Spare:
    """From a peer that has joined: it opens a directory there if all others have gone."""

    host: Host
    port: Port


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
    schema: Schema
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

    places: Places


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
    """From a peer: who is there?"""


@dataclass(frozen=True, slots=True)
class Peers:
    """To a peer: the names of all, in order of their numbers, some in each message. ``more``: there
    is another one."""

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


@dataclass(frozen=True, slots=True)
class Group:
    """To each of its members: a round begins. ``number``: the group's, of packets. ``absent``: who
    is on the same row and isn't a member, [name, index of WHY_ABSENT] each. ``samples``: that the
    swarm has had. ``newer``: samples of a state that its only member is to take; 0: none."""

    round: Count
    number: Id
    members: tuple[Member, ...]
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
    members: tuple[Member, Member]


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
class Beat:
    """Both ways: whoever says it lives. ``peers``: how many there are, as the directory knows."""

    peers: Count


@dataclass(frozen=True, slots=True)
class Probe:
    """To a peer whose name another process wants: it answers by a beat at once, if it lives."""


@dataclass(frozen=True, slots=True)
class Leave:
    """From a peer that goes, or to all peers of a directory that does."""


Message: TypeAlias = (
    Join
    | Joined
    | Refused
    | Here
    | Serves
    | Spare
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
    | Beat
    | Probe
    | Leave
)


def pack(message: Message) -> bytes:
    """The bytes of a message."""
    return json.dumps(_plain(message), separators=(",", ":")).encode()


def unpack(packed: bytes) -> Message:
    """The message.

    Raises:
        Malformed: It isn't one.
    """
    values = from_json(packed)
    if type(values) is not list or not values or type(values[0]) is not str:
        raise Malformed("no message")
    kind = _KINDS.get(values[0])
    if kind is None:
        raise Malformed(f"{values[0]!r} is no kind of message")
    return _made(kind, values[1:])  # type: ignore[no-any-return]


def _plain(message: Any) -> list[Any]:
    values = [_values(getattr(message, entry.name)) for entry in fields(message)]
    return [type(message).__name__.lower(), *values]


def _values(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_values(one) for one in value]
    return _plain(value)[1:] if isinstance(value, Member) else value


def _made(kind: Any, values: list[Any]) -> Any:
    wanted = fields(kind)
    if len(values) != len(wanted):
        raise Malformed(f"{kind.__name__} has {len(values)} fields, wanted {len(wanted)}")
    return kind(
        *(_CHECKS[str(entry.type)](value) for entry, value in zip(wanted, values, strict=True))
    )


# ---- checks ----


def _name(value: Any) -> str:
    if type(value) is not str or not 0 < len(value) <= LONGEST_NAME or not value.isprintable():
        raise Malformed(f"{value!r} is no name: 1 to {LONGEST_NAME} printable characters")
    return value


def _hex(value: Any) -> str:
    if type(value) is not str or not _HEX.fullmatch(value):
        raise Malformed(f"{value!r} is no digest")
    return value


def _incarnation(value: Any) -> str:
    found = _hex(value)
    if len(found) % 2:  # connectivity messages have its last bytes
        raise Malformed(f"{value!r} is no incarnation: half a byte is too much")
    return found


def _schema(value: Any) -> str:
    return "" if value == "" else _hex(value)


def _host(value: Any) -> str:
    try:
        return str(ipaddress.ip_address(value if type(value) is str else ""))
    except ValueError:
        raise Malformed(f"{value!r} is no address") from None


def _between(least: int, most: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise Malformed(f"{value!r} is no number from {least} to {most}")
        return value

    return check


def _weight(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MOST_WEIGHT:  # NaN is neither
        raise Malformed(f"{value!r} is no weight from 0 to {MOST_WEIGHT:g}")
    return float(value)


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > 4096:
        raise Malformed("no text, or too long")
    return value


def _members(value: Any) -> tuple[Member, ...]:
    if type(value) is not list or not 0 < len(value) <= MOST_MEMBERS:
        raise Malformed("no members, or too many")
    found = tuple(_made(Member, one if type(one) is list else []) for one in value)
    if len({one.number for one in found}) != len(found):
        raise Malformed("a member twice")
    return found


def _two_members(value: Any) -> tuple[Member, ...]:
    found = _members(value)
    if len(found) != 2:
        raise Malformed(f"{len(found)} members, wanted 2")
    return found


def _names(value: Any) -> tuple[str, ...]:
    if type(value) is not list or len(value) > MOST_NAMES:
        raise Malformed("no names, or too many")
    return tuple(map(_name, value))


def _starts(value: Any) -> tuple[str, ...]:
    if type(value) is not list or len(value) > MOST_PEERS:
        raise Malformed("no starts, or too many")
    return tuple(map(_hex, value))


def _places(most: int) -> Callable[[Any], tuple[tuple[str, int], ...]]:
    def check(value: Any) -> tuple[tuple[str, int], ...]:
        if type(value) is not list or len(value) > most:
            raise Malformed("no places, or too many")
        if not all(type(one) is list and len(one) == 2 for one in value):
            raise Malformed(f"{value!r} are no places")
        return tuple((_host(host), _between(1, 65535)(port)) for host, port in value)

    return check


def _absent(value: Any) -> tuple[tuple[str, int], ...]:
    if type(value) is not list or len(value) > MOST_MEMBERS:
        raise Malformed("no absent peers, or too many")
    if not all(type(one) is list and len(one) == 2 for one in value):
        raise Malformed(f"{value!r} are no absent peers")
    why = _between(0, len(WHY_ABSENT) - 1)
    return tuple((_name(name), why(code)) for name, code in value)


def _incarnations(value: Any) -> tuple[str, ...]:
    if type(value) is not list or not 0 < len(value) <= MOST_MEMBERS:
        raise Malformed("no incarnations, or too many")
    return tuple(map(_incarnation, value))


_CHECKS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "Name": _name,
    "Hex": _hex,
    "Incarnation": _incarnation,
    "Schema": _schema,
    "Host": _host,
    "Port": _between(1, 65535),
    "Number": _between(0, MOST_PEERS - 1),
    "Count": _between(0, (1 << 53) - 1),
    "Epoch": _between(0, MOST_EPOCH),
    "Flag": _between(0, 1),
    "Id": _between(1, (1 << 32) - 1),
    "Weight": _weight,
    "Text": _text,
    "Names": _names,
    "Starts": _starts,
    "Places": _places(MOST_DIRECTORIES),
    "Others": _places(MOST_OTHERS),
    "Incarnations": _incarnations,
    "Absent": _absent,
    "tuple[Member, ...]": _members,
    "tuple[Member, Member]": _two_members,
}
_KINDS: Final[Mapping[str, type]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(Join, Joined, Refused, Here, Serves, Directories, Averages, Agreed, Who, Peers),
        *(
            Ready,
            Due,
            Group,
            Unreachable,
            Offers,
            Seek,
            Transfer,
            Found,
            Gone,
            Present,
            Beat,
            Probe,
            Leave,
        ),
        *(Spare, DirectoryStatus, Redirect),
    )
}
