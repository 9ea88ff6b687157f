"""What a rank remembers of all its gradients, saved and loaded."""

from __future__ import annotations

import pytest
import torch

from lossycoll import CheckpointError
from lossycoll.train.compress.error_memory import RankMemory


def filled() -> RankMemory:
    memory = RankMemory("ef21m", 0.5)
    memory.shapes.update({"b": (4, 3), "a": (2,), "c": (5, 5)})
    gradient = torch.ones(4, 3)
    memory.of("b").initialize(gradient, gradient / 2, gradient / 4)
    memory.of("c")  # met, and nothing remembered yet
    memory.residuals["a"] = torch.ones(2)
    return memory


def test_what_is_saved_comes_back_and_is_a_copy() -> None:
    memory = filled()
    assert memory.remembered() == [("b", (4, 3))]
    assert memory.nbytes() == 4 * (3 * 12 + 2)
    state = memory.state_dict()
    loaded = RankMemory.from_state_dict("ef21m", 0.5, state)
    assert loaded.remembered() == memory.remembered()
    assert loaded.shapes == memory.shapes
    assert loaded.nbytes() == memory.nbytes()
    for memories in (state["memories"]["b"], loaded.of("b").tensors):
        assert {name: float(tensor.mean()) for name, tensor in memories.items()} == {
            "own": 0.5, "all": 0.25, "average": 1.0,
        }  # fmt: skip
    memory.of("b").tensors["own"].zero_()
    memory.residuals["a"].zero_()
    assert float(loaded.of("b").tensors["own"].mean()) == 0.5
    assert loaded.residuals["a"].tolist() == [1.0, 1.0]


def test_tensors_of_another_rule_are_refused() -> None:
    state = filled().state_dict()
    with pytest.raises(CheckpointError, match="the state of 'b' has own, all, average, wanted own"):
        RankMemory.from_state_dict("ef21", 1.0, state)
