"""The rules of error feedback: what was delivered and what is remembered is all there was."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch

from lossycoll import ARCTopKState, CheckpointError
from lossycoll.train.compress import selection
from lossycoll.train.compress.error_memory import RULES, RowSum, memory_of
from tests.support.arc_cases import Nodes


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "none"])
@pytest.mark.parametrize("loss", [0.0, 0.4])
def test_nothing_is_forgotten(rule: str, loss: float) -> None:
    """What was delivered and what is remembered is all there was, also where rows are lost."""
    draw = torch.Generator().manual_seed(3)
    memory, total, applied_sum = memory_of(rule, 0.3), torch.zeros(20, 6), torch.zeros(20, 6)
    average = torch.zeros(20, 6)
    for step in range(40):
        gradient = torch.randn(20, 6, generator=draw)
        total += gradient
        average = gradient.clone() if step == 0 else 0.7 * average + 0.3 * gradient
        work = gradient.clone()
        if not memory.ready:
            arrived = work * (torch.rand(20, 1, generator=draw) >= loss)
            memory.initialize(work, arrived, arrived)
            applied_sum += arrived
            continue
        index = selection.random_rows(20, 4, selection.generator(step))
        dense = sum(factor * tensor for tensor, factor in memory.parts(work))
        sent = torch.empty(4, 6)
        memory.select(memory.accumulate(work), index, sent)
        torch.testing.assert_close(sent, dense[index], rtol=1e-4, atol=1e-5)
        arrived = sent * (torch.rand(4, 1, generator=draw) >= loss)
        delivered = RowSum(index, arrived)
        memory.update(delivered, [delivered], work)
        applied_sum[index] += arrived
        if rule == "ef14":
            expected = torch.zeros(20, 6).index_add_(0, index, arrived)
            assert torch.equal(work, expected)
        else:
            assert torch.equal(work, memory.tensors["all"])
    held = memory.tensors
    assert set(held) == set(RULES[rule].names)
    if rule == "ef14":
        torch.testing.assert_close(applied_sum + held["error"], total, rtol=1e-4, atol=1e-4)
    else:
        torch.testing.assert_close(held["own"], held["all"])
        torch.testing.assert_close(held["own"], applied_sum, rtol=1e-4, atol=1e-4)
    if rule == "ef21m":
        torch.testing.assert_close(held["average"], average, rtol=1e-4, atol=1e-5)


def test_with_all_rows_nothing_remains() -> None:
    for rule in ("ef14", "ef21", "ef21m"):
        nodes = Nodes(4, rule, "arc", 1.0)
        for step in range(5):
            draw = torch.Generator().manual_seed(step)
            gradients = torch.randn(4, 30, 8, generator=draw)
            used = nodes.used(gradients.clone())
            torch.testing.assert_close(used, gradients.mean(0), rtol=1e-5, atol=1e-6)
        held = nodes.memory.tensors
        if rule == "ef14":
            assert not bool(held["error"].any())
        else:
            last = gradients.transpose(0, 1).reshape(30, -1)
            torch.testing.assert_close(held["own"], last, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "momentum"),
    [pytest.param("ef14", 1.0, marks=pytest.mark.long), ("ef21m", 0.1)],
)
def test_the_error_of_a_noisy_quadratic_falls_with_the_number_of_workers(
    rule: str, momentum: float
) -> None:
    """E |x|^2 in the end is the step size times the noise, over the workers: a linear speed-up."""
    errors = {}
    for workers in (1, 4, 16):
        nodes = Nodes(workers, rule, "arc", 0.25, 4, momentum)
        draw = torch.Generator().manual_seed(5)
        x, sums = torch.ones(40, 8), []
        for step in range(1500):
            gradients = x + torch.randn(workers, 40, 8, generator=draw)
            x = x - 0.02 * nodes.used(gradients)
            if step >= 500:
                sums.append(float(x.square().mean()))
        errors[workers] = sum(sums) / len(sums)
    assert errors[1] / errors[4] == pytest.approx(4, rel=0.25)
    assert errors[1] / errors[16] == pytest.approx(16, rel=0.25)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("known", [False, True])
def test_a_step_can_be_undone_bit_for_bit(rule: str, known: bool) -> None:
    draw = torch.Generator().manual_seed(5)
    memory = memory_of(rule, 0.3)

    def step() -> None:
        gradient = torch.randn(9, 4, generator=draw)
        if not memory.ready:
            memory.initialize(gradient, gradient, gradient)
            return
        memory.accumulate(gradient)
        for index in (torch.tensor([1, 2]), torch.tensor([2, 7])):
            rows = RowSum(index, torch.randn(2, 4, generator=draw))
            memory.update(rows, [rows, rows], gradient)
        memory.residual = torch.randn(3, generator=draw)

    def copied() -> object:
        return deepcopy((memory.tensors, memory.residual))

    for _ in range(2 if known else 0):
        step()
    before = copied()
    memory.hold()
    for _ in range(2):
        step()
    memory.revert()
    torch.testing.assert_close(copied(), before, rtol=0, atol=0)
    memory.revert()  # nothing is held any more
    memory.hold()
    step()
    after = copied()
    loaded = pickle.loads(pickle.dumps(memory))  # nor is anything in a copy
    loaded.revert()
    torch.testing.assert_close((loaded.tensors, loaded.residual), after, rtol=0, atol=0)
    memory.commit()
    memory.revert()
    torch.testing.assert_close(copied(), after, rtol=0, atol=0)


def test_rows_stay_within_float16() -> None:
    memory, index = memory_of("ef14"), torch.tensor([0])
    for _ in range(2):
        accumulated = memory.accumulate(torch.full((3, 2), 60_000.0))
    sent = torch.empty(1, 2, dtype=torch.float16)
    memory.select(accumulated, index, sent)
    assert sent.tolist() == [[65_504.0] * 2]
    delivered = RowSum(index, sent.float())
    memory.update(delivered, [delivered], torch.empty(3, 2))
    assert memory.tensors["error"][0].tolist() == [120_000.0 - 65_504.0] * 2


def filled() -> ARCTopKState:
    state = ARCTopKState(error_feedback="ef21m", momentum=0.5)
    gradient = torch.ones(4, 3)
    state._memory["b"].initialize(gradient, gradient / 2, gradient / 4)
    state._memory["a"].residual = torch.ones(2)
    for key, shape in {"b": (4, 3), "a": (2,), "c": (5, 5)}.items():
        state._memory[key].shape = shape
    return state


def test_what_is_saved_comes_back_and_is_a_copy() -> None:
    state, loaded = filled(), ARCTopKState(error_feedback="ef21m", momentum=0.5)
    assert state.memory_bytes() == 4 * (3 * 12 + 2)
    saved = state.state_dict()
    loaded.load_state_dict(saved)
    assert loaded.memory_bytes() == state.memory_bytes()
    state._memory["b"].tensors["own"].add_(1)  # of which nothing was saved
    for key in ("memories", "owed"):
        torch.testing.assert_close(loaded.state_dict()[key], saved[key])
    assert loaded.state_dict()["shapes"] == {"b": (4, 3), "a": (2,), "c": (5, 5)}
    assert {name: float(tensor.mean()) for name, tensor in saved["memories"]["b"].items()} == {
        "own": 0.5, "all": 0.25, "average": 1.0,
    }  # fmt: skip
    saved["memories"]["b"]["own"].zero_()
    saved["owed"]["a"].zero_()
    assert float(loaded._memory["b"].tensors["own"].mean()) == 0.5
    assert loaded.state_dict()["owed"]["a"].tolist() == [1.0, 1.0]


def test_tensors_of_another_rule_are_refused() -> None:
    state, other = filled().state_dict(), ARCTopKState(error_feedback="ef21")
    with pytest.raises(CheckpointError, match="the state of 'b' has own, all, average, wanted own"):
        other.load_state_dict({**state, "error_feedback": "ef21"})
