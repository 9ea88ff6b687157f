"""DropCompute in one process: what gradients are divided by."""

from __future__ import annotations

import pytest
import torch

from tests.support.dropcompute_cases import (
    Shuffled,
    check_close,
    dropping,
    gradients,
    inputs_of,
    loss_of,
    oracle,
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
