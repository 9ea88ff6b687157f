"""Which packets of a stream injected faults drop, double or delay, in numpy.

native/inject.c is the same function, and a test holds the two together, so the reference executor
knows exactly what the native engine loses. All draws are uniform on [0, 1) with 53 bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.plan.faults import Inject, begin
from lossycoll.plan.rng import key_of, mix_array

LOSS: Final = 0
DUPLICATE: Final = 1
REORDER: Final = 2


def stream_key(
    seed: int, group: int, op: int, slot: int, sender: int, receiver: int, round: int
) -> int:
    """The 64-bit key of one round of one stream; ``slot`` is the number at the receiver."""
    # The seed first, or it could stand in for the group.
    return key_of(seed, group, op, slot, sender, receiver, round)


def draw(key: int, lane: int, n_packets: int) -> NDArray[np.float64]:
    """Uniform draws on [0, 1) for the packets 0..n_packets-1 of a stream; shape (n_packets,)."""
    packets = np.arange(n_packets, dtype=np.uint64)
    words = mix_array((packets | np.uint64(lane << 32)) ^ np.uint64(key))
    uniform: NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform


def losses(inject: Inject, key: int, n_packets: int) -> NDArray[np.bool_]:
    """Mask of lost packets; bool, shape (n_packets,). ``key`` is :func:`stream_key`'s.

    Bursts are the two-state chain of Gilbert, "Capacity of a burst-noise channel", Bell Syst.
    Tech. J. 39 (1960), with every packet lost in the bad state and none in the good one, started
    in its steady state: a packet is lost with chance ``loss``, bursts have mean length ``burst``.
    """
    if inject.loss >= 1:
        return np.ones(n_packets, dtype=np.bool_)
    u = draw(key, LOSS, n_packets)
    if inject.burst <= 1 or n_packets == 0:
        return u < inject.loss
    end = 1 / inject.burst
    from_good = u < begin(inject.loss, end)
    from_bad = u >= end
    from_good[0] = from_bad[0] = u[0] < inject.loss
    # Each packet maps the state before it to its own: to a constant where both agree, else
    # unchanged or inverted. So a state is the last constant, inverted as often as was asked since.
    index = np.arange(n_packets)
    constant = np.maximum.accumulate(np.where(from_good == from_bad, index, 0))
    odd = np.logical_xor.accumulate(from_good & ~from_bad)
    return np.asarray(from_good[constant] ^ odd ^ odd[constant])


def duplicates(inject: Inject, key: int, n_packets: int) -> NDArray[np.bool_]:
    """Mask of packets that are delivered twice; bool, shape (n_packets,)."""
    return draw(key, DUPLICATE, n_packets) < inject.dup


def reorders(inject: Inject, key: int, n_packets: int) -> NDArray[np.bool_]:
    """Mask of packets that are delivered after their successor; bool, shape (n_packets,)."""
    return draw(key, REORDER, n_packets) < inject.reorder


def lost(
    inject: Inject,
    group: int,
    op: int,
    sender: int,
    receiver: int,
    slot: int,
    n_packets: int,
    round: int = 0,
) -> NDArray[np.bool_]:
    """:func:`losses` of one round of one stream, by the stream's name, at the loss of its link.

    With ``functools.partial(lost, inject, group, op)`` it is what the reference executor asks for.
    """
    key = stream_key(inject.seed, group, op, slot, sender, receiver, round)
    if inject.links:
        inject = replace(inject, loss=inject.loss_of(sender, receiver), links=())
    return losses(inject, key, n_packets)
