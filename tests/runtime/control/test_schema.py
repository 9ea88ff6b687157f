"""Schema of control messages: what is refused, and in which words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from lossycoll.options.ranges import Between
from lossycoll.runtime.control.schema import (
    Address,
    Check,
    Coded,
    Length,
    Malformed,
    OtherVersion,
    Schema,
    Version,
)


def _below(value: int, size: int) -> int:
    if value >= size:
        raise ValueError(f"{value} of {size}")
    return value


@dataclass(frozen=True)
class Inner:
    number: Annotated[int, Between(0, 9)]
    below: Annotated[int, Between(0, 99), Check("below the size", _below)] = 0


@dataclass(frozen=True)
class Every:
    version: Annotated[int, Version(2)]
    real: Annotated[float, Between(-1, 1)]
    flag: bool
    text: Annotated[str, Length(1, 3)]
    many: Annotated[tuple[Inner, ...], Length(0, 2)]
    address: Address
    coded: Annotated[int, Coded("octal", lambda text, size: int(text, 8), "{:o}".format)]
    fields: dict[str, Any]
    rest: list[Any]


@dataclass(frozen=True)
class Empty:
    pass


SCHEMA: Schema[Every | Empty] = Schema(Every | Empty)
EVERY = Every(2, 0.5, True, "\u00e9", (Inner(9, 4),), ("::1", 80), 9, {"a": 1}, [1, [2]])
PACKED = b'["every",2,0.5,true,"\\u00e9",[[9,4]],["::1",80],"11",{"a":1},[1,[2]]]'


def test_there_and_back() -> None:
    assert SCHEMA.pack(EVERY) == PACKED
    assert SCHEMA.unpack(PACKED, 5) == EVERY
    assert SCHEMA.unpack(b'["empty"]') == Empty()
    whole = SCHEMA.unpack(PACKED.replace(b"0.5", b"1"), 5)
    assert isinstance(whole, Every)
    assert type(whole.real) is float, "a whole number is a number"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b"2,", b"3,", "every of version 3, wanted 2"),
        (b"2,", b"true,", "every: version: True, wanted"),
        (b"2,", b"", "wanted 9 fields: version, real"),
        (b"0.5", b"NaN", "NaN is no number"),
        (b"0.5", b"-Infinity", "-Infinity is no number"),
        (b"0.5", b"1e999", "every: real: inf, wanted a number from -1 to 1"),
        (b"0.5", b"1.01", "every: real: 1.01"),
        (b"0.5", b"false", "every: real: False"),
        (b"true", b"1", "every: flag: 1, wanted a bool"),
        (b'"\\u00e9"', b'""', "every: text: .*1 to 3 characters"),
        (b'"\\u00e9"', b'"long"', "every: text: "),
        (b'"\\u00e9"', b"[]", "every: text: "),
        (b"[[9,4]]", b"[[9]]", "every: many: 1 fields, wanted 2 fields: number, below"),
        (b"[[9,4]]", b"[[9,5]]", "every: many: below: 5 of 5"),
        (b"[[9,4]]", b"[[-1,4]]", "every: many: number: -1"),
        (b"[[9,4]]", b"[[9,4],[9,4],[9,4]]", "every: many: .*a list of 0 to 2"),
        (b"[[9,4]]", b'{"a":1}', "every: many: "),
        (b'["::1",80]', b'["::1"]', "every: address: 1 fields, wanted 2 fields: 1, 2"),
        (b'["::1",80]', b'["localhost",80]', "every: address: "),
        (b'["::1",80]', b'["::1",65536]', "every: address: 2: 65536"),
        (b'"11"', b'"9"', "every: coded: "),
        (b'{"a":1}', b"[]", "every: fields: .*wanted a dict"),
        (b"[1,[2]]", b"{}", "every: rest: .*wanted a list"),
        (b'"every"', b'"never"', "'never' is no kind of message here"),
        (b'"every"', b"1", "no message"),
        (PACKED, PACKED + b"[]", "no JSON: Extra data"),
        (PACKED, PACKED[:-1], "no JSON"),
        (PACKED, b"[" * 100_000, "no JSON"),
        (PACKED, b"\xff", "no JSON"),
        (PACKED, b"{}", "no message"),
        (PACKED, b"[]", "no message"),
        (PACKED, b'["empty",1]', "empty: 1 fields, wanted 0 fields: none"),
    ],
)
def test_what_is_refused(old: bytes, new: bytes, why: str) -> None:
    changed = PACKED.replace(old, new, 1)
    assert changed != PACKED
    with pytest.raises(Malformed, match=why) as error:
        SCHEMA.unpack(changed, 5)
    assert isinstance(error.value, OtherVersion) == ("of version" in why)
