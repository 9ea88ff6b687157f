"""ShardedOptimizer's parts that need no ranks: buckets, ages, the trial of optimizers, state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import lossycoll
from lossycoll.train.common.layout import ALIGNMENT, Bucket, Spec, contiguous, is_dense, lay_out
from lossycoll.train.common.staleness import Ages, histogram
from lossycoll.train.sharded import checkpoint
from lossycoll.train.sharded.elementwise_probe import elementwise_state
from lossycoll.train.sharded.undelivered import Behind

# ---- buckets ----


def spec(*shape: int, itemsize: int = 4, key: str = "a") -> Spec:
    return Spec(shape, contiguous(shape), itemsize, key)


def check_buckets(buckets: list[Bucket], specs: list[Spec], world: int) -> None:
    """Every element of every parameter has one place and one owner, and nothing else has."""
    members = [member for bucket in buckets for member in bucket.members]
    assert sorted(member.index for member in members) == list(range(len(specs)))
    for bucket in buckets:
        itemsize = specs[bucket.members[0].index].itemsize
        assert bucket.size == bucket.chunk * world
        assert bucket.chunk * itemsize % ALIGNMENT == 0
        end = 0
        for member in bucket.members:
            assert specs[member.index].key == bucket.key
            assert member.begin >= end
            assert member.begin * itemsize % ALIGNMENT == 0
            assert member.end - member.begin == specs[member.index].numel
            end = member.end
        assert end <= bucket.size
        owned = np.zeros(bucket.size, int)
        for rank in range(world):
            for fragment in bucket.fragments(rank):
                assert rank * bucket.chunk <= fragment.begin < fragment.end
                assert fragment.end <= (rank + 1) * bucket.chunk
                assert fragment.member.begin <= fragment.begin
                assert fragment.end <= fragment.member.end
                assert fragment.offset == fragment.begin - fragment.member.begin
                owned[fragment.begin : fragment.end] += 1
        wanted = np.zeros(bucket.size, int)
        for member in bucket.members:
            wanted[member.begin : member.end] = 1
        np.testing.assert_array_equal(owned, wanted)


@pytest.mark.parametrize("world", [1, 2, 3, 7, 8])
def test_every_element_has_one_owner(world: int) -> None:
    draw = random.Random(world)
    for _ in range(40):
        specs = []
        for _ in range(draw.randint(1, 12)):
            key = draw.choice("abc")
            shape = [draw.choice([0, 1, 2, 5, 17, 64]) for _ in range(draw.randint(0, 3))]
            specs.append(spec(*shape, itemsize={"a": 4, "b": 2, "c": 8}[key], key=key))
        buckets = lay_out(specs, world, draw.choice([1, 300, 5000, 10**7]), draw.choice([1, 700]))
        check_buckets(buckets, specs, world)


def test_buckets_are_in_the_order_of_the_backward_pass() -> None:
    specs = [spec(100, key="ab"[i % 2]) for i in range(8)]
    buckets = lay_out(specs, 2, bucket_bytes=900, first_bytes=400)
    last = [min(member.index for member in bucket.members) for bucket in buckets]
    assert last == sorted(last, reverse=True)
    assert [member.index for member in buckets[0].members] == [7]  # the first one is smaller
    assert [member.index for member in buckets[1].members] == [6, 4]
    assert [member.index for member in buckets[2].members] == [5, 3]


def test_a_large_parameter_has_a_bucket_of_its_own_and_indices_go_on() -> None:
    specs = [spec(10), spec(5000), spec(10), spec(10)]
    buckets = lay_out(specs, 3, bucket_bytes=1000, start=7)
    members = [[member.index for member in bucket.members] for bucket in buckets]
    assert members == [[10, 9], [8], [7]]


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.empty(3, 4), True),
        (torch.empty(3, 4).t(), True),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.empty(()), True),
        (torch.empty(1, 5).expand(3, 5), False),
        (torch.empty(4, 6)[:, :3], False),
        (torch.empty(4, 1)[:, :1], True),
    ],
)
def test_dense_is_as_torch_has_it(tensor: Tensor, dense: bool) -> None:
    assert is_dense(tensor.shape, tensor.stride()) is dense
    assert contiguous(tensor.shape) == torch.empty(tensor.shape).stride()


# ---- ages ----


def test_ages_count_steps_since_a_block_came() -> None:
    ages = Ages(rank=1, world=3, blocks=2, max_age=2)
    nothing = np.zeros((3, 2), bool)
    assert ages.needed() is None
    ages.advance(nothing)
    assert ages.values.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert ages.needed() is None
    some = nothing.copy()
    some[0, 1] = True
    ages.advance(some)
    assert ages.values.tolist() == [[2, 0], [0, 0], [2, 2]]
    needed = ages.needed()
    assert needed is not None
    assert needed.tolist() == [[True, False], [False, False], [True, True]]
    assert histogram([ages], rank=1) == (1, 0, 3)
    ages.reset()
    assert histogram([ages, ages], rank=1) == (8,)


def test_age_zero_needs_everything_and_none_nothing() -> None:
    everything = Ages(rank=0, world=2, blocks=3, max_age=0).needed()
    assert everything is not None
    assert everything.tolist() == [[False] * 3, [True] * 3]
    never = Ages(rank=0, world=2, blocks=3, max_age=None)
    for _ in range(100):
        never.advance(np.zeros((2, 3), bool))
    assert never.needed() is None
    assert histogram([never], rank=0) == (0,) * 100 + (3,)


def test_of_owners_that_are_behind_all_but_a_turning_sample_is_needed() -> None:
    ages = Ages(rank=0, world=3, blocks=40, max_age=3)
    only = np.array([False, False, True])
    assert ages.needed(np.zeros(3, bool)) is None
    free = np.zeros(40, int)
    for _ in range(16):
        needed = ages.needed(only)
        assert needed is not None
        assert not needed[:2].any()
        assert 2 <= (~needed[2]).sum() <= 3
        free += ~needed[2]
        ages.advance(np.ones((3, 40), bool))
    assert (free == 1).all()
    for _ in range(3):
        ages.advance(np.zeros((3, 40), bool))
    needed = ages.needed(only)
    assert needed is not None
    assert needed[1:].all()  # too old to be a sample


def feed(behind: Behind, share: float, steps: int, needed: Any = None) -> list[bool]:
    """``share`` of owner 1's 200 blocks stay away in each step; owner 2's all come."""
    for step in range(steps):
        arrived = np.ones((3, 200), bool)
        arrived[1] = (np.arange(200) * 37 + step) % 200 >= round(share * 200)
        behind.note(needed, arrived)
    found: list[bool] = behind.owners().tolist()
    return found


def test_an_owner_is_behind_when_too_much_of_what_needn_t_come_stays_away() -> None:
    behind = Behind(rank=0, world=3)
    assert feed(behind, 0.5, 1) == [False, False, False]  # too little is known
    assert feed(behind, 0.5, 1) == [False, True, False]
    assert feed(Behind(0, 3), 0.015, 100) == [False, False, False]
    assert feed(Behind(0, 3), 0.03, 100) == [False, True, False]
    # Blocks that had to come say nothing: only what is free tells that the link is well again.
    all_of_it = np.ones((3, 200), bool)
    assert feed(behind, 0.0, 1000, all_of_it) == [False, True, False]
    sample = all_of_it.copy()
    sample[1, ::16] = False
    assert feed(behind, 0.0, 500, sample) == [False, False, False]
    own = Behind(rank=1, world=3)
    assert feed(own, 0.5, 10) == [False, False, False]


# ---- which optimizers are element-wise ----

PLAIN: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01, "maximize": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
]
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


@pytest.mark.parametrize(("optimizer", "options"), PLAIN, ids=lambda value: str(value)[-30:])
@pytest.mark.parametrize("variant", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_torchs_elementwise_optimizers_pass(
    optimizer: Any, options: dict[str, Any], variant: dict[str, bool]
) -> None:
    if "fused" in variant and optimizer not in FUSED:
        with pytest.raises(TypeError):  # torch's own, not ours
            optimizer([Parameter(torch.zeros(1))], **options, **variant)
        return
    before = torch.random.get_rng_state()
    kept = {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}
    names = elementwise_state(optimizer, {**options, **variant}, "rank 0/1")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert options == kept
    parameter = Parameter(torch.ones(3, 5))
    parameter.grad = torch.ones(3, 5)
    plain = optimizer([parameter], **options, **variant)
    plain.step()
    shapes = {k: v.shape for k, v in plain.state[parameter].items() if isinstance(v, Tensor)}
    assert names == {key for key, shape in shapes.items() if shape == (3, 5)}


def test_what_a_group_says_besides_is_not_the_constructors() -> None:
    written = {"name": "backbone", "lr_scale": 0.5, "initial_lr": 0.1, "weight_decay": 0.2}
    names = elementwise_state(torch.optim.AdamW, {"lr": 0.1}, "rank 0/1", written)
    assert names == {"exp_avg", "exp_avg_sq"}
    group = torch.optim.AdamW([Parameter(torch.zeros(1))]).param_groups[0]
    whole = {key: value for key, value in group.items() if key != "params"}
    assert elementwise_state(torch.optim.AdamW, {}, "rank 0/1", whole) == names


class Counting(torch.optim.SGD):
    """State that is no parameter's, and would be lost from checkpoints."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1
        super().step()


class NormScaled(torch.optim.SGD):
    """The trust ratio of LAMB and LARS: a step as long as the parameter's norm says."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


class Clipped(torch.optim.SGD):
    """Element-wise for small gradients only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 100.0)
        super().step()


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=group["lr"])


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.LBFGS,
        torch.optim.SparseAdam,
        torch.optim.Adafactor,
        torch.optim.Muon,
        NormScaled,
        Clipped,
        Noisy,
        Counting,
    ],
)
def test_others_are_refused_with_an_explanation(optimizer: Any) -> None:
    before = torch.random.get_rng_state()
    with pytest.raises(lossycoll.UnsupportedError) as caught:
        elementwise_state(optimizer, {"lr": 0.1}, "rank 1/4")
    assert torch.equal(torch.random.get_rng_state(), before)
    text = str(caught.value)
    assert text.startswith(f"rank 1/4: {optimizer.__name__} is not element-wise")
    assert "DistributedDataParallel" in text


@pytest.mark.parametrize("rate", [0.0, 1e-12, 1e-7, torch.tensor(0.0)], ids=str)
def test_a_rate_that_hardly_moves_anything_hides_nothing(rate: Any) -> None:
    """A warm-up begins so."""
    for optimizer in (NormScaled, Clipped, torch.optim.Muon):
        with pytest.raises(lossycoll.UnsupportedError, match=r"of its largest step|flat fragments"):
            elementwise_state(optimizer, {"lr": rate}, "rank 1/4")
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        elementwise_state(optimizer, {"lr": rate, "weight_decay": 0.1}, "rank 1/4")


def test_bad_options_are_torchs_own_error() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        elementwise_state(torch.optim.AdamW, {"lr": -1.0}, "rank 0/1")
    with pytest.raises(TypeError, match="beta"):
        elementwise_state(torch.optim.AdamW, {"beta": 1}, "rank 0/1")


# ---- state of fragments and of whole parameters ----


@pytest.mark.parametrize("world", [1, 2, 5])
def test_state_survives_cutting_and_joining(world: int) -> None:
    shapes: list[Tensor] = [
        torch.empty(5, 7),
        torch.empty(()),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(1),
    ]
    specs = [Spec(tuple(t.shape), t.stride(), 4) for t in shapes]
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
    specs = [Spec((), (), 4), Spec((4,), (1,), 4)]
    (bucket,) = lay_out(specs, 1)
    (fragment,) = (one for one in bucket.fragments(0) if one.member.index == 0)
    told = checkpoint.state_of(fragment, states[small])
    back = checkpoint.joined(fragment.member, [told], {"buffer"})
    assert (back["buffer"].shape, back["step"].shape) == ((), (1,))
    # What isn't by element has any shape.
    checkpoint.check_state({"step": torch.zeros(1)}, (3, 4), {"buffer"}, "'w'")


def test_state_of_another_shape_names_the_parameter() -> None:
    state = {"exp_avg": torch.zeros(3, 4)}
    with pytest.raises(lossycoll.CheckpointError, match=r"exp_avg of 'w' .* \(3, 4\).* \(4, 3\)"):
        checkpoint.check_state(state, (4, 3), {"exp_avg"}, "'w'")
    with pytest.raises(ValueError, match="wanted"):
        checkpoint.check_state({"exp_avg": torch.zeros(())}, (3,), {"exp_avg"}, "'w'")
