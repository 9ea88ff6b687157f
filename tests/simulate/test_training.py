"""Simulated training: steps take what computing and the network take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lossycoll.errors import OptionError
from lossycoll.lab.network import Link, Network, Port
from lossycoll.options.fields import Options
from lossycoll.simulate.training import METHODS, PERIOD, buckets_of, simulate_training

NETWORK = Network(link=Link(delay_ms=2), port=Port(up_mbit=200, down_mbit=200, queue_ms=25))
BUCKETS = buckets_of(1 << 20, 1 << 18)
WIRE = (1 << 20) * 2 * 3 / 4 * 8 / 200e6
"""Seconds that a port of four hosts takes for the gradients, headers not counted."""


def trained(seconds: float, **how: Any) -> Any:
    times = np.full((4, 4, 2), seconds / 2)
    return simulate_training(NETWORK, BUCKETS, times, hosts=4, **how)


def test_buckets_are_ready_in_order_and_have_all_bytes() -> None:
    assert buckets_of(60 << 20, 25 << 20) == (1 << 20, 25 << 20, 25 << 20, 9 << 20)
    assert buckets_of(100, 25 << 20) == (100,)


def test_a_step_takes_computing_and_what_the_network_takes_beyond_it() -> None:
    fast, slow = trained(0.002), trained(1.0)
    assert (fast.bound, slow.bound) == ("network", "computing")
    assert WIRE < fast.seconds < 2 * WIRE
    # Only the last bucket's way is not hidden behind the backward pass.
    assert 1.0 < slow.seconds < 1.0 + WIRE / 2
    assert slow.computing == pytest.approx(1.0)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_sends_what_it_needs(method: str) -> None:
    plain, found = trained(0.2), trained(0.2, method=method)
    share = found.steady[0].bytes / plain.steady[0].bytes
    # An all-reduce sends a buffer twice, DriftBound's all-gather one slice of it once.
    wanted = {"plain": 1, "drift_bound": 1 + 1 / (2 * PERIOD), "sharded": 1}[method]
    assert share == pytest.approx(wanted, abs=0.015)
    assert found.missing == 0


def test_a_threshold_drops_what_late_ranks_would_begin_after_it() -> None:
    times = np.full((4, 4, 2), 0.1)
    times[:, 0] = 0.4
    how: dict[str, Any] = {"hosts": 4}
    every = simulate_training(NETWORK, BUCKETS, times, **how)
    some = simulate_training(NETWORK, BUCKETS, times, threshold=0.3, **how)
    assert [step.dropped for step in some.steps] == [0.125] * 4
    assert some.seconds < every.seconds - 0.3


def test_a_death_costs_one_step_the_time_in_which_it_is_found() -> None:
    options = Options(on_peer_loss="continue", delivery="reliable", liveness=2.0)
    found = trained(0.05, options=options, death=2)
    seconds = [step.seconds for step in found.steps]
    assert seconds[2] > 0.7 * 2.0 > seconds[1]
    assert seconds[3] < 0.7 * 2.0


def test_a_host_that_dies_takes_all_its_ranks_with_it() -> None:
    options = Options(on_peer_loss="continue", delivery="reliable", liveness=2.0)
    times = np.full((4, 6, 1), 0.05)
    times[2:, 4:] = 5.0  # of the last host's ranks, which nobody waits for any more
    how: dict[str, Any] = {"hosts": 3, "ranks_per_host": 2, "options": options, "death": 2}
    found = simulate_training(NETWORK, BUCKETS, times, **how)
    seconds = [step.seconds for step in found.steps]
    assert 0.7 * 2.0 < seconds[2] < 5
    assert seconds[3] < 0.7 * 2.0
    assert [step.computing for step in found.steps] == pytest.approx([0.05] * 4)
    with pytest.raises(OptionError, match="which leaves 0 of 6 ranks"):
        simulate_training(NETWORK, BUCKETS, times, **{**how, "hosts": 1, "ranks_per_host": 6})


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"method": "plane"}, "no method 'plane'"),
        ({"settle": 4}, "4 steps of which 4 don't count"),
        ({"death": 1}, "wanted a step that there is"),
        ({"ranks_per_host": 2}, "times of 4 ranks for 8"),
    ],
)
def test_refusals(how: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        trained(0.1, **how)
