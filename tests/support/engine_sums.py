"""All-reduces of whole engines, without a group: plans, inputs and the exact sums."""

from __future__ import annotations

import time

import numpy as np

from lossycoll.plan import Plan, hierarchical, ring
from tests.oracle.codec import Array
from tests.support.network import Network, elements

F32 = 4
PATIENT: dict[str, object] = {"reorder_min": 0.5}
"""A machine with more to do than processors delivers its own packets late, and out of order."""


def all_reduce(
    network: Network, algorithm: str, count: int, order: tuple[int, ...] | None = None
) -> list[Plan]:
    """Each rank's plan, of ``count`` elements."""
    builder = {"ring": ring.all_reduce, "transpose": hierarchical.all_reduce}[algorithm]
    per_packet = network.payload_bytes // F32
    return [builder(network.world, r, count, per_packet, order=order) for r in range(network.world)]


def inputs_of(network: Network, plans: list[Plan], seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [elements("f32", plan.in_elements, rng) for plan in plans]


def total(inputs: list[Array]) -> Array:
    """The sum; exact, since the elements are small multiples of 1/8."""
    summed: Array = np.add.reduce(inputs, axis=0, dtype=np.float32)
    return summed


def assert_exact(got: list[Array], want: Array, name: str) -> None:
    for rank, array in enumerate(got):
        np.testing.assert_array_equal(array, want, err_msg=f"{name} rank={rank}")


def settled_stats(network: Network, rank: int):  # type: ignore[no-untyped-def]
    """Figures that are up to date: an idle engine writes them every 100 ms at the latest."""
    time.sleep(0.25)
    return network.engines[rank].stats()
