"""Texts that others send: whatever they are, this end can log, print and encode what it reads."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossycoll.runtime.control.schema import Malformed, Schema
from lossycoll.runtime.swarm.protocol import SWARM
from lossycoll.runtime.world.messages import GROUP, WORLD
from lossycoll.runtime.world.queries import ANSWER, Stacks, Status
from lossycoll.train.elastic.agreement import STORE, Generation, Participant
from tests.runtime.swarm.test_protocol import MESSAGES as OF_SWARM
from tests.runtime.world.test_messages import OF_GROUP, OF_WORLD
from tests.runtime.world.test_messages import WORLD as SIZE

ONE = Participant(1, "5c" * 8, 3)
SAID: list[tuple[Schema[Any], Any, str]] = [
    *((SWARM, one, "") for one in OF_SWARM),
    *((WORLD, one, "\n") for one in OF_WORLD if type(one).__name__ != "Addressed"),
    *((GROUP, one, "\n") for one in OF_GROUP),
    (ANSWER, Status(1, "5c" * 8, (("10.0.0.1", 7000), ("fe80::1%eth0", 7000)), 2), ""),
    (ANSWER, Stacks("thread MainThread:\n  here"), "\n"),
    *((STORE, one, "") for one in (ONE, Generation(0, (ONE,)))),
]
"""Messages, and what may stay of what can't be printed. The body of a group's message is read by
another schema, and objects of JSON are read one by one."""
ANY = st.text(st.characters(exclude_categories=()), min_size=1, max_size=4)
HOSTILE = [
    "\ud800",
    "\x1b[2J",
    "\r",
    "\0",
    "\u202e",
    "\x9b31m",
    "%\ud800",
    "fe80::1%\ud800",
    "1%\n",
]


def places(values: list[Any], at: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Where texts are, but for the first, which is the kind."""
    for number, one in enumerate(values):
        if isinstance(one, list):
            yield from places(one, (*at, number))
        elif isinstance(one, str) and (at or number):
            yield (*at, number)


def changed(values: list[Any], place: tuple[int, ...], text: str) -> Iterator[list[Any]]:
    """With a text in a place: in place of what is there, after it, and for as much at its end."""
    for how in ("only", "after", "end"):
        found = copy.deepcopy(values)
        inner = found
        for number in place[:-1]:
            inner = inner[number]
        before = inner[place[-1]]
        kept = {"only": "", "after": before, "end": before[: -len(text)]}[how]
        inner[place[-1]] = kept + text
        yield found


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value):
        for entry in dataclasses.fields(value):
            yield from texts(getattr(value, entry.name))
    elif isinstance(value, tuple):
        for one in value:
            yield from texts(one)


def check(schema: Schema[Any], message: Any, may_stay: str, text: str) -> int:
    """Returns how many messages were taken that have the text, or what became of it."""
    taken = 0
    values = json.loads(json.dumps(schema.plain(message)))
    for place in places(values):
        for wrong in changed(values, place, text):
            try:
                found = schema.unpack(json.dumps(wrong).encode(), SIZE)
            except Malformed:
                continue
            taken += 1
            for one in texts(found):
                assert all(c.isprintable() or c in may_stay for c in one), (wrong, found)
                one.encode()
    return taken


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_nothing_that_moves_a_cursor_or_cannot_be_encoded_is_read(text: str) -> None:
    assert sum(check(*one, text) for one in SAID), "errors' reasons are read, without it"


@given(st.sampled_from(SAID), ANY)
def test_whatever_the_texts_are(one: tuple[Schema[Any], Any, str], text: str) -> None:
    check(*one, text)
