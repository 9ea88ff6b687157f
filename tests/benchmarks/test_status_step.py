"""What being seen costs: how pairs are summed up, and that all four are measured."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.micro import status_step
from benchmarks.micro.status_step import Pair, cost, of_job, verdict
from tests.support.harness import free_port, run_good


def pairs(seed: int, extra: float, noise: float, count: int = 200) -> list[Pair]:
    """Steps of a tenth of a second; ``on`` takes so much longer, and a few are interrupted."""
    draw = random.Random(seed)

    def one(of: float) -> tuple[float, float]:
        return 0.1 + of + draw.gauss(0, noise) + (draw.random() < 0.05) * 0.5, 0.1 + of

    return [{"on": one(extra), "off": one(0.0)} for _ in range(count)]


def test_a_step_is_as_long_as_its_slowest_rank_and_takes_the_cpu_of_all() -> None:
    ranks: list[list[Pair]] = [
        [{"on": (2.0, 1.0), "off": (1.0, 1.0)}],
        [{"on": (1.0, 3.0), "off": (4.0, 1.0)}],
    ]
    assert of_job(ranks) == [{"on": (2.0, 4.0), "off": (4.0, 2.0)}]


def test_a_cost_has_an_interval_and_interruptions_do_not_make_it() -> None:
    jobs = [pairs(seed, 0.001, 0.002) for seed in range(4)]
    value, low, high = cost(jobs, 0)
    assert low < 0.001 < high
    assert low < value < high
    assert high - low < 0.001
    assert cost(jobs, 1) == pytest.approx((0.001,) * 3)


def test_what_costs_too_much_says_so() -> None:
    assert "at most 0.5%" in verdict((1e-4, 0.9e-4, 1.1e-4), 0.1)
    assert "over 0.5%" in verdict((1e-3, 0.9e-3, 1.1e-3), 0.1)
    assert "too noisy" in verdict((1e-4, -1e-3, 1e-3), 0.1)


@pytest.mark.long
def test_pages_spans_and_metrics_are_measured() -> None:
    place = f"127.0.0.1:{free_port()}"
    env = {"SETTINGS": json.dumps({"job": 0, "pairs": 2}), "LOSSYCOLL_METRICS": place}
    ranks = run_good(status_step.FUNCTION, 2, env)
    for rank in ranks:
        found = {name: len(made) for name, made in rank["pairs"].items()}
        calls = 2 * status_step.CALLS
        assert found == {
            "page, step": 2, "page, calls": calls, "spans, step": 2, "spans, calls": calls
        }  # fmt: skip
    (told,) = (rank["metrics"] for rank in ranks if rank["metrics"])
    assert told["answer"] > told["rest"] >= 0
