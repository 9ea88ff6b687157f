"""Packets sent ahead that are not what they say, or more than there is room for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lossycoll.plan import hierarchical
from tests.support.relay import (
    DATA,
    PAYLOAD,
    PER_PACKET,
    Faults,
    Packet,
    RelayedNetwork,
    figures,
)

EAGER = 0x80 | DATA


def test_packets_sent_ahead_are_checked_when_their_operation_comes() -> None:
    """Before, nothing is known that they could be checked against; they fill their room at most."""
    count, room = 1000, 40
    with RelayedNetwork(2, Faults(), eager=room * 320) as network:
        plans = [hierarchical.all_reduce(2, r, count, PER_PACKET) for r in range(2)]
        data = [np.full(count, float(r + 1), np.float32) for r in range(2)]
        ahead = replace(Packet(), type=EAGER)
        nonsense = [
            replace(ahead, slot=77),
            replace(ahead, packet=16),
            replace(ahead, packet=2**32 - 1),
            replace(ahead, format=1),
            replace(ahead, packet=1, payload=bytes(PAYLOAD - 8)),
        ]
        too_far = [replace(ahead, op=op) for op in (256, 2**31, 2**32 - 1)]
        flood = [replace(ahead, op=9, packet=i) for i in range(room)]
        twice = [nonsense[-1]]
        for packet in (*nonsense, *twice, *too_far, *flood):
            network.relay.send(1, 0, packet.bytes())
        stats = figures(network, 0, lambda s: s.eager_kept + s.eager_dropped >= 5 + room)
        assert stats.eager_kept + stats.eager_dropped == len(nonsense) + len(flood)
        assert stats.eager_dropped > 0
        assert (stats.stale, stats.malformed, stats.repeated) == (len(too_far), 0, len(twice))
        for _ in range(2):
            for ended in network.run(plans, data, data, "f32", 2.0, reliable=True):
                assert ended.code == 0, ended.failure
        assert (data[0] == 6.0).all()
        assert (data[1] == 6.0).all()
        stats = figures(network, 0, lambda s: s.malformed >= len(nonsense))
        assert stats.malformed == len(nonsense)
