"""Messages of a swarm: what is packed comes out again, and nothing else does."""

from __future__ import annotations

import json
import random

import pytest

from lossycoll.runtime.control.schema import Malformed
from lossycoll.runtime.control.transport import LONGEST
from lossycoll.runtime.swarm.protocol import (
    LONGEST_NAME,
    MOST_MEMBERS,
    MOST_NAMES,
    MOST_OTHERS,
    MOST_PEERS,
    MOST_WEIGHT,
    START,
    SWARM,
    VERSION,
    Agreed,
    Averages,
    Directories,
    DirectoryStatus,
    Due,
    Found,
    Gone,
    Group,
    Heartbeat,
    Here,
    Join,
    Joined,
    Leave,
    Member,
    Message,
    Offers,
    Peers,
    Present,
    Probe,
    Ready,
    Redirect,
    Refused,
    Seek,
    Serves,
    Transfer,
    Unreachable,
    Who,
    pack,
    unpack,
)

INCARNATION, SCHEMA = "0f" * 16, "5c" * 16
MEMBERS = (
    Member(0, "127.0.0.1", 4711, INCARNATION, 1.0),
    Member(
        MOST_PEERS - 1, "fe80::1", 65535, INCARNATION, 0.0, 2**53 - 1, (("203.0.113.5", 40001),)
    ),
)
MESSAGES: list[Message] = [
    Join(VERSION, "Äpfel 5", INCARNATION, MOST_PEERS, "5" * 16, 7),
    Joined(3, "5" * 16, 9, 10.0),
    Refused("full"),
    Here("10.0.0.1", 1),
    Here("10.0.0.1", 1, (("203.0.113.5", 40001), ("::1", 2))),
    Unreachable((INCARNATION, SCHEMA)),
    Serves("::1", 7000),
    Directories((("10.0.0.1", 1), ("::1", 2))),
    Averages(SCHEMA, "32x32", "int4/32+spikes:int8/32+spikes", 10**12),
    Agreed(""),
    Who(),
    Peers(("a", "b"), 0),
    Peers(("a", "b"), 1),
    Ready(MOST_WEIGHT),
    Group(5, 2**31, MEMBERS),
    Gone(INCARNATION),
    Present(("5" * 16, INCARNATION)),
    Present(()),
    Heartbeat(4),
    Leave(),
    Serves("10.0.0.1", 7000, 1),
    DirectoryStatus("5" * 16, INCARNATION, 3, 5, 123, 9, SCHEMA, "int8", "10.0.0.1", 7000, 1),
    DirectoryStatus("5" * 16, INCARNATION, 0, 0, 0, 0, "", "same", "::1", 7000, 0),
    Redirect("10.0.0.1", 7000),
    Offers(1, 2**53 - 1, 5, 1),
    Due(),
    Seek(4),
    Transfer(7, MEMBERS),
    Found(2),
    Probe(),
]


def test_every_kind_is_tried_here() -> None:
    assert {type(one) for one in MESSAGES} == set(SWARM.kinds.values())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_there_and_back(message: Message) -> None:
    assert unpack(pack(message)) == message


@pytest.mark.parametrize(
    "values",
    [
        [],
        "join",
        ["nothing"],
        ["ready"],
        ["ready", 1, 2],
        ["joined", -1, INCARNATION, 0, 1.0, 0],
        ["joined", MOST_PEERS, INCARNATION, 0, 1.0, 0],
        ["joined", True, INCARNATION, 0, 1.0, 0],
        ["joined", "1", INCARNATION, 0, 1.0, 0],
        ["joined", 1, INCARNATION, 0, 1.0],
        ["joined", 1, INCARNATION, 0, 1.0, 2**41],
        ["gone", 5],
        ["gone", "0f" * 8 + "0"],
        ["join", VERSION, "a", "0f" * 8 + "0", 0, "5" * 16, 0, 0],
        ["unreachable", ["0f" * 8 + "0"]],
        ["present", 5],
        ["present", [MOST_PEERS]],
        ["present", ["5" * 15]],
        ["present", ["5" * 16] * (MOST_PEERS + 1)],
        ["ready", -1.0],
        ["ready", MOST_WEIGHT * 2],
        ["here", "localhost", 5, []],
        ["here", "10.0.0.1", 0, []],
        ["here", 5, 5, []],
        ["here", "fe80::1%\ud800", 5, []],
        ["here", "fe80::1%eth0\x1b[2J", 5, []],
        ["here", "fe80::1% eth0", 5, []],
        ["here", "10.0.0.1", 5],
        ["here", "10.0.0.1", 5, [["somewhere", 1]]],
        ["here", "10.0.0.1", 5, [["10.0.0.1", 0]]],
        ["here", "10.0.0.1", 5, [["10.0.0.1", 1]] * 3],
        ["unreachable", []],
        ["unreachable", ["no digest"]],
        ["unreachable", [INCARNATION] * (MOST_MEMBERS + 1)],
        ["peers", ["a"] * (MOST_NAMES + 1), 0],
        ["peers", ["a"], 2],
        ["group", 5, 1, [[n, "::1", 1, INCARNATION, 1.0, 0, []] for n in range(MOST_MEMBERS + 1)]],
        ["join", VERSION, "", INCARNATION, 0, "5" * 16, 0, 0],
        ["join", VERSION, "a\n", INCARNATION, 0, "5" * 16, 0, 0],
        ["join", VERSION, "a" * 65, INCARNATION, 0, "5" * 16, 0, 0],
        ["join", VERSION, "a", "no digest", 0, "5" * 16, 0, 0],
        ["join", VERSION, "a", INCARNATION, -1, "5" * 16, 0, 0],
        ["join", VERSION, "a", INCARNATION, 0, "5" * 16, 2**60, 0],
        ["join", VERSION, "a", INCARNATION, 0, "5" * 16, 0, -1],
        ["serves", "10.0.0.1", 0, 1],
        ["serves", "10.0.0.1", 1, 2],
        ["redirect", "somewhere", 7000],
        ["directorystatus", "5" * 16, INCARNATION, 0, 1, 1, 0, "no", "same", "10.0.0.1", 7000, 0],
        ["directorystatus", "5" * 16, INCARNATION, 0, -1, 1, 0, "", "same", "10.0.0.1", 7000, 0],
        ["directorystatus", "5" * 16, INCARNATION, 0, 1, 1, 0, "", "same", "10.0.0.1", 7000, 2],
        ["directorystatus", "5" * 16, INCARNATION, 0, 1, 1, 0, "", "", "10.0.0.1", 7000, 0],
        ["directorystatus", "5" * 16, INCARNATION, 0, 1, 1, 0, "", "10.0.0.1", 7000, 0],
        ["directorystatus", "5" * 16, "", 0, 1, 1, 0, "", "same", "10.0.0.1", 7000, 0],
        ["directories", [["10.0.0.1"]]],
        ["directories", [["10.0.0.1", 1]] * 17],
        ["directories", [["somewhere", 1]]],
        ["peers", ["a", ""], 0],
        ["averages", "no digest", "", "same", 0],
        ["averages", SCHEMA, "", "", 0],
        ["averages", SCHEMA, "", "int8\n", 0],
        ["averages", SCHEMA, "", "int8" * 17, 0],
        ["averages", SCHEMA, "", "int8", -1],
        ["averages", SCHEMA, "", "int8", 1.5],
        ["averages", SCHEMA, ""],
        ["averages", SCHEMA, "", "same", 0, "", 0, 0, -1],
        ["averages", SCHEMA, "", "same", 0, "", 0, 0, 10**18],
        ["averages", SCHEMA, "", "same", 0, "", 0, 0, 1.5],
        ["averages", SCHEMA, "", "same", 0, "", 0, -1, 0],
        ["group", 0, 1, []],
        ["group", 0, 1, [[0, "127.0.0.1", 1, INCARNATION, 1.0, 0]]],
        ["group", 0, 1, [[0, "127.0.0.1", 1, INCARNATION, 1.0, 0, []]] * 2],
        ["group", 0, 1, [[0, "127.0.0.1", 1, INCARNATION, 1.0, -1, []]]],
        ["group", 0, 1, [[0, "127.0.0.1", 1, INCARNATION, 1.0, 2**53, []]]],
        ["group", 0, 1, ["member"]],
        ["offers"],
        ["offers", 1, 5, 5],
        ["offers", 2, 5, 5, 0],
        ["offers", "1", 5, 5, 0],
        ["offers", 1, -1, 5, 0],
        ["offers", 1, 10**18, 5, 0],
        ["offers", 1, 5, 2**53, 0],
        ["offers", 1, 5, 1.5, 0],
        ["offers", 1, None, 5, 0],
        ["offers", 1, 5, 5, 2],
    ],
)
def test_what_is_no_message(values: object) -> None:
    with pytest.raises(Malformed):
        unpack(json.dumps(values).encode())


def test_weights_that_are_no_numbers() -> None:
    said = f'["averages","{SCHEMA}","","same",0,"",0,0,NaN]'.encode()
    for text in (b'["offers",1,NaN,5,0]', b'["offers",1,5,Infinity,0]', said):
        with pytest.raises(Malformed):
            unpack(text)
    for text in (b'["ready",NaN]', b'["ready",Infinity]', b'["ready",1e999]', b'["ready",null]'):
        with pytest.raises(Malformed):
            unpack(text)


def test_noise() -> None:
    draw = random.Random(1)
    for message in MESSAGES:
        packed = pack(message)
        for _ in range(300):
            noisy = bytearray(packed)
            noisy[draw.randrange(len(noisy))] = draw.randrange(256)
            try:
                unpack(bytes(noisy[: draw.randrange(1, len(noisy) + 1)]))
            except Malformed:
                continue
    for _ in range(300):
        with pytest.raises(Malformed):
            unpack(draw.randbytes(40))
    with pytest.raises(Malformed):
        unpack(b"[" * 100_000)


def longest_member(number: int) -> Member:
    place = "2001:db8:1111:2222:3333:4444:5555:6666", 65535
    return Member(number, *place, "f" * 64, 999999.87654321, 2**53 - 1, (place,) * MOST_OTHERS)


@pytest.mark.parametrize(
    "message",
    [
        Peers(("\U0001f600" * LONGEST_NAME,) * MOST_NAMES, 1),
        Present(tuple(f"{number:016x}"[:START] for number in range(MOST_PEERS))),
        Group(2**53 - 1, 2**32 - 1, tuple(map(longest_member, range(MOST_MEMBERS)))),
        Unreachable(("f" * 64,) * MOST_MEMBERS),
    ],
    ids=lambda one: type(one).__name__,
)
def test_the_longest_messages_of_a_full_swarm_fit_a_connection(message: Message) -> None:
    packed = pack(message)
    assert len(packed) <= LONGEST
    assert unpack(packed) == message
