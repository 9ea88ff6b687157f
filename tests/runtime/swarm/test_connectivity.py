"""Connectivity messages: what is packed comes out again, and nothing else does."""

from __future__ import annotations

import pytest

from lossycoll.runtime.control.schema import Malformed
from lossycoll.runtime.engine.host import MARK, MOST_OUT_OF_BAND
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.swarm.ice_agent import (
    CONNECTIVITY_BYTES,
    DIRECTORY,
    ConnectivityMessage,
    Forged,
    Kind,
    key_of,
    pack,
    short,
    unpack,
)
from lossycoll.runtime.swarm.protocol import MOST_PEERS, START

SECRET = Secret.of(b"a secret of tests")
KEY = key_of(SECRET, "5" * 16)
NONCE = bytes(range(16))
MESSAGES = [
    ConnectivityMessage(Kind.CHECK, 0, DIRECTORY, nonce=NONCE),
    ConnectivityMessage(
        Kind.ANSWER, DIRECTORY, MOST_PEERS - 1, echo=NONCE, reflexive=("203.0.113.5", 65535)
    ),
    ConnectivityMessage(
        Kind.ANSWER, 1, 2, short("0f" * 16), NONCE, NONCE[::-1], ("2001:db8::1", 1)
    ),
    ConnectivityMessage(Kind.NOMINATE, 1, 2, short("0f" * 16), NONCE, NONCE[::-1]),
    ConnectivityMessage(Kind.NOMINATED, 2, 1, nonce=NONCE, echo=NONCE),
    ConnectivityMessage(Kind.KEEPALIVE, 2, 1, short("0f" * 16)),
]


def test_incarnations_of_one_process_differ() -> None:
    start = "0f" * (START // 2)
    assert short(start + "1" * 16) != short(start + "2" * 16)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: one.kind.name)
def test_there_and_back(message: ConnectivityMessage) -> None:
    packed = pack(message, KEY)
    assert unpack(packed, KEY) == message
    assert len(packed) == CONNECTIVITY_BYTES <= MOST_OUT_OF_BAND
    assert packed.startswith(MARK)


def test_what_another_swarm_says() -> None:
    packed = pack(MESSAGES[0], KEY)
    others = [
        key_of(SECRET, "6" * 16),
        key_of(Secret.of(b"another secret of tests"), "5" * 16),
        key_of(None, "5" * 16),
    ]
    assert len({KEY, *others}) == 4
    for key in others:
        with pytest.raises(Forged):
            unpack(packed, key)


def test_any_bit_that_is_changed() -> None:
    packed = pack(MESSAGES[2], KEY)
    for bit in range(8 * len(packed)):
        noisy = bytearray(packed)
        noisy[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Forged):
            unpack(bytes(noisy), KEY)


@pytest.mark.parametrize("numbers", [(MOST_PEERS, 0), (0, MOST_PEERS), (0xFFFE, 0)])
def test_numbers_of_no_peer(numbers: tuple[int, int]) -> None:
    with pytest.raises(Malformed, match="no peers"):
        unpack(pack(ConnectivityMessage(Kind.CHECK, *numbers), KEY), KEY)


def test_kinds_that_there_are_not() -> None:
    with pytest.raises(Malformed, match="kind 9"):
        unpack(pack(ConnectivityMessage(9, 0, 1), KEY), KEY)  # type: ignore[arg-type]
