"""A rank that waits for another one says so, and is waited for in its turn."""

from __future__ import annotations

import time

import numpy as np

from lossycoll.plan import ring
from tests.support.network import elements
from tests.support.relay import PER_PACKET, Faults, RelayedNetwork, assert_sums
from tests.support.waiting import until

DEADLINE = 0.5
"""Seconds: the floor of what is learnt, and far more than a stream takes here."""
PAUSE = 3 * DEADLINE
BUFFER = 64 << 10
"""Small, so that what is held back meanwhile finds room when it comes at once."""


def test_streams_behind_a_pause_lose_nothing() -> None:
    """Around a ring, rank 1 has begun to send to rank 2 when nothing comes from rank 0 for longer
    than any deadline that was learnt. Rank 2 hears from rank 1, which has nothing to send."""
    options = {"deadline_min": DEADLINE, "deadline_max": 20.0, "socket_buffer": BUFFER}
    with RelayedNetwork(3, Faults(), **options) as net:
        assert_sums(net, 3000, 24)  # deadlines are learnt
        count = 3 * 1000 * PER_PACKET
        plans = [ring.all_reduce(3, rank, count, PER_PACKET) for rank in range(3)]
        data = [elements("f32", count, np.random.default_rng(rank)) for rank in range(3)]
        want = np.sum(data, axis=0, dtype=np.float32)
        before = net.relay.passed.data
        tickets = [
            net.submit(rank, plans[rank], (data[rank], data[rank]), "f32", 3.0) for rank in range(3)
        ]
        until(lambda: net.relay.passed.data > before + 600, "streams under way")
        net.relay.faults.held = (0, 1)
        time.sleep(PAUSE)
        net.relay.faults.held = None
        for rank, ticket in enumerate(tickets):
            ended = net.end(rank, ticket)
            assert (ended.code, ended.report.packets_missing) == (0, 0), ended
            assert rank == 0 or ended.report.elapsed > PAUSE, "the pause came too late"
            np.testing.assert_allclose(data[rank], want, rtol=1e-6)
