"""Schema of control messages: dataclasses whose annotations carry the bounds of each field.

A message travels as JSON, ``[kind, field, ...]``: the class's name in lower case, then the fields
in their order. What is read has been checked: an unknown kind, another version, a wrong number of
fields, a wrong type (a bool is no number), a value out of bounds, NaN, and anything after the
message raise :class:`Malformed`, with the names of kind and field. Fields are

- numbers, ``Annotated[int, Between(0, 9)]`` (or float), and bools;
- texts and lists of a length, ``Annotated[tuple[Name, ...], Length(1, 16)]``; a text has a
  :class:`Check` as well, or whoever sends it writes to the logs and terminals of this end;
- pairs, ``tuple[Name, Number]``, and structs: other dataclasses, as lists of their fields;
- objects of JSON as they are, ``dict[str, Any]``, and other messages that stay unread, ``list``.

A :class:`Check` adds a rule of the type's own, which may depend on the size of the world or group.
docs/control-messages.md has the tables of all messages, by :mod:`tools.message_tables`.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    NoReturn,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from lossycoll.options.ranges import Between

Message = TypeVar("Message")
Read: TypeAlias = Callable[[Any, int], Any]
"""Checks a value of JSON, in a world or group of so many ranks."""
Plain: TypeAlias = Callable[[Any], Any]
"""Makes a value JSON's, where it isn't already."""


class Malformed(ValueError):
    """Bytes that are no message."""


class OtherVersion(Malformed):
    """A message of a kind that is known, in another version."""


@dataclass(frozen=True)
class Length:
    """Bounds of the length of a text or a list."""

    least: int
    most: int


@dataclass(frozen=True)
class Check:
    """Rule of a type beyond its bounds: ``read`` returns the value, or raises ValueError."""

    words: str  # what it wants, as docs say it
    read: Read


@dataclass(frozen=True)
class Coded(Check):
    """Rule of a type that JSON carries as another: what ``plain`` makes of a value."""

    plain: Plain


@dataclass(frozen=True)
class Version:
    """The one version that a kind's first field may have."""

    number: int


def _json_only(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_encode: Final = json.JSONEncoder(separators=(",", ":")).encode
_decode: Final = json.JSONDecoder(parse_constant=_json_only).decode


class Schema(Generic[Message]):
    """Kinds of messages that are read at one place; ``messages`` is the union of their classes."""

    def __init__(self, messages: Any) -> None:
        classes = get_args(messages) if isinstance(messages, UnionType) else (messages,)
        self.kinds: dict[str, type] = {cls.__name__.lower(): cls for cls in classes}
        self._plain = {cls: (kind, _struct(cls)[1]) for kind, cls in self.kinds.items()}
        self._read = {kind: _struct(cls)[0] for kind, cls in self.kinds.items()}
        self.versions = {
            kind: mark.number
            for kind, cls in self.kinds.items()
            for mark in get_args(get_type_hints(cls, include_extras=True).get("version"))
            if isinstance(mark, Version)
        }

    def plain(self, message: Message) -> list[Any]:
        """A message as what JSON can carry."""
        kind, plain = self._plain[type(message)]
        return [kind, *plain(message)]

    def pack(self, message: Message) -> bytes:
        """The bytes of a message."""
        return _encode(self.plain(message)).encode()

    def unpack(self, packed: bytes, size: int = 0) -> Message:
        """The message of a world or group of ``size`` ranks. Malformed: it is none."""
        try:
            values = _decode(packed.decode())
        except (ValueError, RecursionError) as error:
            raise Malformed(f"no JSON: {error}") from None
        return self.read(values, size)

    def read(self, values: Any, size: int = 0) -> Message:
        """The message that JSON has carried. Malformed: it is none."""
        if type(values) is not list or not values or type(values[0]) is not str:
            raise Malformed("no message")
        kind, *rest = values
        check = self._read.get(kind)
        if check is None:
            raise Malformed(f"{kind!r:.40} is no kind of message here")
        wanted = self.versions.get(kind)
        if wanted is not None and rest and type(rest[0]) is int and rest[0] != wanted:
            raise OtherVersion(f"{kind} of version {rest[0]!r:.20}, wanted {wanted}")
        try:
            return check(rest, size)  # type: ignore[no-any-return]
        except Malformed as error:
            raise Malformed(f"{kind}: {error}") from None


def _struct(cls: Any) -> tuple[Read, Plain]:
    """Codec of a dataclass, which travels as a list of its fields."""
    hints = get_type_hints(cls, include_extras=True)
    names = [entry.name for entry in dataclasses.fields(cls)]
    read, plain = _row(names, [_codec(hints[name]) for name in names])
    return (
        lambda value, size: cls(*read(value, size)),
        lambda message: plain([getattr(message, name) for name in names]),
    )


def _row(names: Sequence[str], codecs: Sequence[tuple[Read, Plain | None]]) -> tuple[Read, Plain]:
    """Codec of a list that has one field of each name."""
    readers, plains = [read for read, _ in codecs], [plain for _, plain in codecs]

    def read(value: Any, size: int) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(names):
            found = f"{len(value)} fields" if type(value) is list else f"{value!r:.40}"
            raise Malformed(f"{found}, wanted {len(names)} fields: {', '.join(names) or 'none'}")
        values: list[Any] = []
        try:
            for check, field in zip(readers, value, strict=True):
                values.append(check(field, size))
        except ValueError as error:
            raise Malformed(f"{names[len(values)]}: {error}") from None
        return tuple(values)

    def plain(values: Sequence[Any]) -> list[Any]:
        pairs = zip(plains, values, strict=True)
        return [value if to is None else to(value) for to, value in pairs]

    return read, plain


def _codec(hint: Any) -> tuple[Read, Plain | None]:
    """Codec of a field: its check, and what makes its value JSON's (None: it already is)."""
    base, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    for mark in marks:
        if isinstance(mark, Coded):
            return mark.read, mark.plain
    read, plain = _bounded(base, marks)
    for mark in marks:
        if isinstance(mark, Check):
            read = _then(read, mark.read)
    return read, plain


def _then(first: Read, second: Read) -> Read:
    return lambda value, size: second(first(value, size), size)


def _bounded(base: Any, marks: list[Any]) -> tuple[Read, Plain | None]:
    origin, inner = get_origin(base), get_args(base)
    if dataclasses.is_dataclass(base):
        return _struct(base)
    if origin is tuple and inner[-1] is not Ellipsis:
        return _row([f"{n + 1}" for n in range(len(inner))], [_codec(each) for each in inner])
    for mark in marks:
        if isinstance(mark, Version):
            return _number(int, mark.number, mark.number), None
        if isinstance(mark, Between):
            return _number(base, mark.least, mark.most), None
        if isinstance(mark, Length) and base is str:
            return _text(mark.least, mark.most), None
        if isinstance(mark, Length):
            return _list(_codec(inner[0]), mark.least, mark.most)
    assert base in (bool, dict, list) or origin in (dict, list), f"{base} has no bounds"
    return _of_type(origin or base), None


def _of_type(kind: type) -> Read:
    def read(value: Any, size: int) -> Any:
        if type(value) is not kind:
            raise Malformed(f"{value!r:.40}, wanted a {kind.__name__}")
        return value

    return read


def _number(kind: type[int] | type[float], least: float, most: float) -> Read:
    kinds = {int, kind}
    wanted = f"a number from {least:g} to {most:g}"
    if kind is int:
        wanted = f"a whole number from {least} to {most}"

    def read(value: Any, size: int) -> float:
        if type(value) not in kinds or not least <= value <= most:  # NaN is neither
            raise Malformed(f"{value!r:.40}, wanted {wanted}")
        return kind(value)

    return read


def _text(least: int, most: int) -> Read:
    def read(value: Any, size: int) -> str:
        if type(value) is not str or not least <= len(value) <= most:
            raise Malformed(f"{value!r:.40}, wanted a text of {least} to {most} characters")
        return value

    return read


def _list(codec: tuple[Read, Plain | None], least: int, most: int) -> tuple[Read, Plain]:
    check, to = codec

    def read(value: Any, size: int) -> Any:
        if type(value) is not list or not least <= len(value) <= most:
            raise Malformed(f"{value!r:.40}, wanted a list of {least} to {most}")
        return tuple([check(one, size) for one in value])

    return read, list if to is None else lambda values: [to(one) for one in values]


# ---- types that several schemas have ----

_PLAIN: Final = re.compile("[!-~]+")


@functools.lru_cache(4096)
def _address(text: str) -> str:
    if not _PLAIN.fullmatch(text):  # a scope (fe80::1%eth0) may be anything to ip_address
        raise ValueError(f"{text!r} is no address")
    return str(ipaddress.ip_address(text))


def printable(text: str, but: str = "") -> str:
    """A text of somebody else, as logs and terminals can take it: "?" stands for each character
    that can't be printed or encoded. ``but``: characters that stay."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in but else "?" for one in text)


PRINTABLE: Final = Check('what can\'t be printed becomes "?"', lambda text, size: printable(text))
PRINTABLE_LINES: Final = Check(
    'what can\'t be printed becomes "?", except ends of lines',
    lambda text, size: printable(text, but="\n"),
)
Count: TypeAlias = Annotated[int, Between(0, (1 << 53) - 1)]
Host: TypeAlias = Annotated[
    str, Length(2, 64), Check("a numeric IP address", lambda value, size: _address(value))
]
Port: TypeAlias = Annotated[int, Between(1, 65535)]
Address: TypeAlias = tuple[Host, Port]
