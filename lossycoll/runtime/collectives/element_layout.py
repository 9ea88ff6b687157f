"""Layout of a plan's elements: the call's own, bytes, or what is encoded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from lossycoll.plan.codec import ENCODED, elements_of
from lossycoll.plan.lowbit import GROUPS
from lossycoll.plan.topology import Topology
from lossycoll.runtime.engine.binding import DType


class ElementLayout(NamedTuple):
    """The elements of a plan.

    Attributes:
        dtype: Their type.
        per_packet: How many of them a packet carries.
    """

    dtype: DType
    per_packet: int

    def count(self, nbytes: int) -> int:
        """Elements in so many bytes of a buffer."""
        return nbytes // self.dtype.itemsize

    def counts(self, nbytes: Sequence[int]) -> tuple[int, ...]:
        """:meth:`count` of each."""
        return tuple([self.count(n) for n in nbytes])


class SumLayout(NamedTuple):
    """The elements of a reduction's plan by tiers, and the topology that it is made from."""

    per_packet: int
    topology: Topology


@lru_cache(maxsize=64)
def sum_layout_of(
    layout: ElementLayout, payload: int, encoding: str, topology: Topology
) -> SumLayout:
    """What is encoded is what leaves a host: within one, contributions are added up as they are.

    A packet there has room for ``host_packets`` of the network's, whose elements take more bytes
    there. So those of the network have no more elements than fit.

    ``payload``: bytes that a packet of the network has room for.
    """
    if encoding == "same" or not topology.shares_hosts:
        return SumLayout(layout.per_packet, topology)
    room = payload * topology.host_packets // layout.dtype.itemsize
    per_packet = min(layout.per_packet, room // GROUPS[0] * GROUPS[0])
    if not per_packet:
        return SumLayout(layout.per_packet, topology)
    return SumLayout(per_packet, topology.with_sum_packets(room // per_packet))


@lru_cache(maxsize=64)
def layout_of(payload: int, dtype: DType, encoding: str) -> ElementLayout:
    """The elements of a call's plan.

    ``payload``: bytes that a packet has room for. ``dtype``: the type that the call adds; BYTES for
    copies, unless they are encoded.
    """
    if encoding != "same":
        dtype = DType[ENCODED.upper()]
    return ElementLayout(dtype, elements_of(encoding, dtype.name.lower(), payload))
