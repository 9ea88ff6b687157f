"""What headers leave of a datagram."""

from __future__ import annotations

import pytest
from lossycoll._native import lib

from lossycoll.runtime.engine.payload import SHARED_PAYLOAD, payload_bytes


@pytest.mark.parametrize(
    ("mtu", "version", "payload"),
    [(1500, 4, 1408), (1500, 6, 1344), (9000, 4, 8896), (576, 4, 448), (65535, 4, 65024)],
)
def test_payloads(mtu: int, version: int, payload: int) -> None:
    assert payload_bytes(mtu, version) == payload
    assert payload % 64 == 0
    assert payload + 48 + 28 <= mtu


def test_no_packet_is_larger_than_one_in_shared_memory() -> None:
    assert SHARED_PAYLOAD == lib.LC_SHARED_PAYLOAD
