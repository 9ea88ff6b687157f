"""Packets that suit the receive buffer which all peers of a rank share."""

from __future__ import annotations

import pytest

from lossycoll.runtime.net.buffers import fitting_payload, packets_per_peer, receive_buffer


@pytest.mark.parametrize(
    ("buffer", "world", "wanted"),
    [
        (8 << 20, 2, 8896),
        (8 << 20, 64, 8896),
        (2 * 106_496, 2, 8896),
        (2 * 106_496, 5, 7616),
        (2 * 106_496, 8, 3520),
        (2 * 106_496, 16, 1472),
        (2 * 106_496, 30, 1472),
        (2 * 106_496, 32, 1472),  # two of no size do, one of this does
        (2 * 106_496, 53, 448),
        (2 * 106_496, 1000, 448),  # nothing does
    ],
)
def test_a_payload_suits_the_buffer_that_the_peers_share(
    buffer: int, world: int, wanted: int
) -> None:
    payload = fitting_payload(8896, buffer, world)
    assert payload == wanted
    assert payload % 64 == 0
    assert fitting_payload(1408, buffer, world) <= 1408
    fits = packets_per_peer(payload, buffer, world)
    assert fits >= 1 if world < 54 or buffer > 1 << 20 else fits == 0


def test_the_buffer_that_a_socket_will_get() -> None:
    assert receive_buffer(100_000, 4) == 200_000  # the kernel doubles it
    assert receive_buffer(0, 4) >= 200_000
