"""What becomes of operations when a peer is declared dead: real engines, real sockets."""

from __future__ import annotations

import time

import numpy as np
import pytest

from lossycoll.plan import Missing, Topology, hierarchical, leave_out, reduce_scatter, rename, ring
from lossycoll.runtime.engine.failures import Code
from lossycoll.runtime.engine.reports import Cause
from tests.support.network import Network
from tests.support.waiting import until

ALGORITHMS = {"transpose": hierarchical.all_reduce, "ring": ring.all_reduce}


@pytest.mark.parametrize("reliable", [False, True])
@pytest.mark.parametrize("algorithm", ["transpose", "ring"])
def test_a_dead_peer_counts_as_loss(algorithm: str, reliable: bool) -> None:
    """In the operation that was pending when it died, and in those that still plan with it."""
    elements = 5000
    with Network(3, 1408) as network:
        plans = [ALGORITHMS[algorithm](3, rank, elements, 352) for rank in range(3)]
        for late in (False, True):
            data = [np.full(elements, r + 1, np.float32) for r in range(3)]
            tickets = {
                r: network.submit(r, plans[r], (data[r], data[r]), "f32", reliable=reliable)
                for r in (0, 1)
            }
            if not late:
                time.sleep(0.05)
                assert not any(
                    network.engines[r].wait(tickets[r], 0) != Code.PENDING for r in (0, 1)
                )
                network.engines[2].close()
                for rank in (0, 1):
                    network.engines[rank].peer_dead(2)
            for rank, ticket in tickets.items():
                ended = network.end(rank, ticket, 5)
                assert ended.code == 0, ended.failure
                assert set(np.unique(data[rank])) <= {1.0, 1.5, 2.0}
                if algorithm == "transpose":  # a ring is cut, and passes on what there is
                    # The mean over both; own in the third that the dead one was to reduce.
                    assert ended.report.cause == Cause.PEER
                    assert 0.6 < (data[rank] == 1.5).mean() < 0.8
                    assert set(np.unique(data[rank])) == {1.5, rank + 1.0}


def test_survivors_plan_for_themselves() -> None:
    elements, members = 5000, (0, 2, 3)
    with Network(4, 1408) as network:
        for rank in members:
            network.engines[rank].peer_dead(1)
        plans = {
            rank: rename(
                hierarchical.all_reduce(3, i, elements, 1408 // 4, missing=Missing.OWN), members, 4
            )
            for i, rank in enumerate(members)
        }
        data = {r: np.full(elements, r + 1, np.float32) for r in members}
        tickets = {r: network.submit(r, plans[r], (data[r], data[r]), "f32") for r in members}
        for rank, ticket in tickets.items():
            ended = network.end(rank, ticket, 5)
            assert (ended.code, ended.report.cause) == (0, Cause.COMPLETE)
            np.testing.assert_allclose(data[rank], (1 + 3 + 4) / 3)


@pytest.mark.parametrize("reliable", [False, True])
def test_a_rank_that_holds_sums_for_its_host_dies(reliable: bool) -> None:
    """Nobody waits for what it would have passed on. Those left plan by the hosts that are left."""
    elements, left = 5000, (0, 1, 2)
    topology = Topology.of_labels("aabb", "xxxx")
    with Network(4, 1408) as network:
        plans = [hierarchical.all_reduce(4, r, elements, 352, topology=topology) for r in left]
        data = [np.full(elements, r + 1, np.float32) for r in left]
        tickets = [
            network.submit(r, plans[r], (data[r], data[r]), "f32", reliable=reliable) for r in left
        ]
        time.sleep(0.05)
        network.engines[3].close()
        for rank in left:
            network.engines[rank].peer_dead(3)
        for rank, ticket in zip(left, tickets, strict=True):
            assert network.end(rank, ticket, 5).code == 0
            # Without it, without its host, or own where the mean would have come by it.
            assert set(np.unique(data[rank])) <= {2.0, 1.5, rank + 1.0}
            assert (data[rank] == 2.0).mean() > 0.4
        among = topology.of_members(left)
        for rank in left:
            plan = rename(hierarchical.all_reduce(3, rank, elements, 352, topology=among), left, 4)
            data[rank][:] = rank + 1
            tickets[rank] = network.submit(rank, plan, (data[rank], data[rank]), "f32")
        for rank, ticket in zip(left, tickets, strict=True):
            assert network.end(rank, ticket, 5).code == 0
            np.testing.assert_array_equal(data[rank], 2.0)


def test_what_the_dead_one_had_posted_ahead_is_no_mismatch() -> None:
    """It submits more operations than the others, and dies: theirs are planned without it."""
    elements, members = 1000, (0, 1)
    with Network(3, 1408) as network:
        data = {r: np.full(elements, r + 1, np.float32) for r in range(3)}
        network.submit(2, hierarchical.all_reduce(3, 2, elements, 352), (data[2], data[2]), "f32")
        until(
            lambda: all(network.engines[r].stats().control_received for r in members),
            "the dead one's offer",
        )
        network.engines[2].close()
        for rank in members:
            network.engines[rank].peer_dead(2)
        plans = {
            r: rename(hierarchical.all_reduce(2, r, elements, 352), members, 3) for r in members
        }
        tickets = {r: network.submit(r, plans[r], (data[r], data[r]), "f32") for r in members}
        for rank, ticket in tickets.items():
            ended = network.end(rank, ticket, 5)
            assert (ended.code, ended.report.cause) == (0, Cause.COMPLETE), ended.failure
            np.testing.assert_array_equal(data[rank], 1.5)


def test_the_last_rank_is_its_own_mean() -> None:
    with Network(2, 1408) as network:
        network.engines[1].peer_dead(0)
        for plan, want in (
            (rename(hierarchical.all_reduce(1, 0, 1000, 352), (1,), 2), 1.0),
            (leave_out(reduce_scatter.reduce_scatter(2, 1, 1000, 352), (1,)), 1.0),
        ):
            given = np.ones(plan.in_elements, np.float32)
            out = np.zeros(plan.out_elements, np.float32)
            ticket = network.submit(1, plan, (given, out), "f32")
            ended = network.end(1, ticket, 5)
            assert (ended.code, ended.report.contributions_mean) == (0, 1.0)
            np.testing.assert_array_equal(out, want)
