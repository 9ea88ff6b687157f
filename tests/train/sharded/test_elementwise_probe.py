"""Which optimizers are element-wise, found by trying."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import lossycoll
from lossycoll.train.sharded.eligibility import Trial

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
    names = Trial(optimizer, {**options, **variant}, "rank 0/1").elementwise_state()
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
    names = Trial(torch.optim.AdamW, {"lr": 0.1}, "rank 0/1", written).elementwise_state()
    assert names == {"exp_avg", "exp_avg_sq"}
    group = torch.optim.AdamW([Parameter(torch.zeros(1))]).param_groups[0]
    whole = {key: value for key, value in group.items() if key != "params"}
    assert Trial(torch.optim.AdamW, {}, "rank 0/1", whole).elementwise_state() == names


def test_options_for_a_device_are_tried_in_host_memory() -> None:
    """capturable isn't for the CPU, and without it a tensor is no learning rate of foreach."""
    rate = torch.tensor(0.01)
    for more in ({}, {"foreach": True}, {"betas": (torch.tensor(0.9), torch.tensor(0.99))}):
        options = {"lr": rate, "capturable": True, **more}
        names = {"exp_avg", "exp_avg_sq"}
        assert Trial(torch.optim.Adam, options, "rank 0/1").elementwise_state() == names
        assert Trial(torch.optim.Adam, options, "rank 0/1").whole_state() == names
        assert Trial(torch.optim.Adam, {}, "rank 0/1", options).elementwise_state() == names
        assert options["lr"] is rate


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
        Trial(optimizer, {"lr": 0.1}, "rank 1/4").elementwise_state()
    assert torch.equal(torch.random.get_rng_state(), before)
    text = str(caught.value)
    assert text.startswith(f"rank 1/4: {optimizer.__name__} is not element-wise")
    assert "DistributedDataParallel" in text


@pytest.mark.parametrize("rate", [0.0, 1e-12, 1e-7, torch.tensor(0.0)], ids=str)
def test_a_rate_that_hardly_moves_anything_hides_nothing(rate: Any) -> None:
    """A warm-up begins so."""
    for optimizer in (NormScaled, Clipped, torch.optim.Muon):
        with pytest.raises(lossycoll.UnsupportedError, match=r"of its largest step|flat fragments"):
            Trial(optimizer, {"lr": rate}, "rank 1/4").elementwise_state()
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        Trial(optimizer, {"lr": rate, "weight_decay": 0.1}, "rank 1/4").elementwise_state()


def test_bad_options_are_torchs_own_error() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        Trial(torch.optim.AdamW, {"lr": -1.0}, "rank 0/1").elementwise_state()
    with pytest.raises(TypeError, match="beta"):
        Trial(torch.optim.AdamW, {"beta": 1}, "rank 0/1").elementwise_state()
