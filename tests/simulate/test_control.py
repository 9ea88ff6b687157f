"""The control plane of large jobs, predicted by its own state machines."""

from __future__ import annotations

import pytest

from lossycoll.errors import OptionError
from lossycoll.runtime.world.failure_detector import HEARTBEATS_PER_LIVENESS, SILENT_SHARE
from lossycoll.simulate.control import COSTS, DESCRIPTORS, Costs, simulate_control

RANKS = 40
LIVENESS = 4.0
DELAY = 0.001


def test_a_start_takes_the_coordinator_a_connection_and_three_messages_for_each_rank() -> None:
    found = simulate_control(RANKS, liveness=LIVENESS, delay=DELAY)
    each = COSTS.connect + COSTS.receive + 2 * COSTS.send
    assert found.ready_busy == pytest.approx((RANKS - 1) * each, rel=0.05)
    assert found.ready_busy < found.ready < found.ready_busy + 5 * DELAY
    assert found.descriptors == DESCRIPTORS + RANKS - 1


def test_heartbeats_are_a_message_each_way() -> None:
    found = simulate_control(RANKS, liveness=LIVENESS)
    rounds = HEARTBEATS_PER_LIVENESS / LIVENESS
    assert found.messages == pytest.approx(2 * (RANKS - 1) * rounds, rel=0.1)
    assert found.busy == pytest.approx(found.messages * COSTS.send)


def test_deaths_are_told_at_once_and_silence_after_its_share_of_liveness() -> None:
    found = simulate_control(RANKS, liveness=LIVENESS, delay=DELAY)
    assert 0 < found.ended.median <= found.ended.last < 0.002 + 5 * DELAY + RANKS * COSTS.send
    interval = LIVENESS / HEARTBEATS_PER_LIVENESS
    silence = SILENT_SHARE * LIVENESS
    assert silence - interval < found.silent.median <= found.silent.last < silence + 0.1
    assert 0 < found.coordinator.median <= found.coordinator.last <= found.followed < LIVENESS


def test_a_slow_processor_delays_the_last_rank_of_many() -> None:
    quick, slow = (
        simulate_control(ranks, liveness=LIVENESS, costs=Costs(send=0.001)) for ranks in (8, RANKS)
    )
    assert quick.ended.last < 0.02 < (RANKS - 4) * 0.001 < slow.ended.last


def test_equal_seeds_give_equal_results_and_others_do_not() -> None:
    one, same, other = (simulate_control(8, seed=seed) for seed in (1, 1, 2))
    assert one == same != other


def test_few_ranks_are_refused() -> None:
    with pytest.raises(OptionError, match="ranks=3: use at least 4"):
        simulate_control(3)


def test_a_coordinator_that_never_gets_through_wants_a_longer_liveness() -> None:
    with pytest.raises(OptionError, match=r"40 ranks .* for more than 3 s.* liveness of more than"):
        simulate_control(RANKS, liveness=1.0, costs=Costs(connect=0.5))
