"""Messages: what is packed is unpacked, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest

from lossycoll.runtime.control.schema import Malformed, OtherVersion
from lossycoll.runtime.world import messages as m
from lossycoll.runtime.world.messages import View

WORLD = 5
VIEWS = (View(0, (0, 1, 2, 3, 4)), View(7, (0, 2, 4)), View(7, (2,)))
OF_WORLD: list[Any] = [
    m.Hello(m.VERSION, "secret", 4, "member"),
    m.Heartbeat(),
    m.Follow((1,), (), (0, 2)),
    m.Welcome((), (), (), True),
    m.Ready(),
    m.Dead(3, 7.25, False),
    m.Left(2),
    m.Rekey(),
    m.Addressed(1, 0b10101, 2**64 - 1, ["bye", -1, "", {}]),
]
OF_GROUP: list[Any] = [
    m.Abort("out of memory \u00e9\n", "EngineError"),
    m.Bye(-1, "", {"calls": 3}),
    m.Waiting(12, "all_reduce float32[10] SUM", 2**64 - 1),
    m.Defined(1, (3, 1024), {"repair": 2}),
    m.OwnHost({"mtu": 1500}),
    m.Mismatch(12, "barrier", 3, "all_reduce"),
    m.Missed(0),
    m.Ask(),
    m.Answer({"calls": 3, "bytes_sent": 10**12}),
    m.State((1, 3), (3,), 40, VIEWS),
    m.ViewChange(VIEWS),
]


@pytest.mark.parametrize("message", OF_WORLD, ids=lambda message: type(message).__name__)
def test_what_is_packed_is_unpacked(message: Any) -> None:
    assert m.unpack(m.pack(message), WORLD) == message


@pytest.mark.parametrize("body", OF_GROUP, ids=lambda body: type(body).__name__)
def test_a_groups_message_travels_within_one_of_the_world(body: Any) -> None:
    sent = m.Addressed(0, 2, 9, m.GROUP.plain(body))
    received = m.unpack(m.pack(sent), WORLD)
    assert isinstance(received, m.Addressed)
    assert m.GROUP.read(received.body, WORLD) == body


def test_every_kind_is_tried_here() -> None:
    assert {type(one) for one in OF_WORLD} == set(m.WORLD.kinds.values())
    assert {type(one) for one in OF_GROUP} == set(m.GROUP.kinds.values())
    assert set(m.GROUP.kinds) >= m.REPLAYED


def test_names_on_the_wire() -> None:
    """Whoever renames a class changes what ranks of another version understand."""
    assert [*m.WORLD.kinds] == [
        *("hello", "heartbeat", "follow", "welcome", "ready", "dead", "left", "rekey", "addressed")
    ]
    assert [*m.GROUP.kinds] == [
        *("abort", "bye", "waiting", "defined", "ownhost", "mismatch", "missed", "ask", "answer"),
        *("state", "viewchange"),
    ]
    assert not m.WORLD.kinds.keys() & m.GROUP.kinds.keys(), "two kinds have one name"
    defined = {
        thing
        for thing in vars(m).values()
        if dataclasses.is_dataclass(thing) and thing.__module__ == m.__name__
    }
    assert {*m.WORLD.kinds.values(), *m.GROUP.kinds.values()} == defined - {View}


def test_another_version_is_refused_by_name() -> None:
    for fields in ([9, "secret", 4, "member"], [9], [9, {}, {}, {}, {}, {}, {}]):
        with pytest.raises(OtherVersion, match=f"^hello of version 9, wanted {m.VERSION}$"):
            m.unpack(json.dumps(["hello", *fields]).encode(), WORLD)


def test_a_kind_of_the_other_level_is_none() -> None:
    with pytest.raises(Malformed, match="no kind"):
        m.unpack(b'["ask"]', WORLD)
    with pytest.raises(Malformed, match="no kind"):
        m.GROUP.read(["ready"], WORLD)


WRONG = ["x", -2, 2**64, 1.5, True, None, [], {}, [1, 1], [2, 1], [9], ["1"], [True], "", "0", "zz"]


@pytest.mark.parametrize("message", OF_WORLD[2:], ids=lambda message: type(message).__name__)
def test_each_field_is_checked(message: Any) -> None:
    whole = json.loads(m.pack(message))
    refused = 0
    for place in range(1, len(whole)):
        for wrong in WRONG:
            changed = [*whole[:place], wrong, *whole[place + 1 :]]
            try:
                found = m.unpack(json.dumps(changed).encode(), WORLD)
            except Malformed:
                refused += 1
            else:
                # What is taken is of the field's type, and packs to the same again.
                assert json.loads(m.pack(found)) == changed, (changed, found)
    assert refused >= (len(whole) - 1) * len(WRONG) // 3 or len(whole) == 1
    for other in (whole[:-1], [*whole, 0], [7, *whole[1:]], []):
        if other != whole and (len(whole) > 1 or other != whole[:-1]):
            with pytest.raises(Malformed):
                m.unpack(json.dumps(other).encode(), WORLD)


@pytest.mark.parametrize(
    "views",
    [
        [],
        [[0, [0, 1, 2, 3]]],
        [[1, [0, 1, 2, 3, 4]]],
        [[0, [0, 1, 2, 3, 4]], [5, []]],
        [[0, [0, 1, 2, 3, 4]], [5, [0, 1]], [4, [0]]],
        [[0, [0, 1, 2, 3, 4]], [5, [0, 1]], [6, [0, 2]]],
        [[0, [0, 1, 2, 3, 4]], [5, [0, 1]], [6, [0, 1]]],
        [[0, [0, 1, 2, 3, 4]], [5, [0, 5]]],
        [[0, [0, 1, 2, 3, 4], 1]],
        [[0.0, [0, 1, 2, 3, 4]]],
        "views",
    ],
)
def test_views_that_cannot_be_are_refused(views: object) -> None:
    with pytest.raises(Malformed):
        m.GROUP.read(["viewchange", views], WORLD)


def test_any_bytes_are_a_message_or_malformed() -> None:
    draw = random.Random(7)
    whole = [m.pack(message) for message in OF_WORLD]
    refused = 0
    for _ in range(3000):
        data = bytearray(draw.choice(whole))
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(data))
            data[place : place + draw.randint(0, 2)] = bytes([draw.randrange(256)])
        try:
            m.unpack(bytes(data), WORLD)
        except Malformed:
            refused += 1
    assert refused > 1000


def test_sets_of_ranks_are_bits() -> None:
    assert m.bits([0, 2, 255]) == 1 | 4 | 1 << 255
    assert m.ranks_in(m.bits([0, 2, 255])) == [0, 2, 255]
    everyone = m.Addressed(0, m.bits(range(256)), 1, ["ask"])
    assert m.unpack(m.pack(everyone), 256) == everyone
    with pytest.raises(Malformed):
        m.unpack(m.pack(everyone), 255)
