"""DropCompute in one process: what gradients are divided by."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import lossycoll
from tests.support.dropcompute_cases import (
    Shuffled,
    check_close,
    dropping,
    gradients,
    inputs_of,
    loss_of,
    oracle,
    small,
)

M = 4


@pytest.mark.parametrize("divisor", ["completed", "fixed"])
def test_the_mean_is_over_what_was_completed(divisor: str) -> None:
    model = Shuffled()
    drop = dropping(model, M, 2.5, divisor=divisor)
    for step in range(2):
        for x in drop(inputs_of(0, step, number) for number in range(M)):
            (loss_of(model, x) / M).backward()
            drop.clock.now += 1
        check_close(gradients(model), oracle(model, step, [3], M if divisor == "fixed" else None))
        model.zero_grad(set_to_none=step == 0)
    assert drop.report().last.factor == (1.0 if divisor == "fixed" else M / 3)


def test_what_ends_early_divides_by_what_there_was() -> None:
    model = Shuffled()
    drop = dropping(model, M, 99.0)
    for count in (2, 0):
        for x in drop(inputs_of(0, 0, number) for number in range(count)):
            (loss_of(model, x) / M).backward()
        if count:
            check_close(gradients(model), oracle(model, 0, [count]))
        model.zero_grad()
        assert drop.report().last.completed == count
    assert drop.report().dropped == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_compiled_model_is_one_graph() -> None:
    model = Shuffled()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    drop = dropping(compiled, M, 2.5)
    for step in range(2):
        for x in drop(inputs_of(0, step, number) for number in range(M)):
            (loss_of(compiled, x) / M).backward()
            drop.clock.now += 1
        check_close(gradients(model), oracle(model, step, [3]))
        model.zero_grad()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"micro_batches": 0}, "micro_batches is 0, wanted a whole number, at least 1"),
        ({"micro_batches": 2.0}, "micro_batches is 2.0"),
        ({"micro_batches": True}, "micro_batches is True"),
        ({"threshold": 0}, "threshold is 0, wanted seconds above 0, or 'auto'"),
        ({"threshold": -1.0}, "threshold is -1.0"),
        ({"threshold": math.nan}, "threshold is nan"),
        ({"threshold": "fast"}, "threshold is 'fast'"),
        ({"threshold": None}, "threshold is None"),
        ({"threshold": True}, "threshold is True"),
        ({"drop_rate": 1.0}, "drop_rate is 1.0, wanted a share"),
        ({"drop_rate": math.nan}, "drop_rate is nan"),
        ({"drop_rate": -0.1}, "drop_rate is -0.1"),
        ({"threshold": 1.0, "drop_rate": 0.1}, "wanted one of them"),
        ({"divisor": "median"}, "divisor is 'median'"),
        ({"warm_up": 1}, "warm_up is 1, wanted a whole number, at least 2"),
        ({"skip": -1}, "skip is -1"),
        ({"window": 0}, "window is 0"),
        ({"cut": "deep"}, "cut is 'deep', wanted one of finished, threshold, started"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"tolerance": math.nan}, "tolerance is nan"),
    ],
)
def test_arguments_that_can_not_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(lossycoll.OptionError, match=said):
        lossycoll.DropCompute(small(), **{"micro_batches": M, **given})


def test_models_of_which_it_can_not_be_done_are_refused() -> None:
    optimizer = torch.optim.SGD(small().parameters(), lr=1.0)
    for model, said in (
        (optimizer, "was given a SGD; wanted: a module"),
        (nn.Sequential(small(), nn.SyncBatchNorm(2)), "1 is a SyncBatchNorm"),
    ):
        with pytest.raises(lossycoll.UnsupportedError, match=said):
            lossycoll.DropCompute(model, M)  # type: ignore[arg-type]
