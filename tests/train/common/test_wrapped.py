"""What frameworks wrap is found inside, or refused by name. The wrappers have their shape."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel

import lossycoll
from lossycoll.errors import UnsupportedError
from lossycoll.train.common.models import (
    check_keeps_parameters,
    innermost,
    is_dtensor,
    layers_of,
    steps_of,
)
from tests.support.harness import init, run_good


class LikeAccelerated(Optimizer):
    """As accelerate's AcceleratedOptimizer: it never runs torch's constructor."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class LikeLightning:
    """As Lightning's LightningOptimizer: it takes on the class of what it wraps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        kind = optimizer.__class__
        self.__class__ = type("Lightning" + kind.__name__, (self.__class__, kind), {})

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def step(self, closure: Any = None, **rest: Any) -> Any:
        return self._optimizer.step(closure)


class LikeFabric(LikeLightning):
    """As Fabric's: it hands on what it hasn't."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class LikeScaled:
    """A wrapper that is no optimizer by its class."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


class LikeTorchft(Optimizer):
    """As torchft's Optimizer, which asks its manager whether all have gradients."""

    def __init__(self, optim: Optimizer) -> None:
        self.optim = optim

    def step(self, closure: Any = None) -> Any:
        return self.optim.step(closure)


class LikeFabricModule(nn.Module):
    """As Fabric's _FabricModule: what it wraps, and what that wraps."""

    def __init__(self, forward: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward
        self._original_module = original

    def forward(self, *inputs: Any) -> Any:
        return self._forward_module(*inputs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_original_module"), name)


class Headed(nn.Module):
    """No wrapper: it has parameters of its own beside ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "wrapper", [LikeAccelerated, LikeLightning, LikeFabric, LikeScaled, LikeTorchft]
)
def test_an_optimizer_is_found_inside_wrappers_and_its_hooks_run(wrapper: Any) -> None:
    model = nn.Linear(2, 2)
    inner = SGD(model.parameters(), lr=0.1)
    wrapped = wrapper(inner)
    assert steps_of(wrapped, "a test") is inner
    assert steps_of(LikeAccelerated(wrapped), "a test") is inner
    steps: list[int] = []
    steps_of(wrapped, "a test").register_step_post_hook(lambda *rest: steps.append(1))
    if wrapper is not LikeScaled:
        wrapped.step()
        assert steps == [1]


def test_an_optimizer_with_hooks_of_its_own_is_the_one_that_steps() -> None:
    class Lookahead(Optimizer):
        def __init__(self, optimizer: Optimizer) -> None:
            super().__init__(optimizer.param_groups, {})
            self.optimizer = optimizer

    outer = Lookahead(SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    assert steps_of(outer, "a test") is outer


def test_what_wraps_no_optimizer_is_refused_by_name() -> None:
    class Loop:
        @property
        def optimizer(self) -> Loop:
            return self

    class Bare(Optimizer):
        def __init__(self) -> None:
            pass

    for wrong in (Loop(), Bare(), None, nn.Linear(1, 1)):
        name = type(wrong).__name__
        with pytest.raises(
            UnsupportedError, match=rf"optimizer is a {name}, wanted a torch\.optim"
        ):
            steps_of(wrong, "DriftBound")


def test_a_model_is_found_inside_wrappers() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    compiled: Any = torch.compile(net)
    assert innermost(compiled) is net
    assert innermost(LikeFabricModule(compiled, net)) is net
    assert innermost(LikeFabricModule(net, net)) is net
    assert innermost(net) is net
    parallel = nn.DataParallel(net)
    assert [type(each).__name__ for each in layers_of(parallel)] == ["DataParallel", "Sequential"]
    assert innermost(LikeFabricModule(parallel, net)) is parallel
    own = Headed()
    assert layers_of(own) == [own]
    averaged = AveragedModel(net)
    assert innermost(averaged) is averaged, "the names of parameters stay as the caller has them"


def test_what_keeps_parameters_itself_is_refused_by_name() -> None:
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    with pytest.raises(UnsupportedError, match="the model is a DeepSpeedEngine, which reduces"):
        layers_of(nn.DataParallel(engine()))


def rank_fsdp1(rank: int, world: int) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    init()
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    refused = pytest.raises(UnsupportedError, match=r"FullyShardedDataParallel \(FSDP1\), whose fl")
    optimizer = SGD(model.parameters(), lr=0.1)
    for wrapped in (model, nn.Sequential(model)):
        for method in (
            lambda: lossycoll.measure_drift(wrapped),  # noqa: B023 (called at once)
            lambda: lossycoll.DriftBound(wrapped, optimizer),  # noqa: B023
            lambda: lossycoll.DropCompute(wrapped, 2, threshold=60.0),  # noqa: B023
        ):
            with refused:
                method()
    dist.destroy_process_group()


def test_fsdp1_is_refused_by_name() -> None:
    run_good(rank_fsdp1, 2, {"LOSSYCOLL_LOG": "off"})


def rank_methods(rank: int, world: int) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    init()
    out: dict[str, Any] = {}
    for wrapper in (LikeAccelerated, LikeLightning, LikeFabric):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 3))
        pair = dist.new_group()
        ddp = DistributedDataParallel(net, process_group=pair)
        model = LikeFabricModule(ddp, net)
        optimizer = wrapper(SGD(net.parameters(), lr=0.0))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(rank)
        before = lossycoll.measure_drift(model)
        sums = lossycoll.stats(pair).operations
        with lossycoll.DriftBound(model, optimizer, period=1) as bound:
            for _ in range(2 * world):
                optimizer.step()
        after = lossycoll.measure_drift(model)
        sent = lossycoll.stats(pair).operations - sums
        out[wrapper.__name__] = (before.total, after.total, bound.steps, sent > 2 * world)
        out["names"] = sorted(before.per_parameter)

    out["gradients"] = []
    for each in (ddp, model):
        drop = lossycoll.DropCompute(each, 2, threshold=60.0)
        optimizer.zero_grad()
        for batch in drop(iter([torch.full((1, 30), float(rank))] * 2)):
            each(batch).sum().backward()
        gradients = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
        out["gradients"].append(torch.cat(gradients).tolist())
    with pytest.raises(lossycoll.UnsupportedError, match="LikeFabricModule with DistributedData"):
        lossycoll.ShardedOptimizer(net.parameters(), SGD, model=model, lr=0.1)
    dist.destroy_process_group()
    return out


def test_methods_take_what_frameworks_wrap() -> None:
    for found in run_good(rank_methods, 2, {"LOSSYCOLL_LOG": "off"}):
        assert found.pop("names") == ["0.bias", "0.weight", "1.bias", "1.weight"]
        plain, wrapped = found.pop("gradients")
        assert plain == wrapped
        assert any(plain)
        for before, after, steps, sent in found.values():
            assert before > 0
            assert (after, steps, sent) == (0.0, 4, True)


def test_what_is_no_module_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    for passed, name in ((model.parameters(), "generator"), (list(model.parameters()), "list")):
        with pytest.raises(UnsupportedError, match=f"the model is a {name}, wanted a torch.nn.Mod"):
            lossycoll.measure_drift(passed)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tensor", "fsdp"])
def test_a_module_that_another_thread_is_importing_has_no_objects_yet(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's optimizers import it in their first step, while a donor's thread packs the state."""
    monkeypatch.setitem(sys.modules, f"torch.distributed.{name}", ModuleType(name))
    model = nn.Linear(2, 2)
    assert not is_dtensor(model.weight)
    check_keeps_parameters(model)
