"""The optimizer's state of fragments and of whole parameters, without ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import lossycoll
from lossycoll.train.common.layout import ParameterSpec, lay_out
from lossycoll.train.sharded import checkpoint


@pytest.mark.parametrize("world", [1, 2, 5])
def test_state_survives_cutting_and_joining(world: int) -> None:
    shapes: list[Tensor] = [
        torch.empty(5, 7),
        torch.empty(()),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(1),
    ]
    specs = [ParameterSpec(tuple(t.shape), t.stride(), 4) for t in shapes]
    draws = torch.Generator().manual_seed(world)
    (bucket,) = lay_out(specs, world)
    for member in bucket.members:
        moment = torch.randn(member.shape, generator=draws).double()
        state = {"step": torch.tensor(7.0), "exp_avg": moment, "count": 3, "none": None}
        names = frozenset({"exp_avg"})
        checkpoint.check_state(state, member.shape, names, "it")
        states = [
            checkpoint.state_of(fragment, checkpoint.part_of(fragment, state, names))
            for rank in range(world)
            for fragment in bucket.fragments(rank)
            if fragment.member == member
        ]
        back = checkpoint.joined(member, states, names)
        assert list(back) == list(state) or sorted(back) == sorted(state)
        torch.testing.assert_close(back["exp_avg"], moment, rtol=0, atol=0)
        assert back["exp_avg"].stride() == shapes[member.index].stride()
        assert back["step"].shape == ()
        assert (back["step"], back["count"], back["none"]) == (7.0, 3, None)


def test_a_single_element_has_what_others_have() -> None:
    """SGD without momentum, which a scheduler gives it: the trial has seen no momentum_buffer."""
    small, large = Parameter(torch.zeros(())), Parameter(torch.zeros(4))
    states = {
        small: {"buffer": torch.ones(1), "step": torch.zeros(1)},
        large: {"buffer": torch.ones(4)},
    }
    assert checkpoint.elementwise_of(states, {"known"}) == {"known", "buffer"}
    specs = [ParameterSpec((), (), 4), ParameterSpec((4,), (1,), 4)]
    (bucket,) = lay_out(specs, 1)
    (fragment,) = (one for one in bucket.fragments(0) if one.member.index == 0)
    saved = checkpoint.state_of(fragment, states[small])
    back = checkpoint.joined(fragment.member, [saved], {"buffer"})
    assert (back["buffer"].shape, back["step"].shape) == ((), (1,))
    # What isn't by element has any shape.
    checkpoint.check_state({"step": torch.zeros(1)}, (3, 4), {"buffer"}, "'w'")


def test_state_of_another_shape_names_the_parameter() -> None:
    state = {"exp_avg": torch.zeros(3, 4)}
    with pytest.raises(lossycoll.CheckpointError, match=r"exp_avg of 'w' .* \(3, 4\).* \(4, 3\)"):
        checkpoint.check_state(state, (4, 3), {"exp_avg"}, "'w'")
    with pytest.raises(ValueError, match="wanted"):
        checkpoint.check_state({"exp_avg": torch.zeros(())}, (3,), {"exp_avg"}, "'w'")
