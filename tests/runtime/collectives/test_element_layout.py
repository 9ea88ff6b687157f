"""How many elements a packet of a reduction carries, where what leaves a host is encoded."""

from __future__ import annotations

import pytest

from lossycoll.plan.topology import Topology
from lossycoll.runtime.collectives.plan_cache import layout_of, sum_layout_of
from lossycoll.runtime.engine.binding import DType

PAYLOAD = 1408
SHARED = 65024
"""LC_SHARED_PAYLOAD"""


@pytest.mark.parametrize("encoding", ["bf16", "int8", "int4/32", "int2", "int4:int8"])
@pytest.mark.parametrize("payload", [PAYLOAD, 8896, SHARED])
def test_sums_fit_into_the_packets_of_a_host(payload: int, encoding: str) -> None:
    topology = Topology.of_labels("aabb", "xxxx", SHARED // payload)
    layout = layout_of(payload, DType.F32, encoding)
    per_packet, found = sum_layout_of(layout, payload, encoding, topology)
    sums = found.sum_packets
    assert 0 < per_packet <= layout.per_packet
    assert per_packet == layout.per_packet or per_packet % 128 == 0
    assert 0 < 4 * per_packet * sums <= SHARED
    assert 4 * per_packet * (sums + 1) > payload * topology.host_packets
    assert found.of_members(range(4)) == found


def test_what_there_is_nothing_to_tell_apart_in_stays() -> None:
    shared, flat = Topology.of_labels("aabb", "xxxx", 4), Topology.flat(4)
    for encoding, topology in (("same", shared), ("int8", flat)):
        layout = layout_of(PAYLOAD, DType.F32, encoding)
        assert sum_layout_of(layout, PAYLOAD, encoding, topology) == (layout.per_packet, topology)
    tiny = Topology.of_labels("aab", "xxx", 1)
    layout = layout_of(64, DType.F32, "int2")
    assert sum_layout_of(layout, 64, "int2", tiny) == (layout.per_packet, tiny)
