"""Sums of activations lose nothing unless somebody says so: functional collectives, and sums in a
module's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

import lossycoll
from tests.support.harness import init, run_ranks

LOSSY = {
    "LOSSYCOLL_LOG": "info",
    "LOSSYCOLL_INJECT": "loss=20%,seed=7",
    "LOSSYCOLL_DEADLINE_MIN": "0.02",
    "LOSSYCOLL_MTU": "1500",
}
ELEMENTS = 120_000


class AllReduced(torch.autograd.Function):
    """As Megatron's and Transformers' sum of activations."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        total = inputs.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def rank_functional(rank: int, world: int) -> dict[str, tuple[int, bool]]:
    """By call: packets that went missing at this rank, and whether the result is exact."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    init(timeout=30)
    mesh = init_device_mesh("cpu", (world,))
    named = dist.new_group(pg_options=lossycoll.Options(delivery="lossy"))
    own = torch.full((ELEMENTS,), float(rank + 1))
    total = sum(range(1, world + 1))
    out: dict[str, tuple[int, bool]] = {}

    def ask(name: str, call: Callable[[], torch.Tensor]) -> None:
        before = lossycoll.stats().packets_missing
        result = call()
        out[name] = lossycoll.stats().packets_missing - before, bool((result == total).all())

    def direct(group: Any = None) -> torch.Tensor:
        value = own.clone()
        dist.all_reduce(value, group=group)
        return value

    def functional(group: Any = dist.group.WORLD) -> torch.Tensor:
        return fc.all_reduce(own, "sum", group) + 0  # only now is it waited for

    def backward() -> torch.Tensor:
        x = own.clone().requires_grad_()
        (fc.all_reduce(x, "sum", dist.group.WORLD) * (rank + 1)).sum().backward()
        assert x.grad is not None
        return x.grad

    class Doubled(torch.nn.Module):
        """As a layer of tensor parallelism that was split by hand."""

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return AllReduced.apply(inputs)

    class Trained(torch.nn.Module):
        """As a training step that runs inside a wrapper's forward, with its backward pass."""

        def __init__(self) -> None:
            super().__init__()
            self.ddp = DistributedDataParallel(torch.nn.Linear(1, ELEMENTS, bias=False))

        def forward(self) -> torch.Tensor:
            (self.ddp(torch.ones(1, 1)) * (rank + 1)).sum().backward()
            return next(self.ddp.parameters()).grad.flatten() * world

    def redistributed(*to: Any) -> torch.Tensor:
        partial = DTensor.from_local(own, mesh, [Partial()])
        return partial.redistribute(placements=to).to_local() + 0

    compiled = torch.compile(functional, backend="aot_eager")
    compiled_direct = torch.compile(direct, backend="aot_eager")
    ask("direct", direct)
    ask("functional", functional)
    ask("its backward", backward)
    ask("coalesced", lambda: torch.cat(fc.all_reduce_coalesced([own, own], "sum", "0")) + 0)
    ask("reduce_scatter", lambda: fc.reduce_scatter_single(own, "sum", 0, dist.group.WORLD) + 0)
    ask("DTensor", lambda: redistributed(Replicate()))
    ask("DTensor, scattered", lambda: redistributed(Shard(0)))
    ask("compiled", compiled)
    ask("compiled direct", compiled_direct)
    ask("in a module", lambda: Doubled()(own))
    ask("in a module's backward", Trained())
    ask("direct again", direct)
    with lossycoll.lossy():
        ask("in a scope", functional)
        ask("a module in a scope", lambda: Doubled()(own))
    ask("in a group that was told", lambda: functional(named))
    dist.destroy_process_group()
    return out


def rank_sharded(rank: int, world: int) -> dict[str, int]:
    """Packets that went missing in each pass of FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    init(timeout=30)
    model = torch.nn.Linear(3, ELEMENTS, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    out = model(torch.ones(2, 3))
    assert bool((out == 3).all())
    found = {"forward": lossycoll.stats().packets_missing}
    out.sum().backward()
    found["backward"] = lossycoll.stats().packets_missing - found["forward"]
    dist.destroy_process_group()
    return found


def rank_pipelined(rank: int, world: int) -> dict[str, bool]:
    """Whether outputs and gradients of a pipeline are exact, and nothing was missing."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.full((), 2.0))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * self.factor

    init(timeout=30)
    layer = Layer()
    stage = PipelineStage(layer, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda out, target: (out - target).sum())
    inputs = torch.ones(4, ELEMENTS)
    out = schedule.step(inputs) if rank == 0 else schedule.step(target=torch.zeros(4, ELEMENTS))
    stats = lossycoll.stats()
    gradient = layer.factor.grad
    assert gradient is not None
    found = {
        "output": rank == 0 or bool((out == 4).all()),
        "gradient": float(gradient) == 2.0 * ELEMENTS,  # the mean of four
        "nothing missing": stats.packets_missing == 0,
        "packets lost": stats.packets_injected > 0,
    }
    dist.destroy_process_group()
    return found


def test_sharded_parameters_arrive_whole_and_their_gradients_may_lose_packets() -> None:
    for outcome in run_ranks(rank_sharded, 2, LOSSY):
        assert not outcome.error, outcome
        assert outcome.value["forward"] == 0
        assert outcome.value["backward"] > 0


def test_what_a_pipeline_hands_on_arrives_whole() -> None:
    for outcome in run_ranks(rank_pipelined, 2, LOSSY):
        assert not outcome.error, outcome
        assert all(outcome.value.values()), outcome.value


def test_sums_of_activations_lose_nothing_unless_somebody_says_so() -> None:
    outcomes = run_ranks(rank_functional, 2, LOSSY)
    lossy = {"direct", "direct again", "in a module's backward"}
    lossy |= {"in a scope", "a module in a scope", "in a group that was told"}
    for outcome in outcomes:
        assert not outcome.error, outcome
        found = outcome.value
        assert len(found) == 15
        assert {name for name, (missing, _) in found.items() if missing} == lossy, found
        assert {name for name, (_, exact) in found.items() if not exact} == lossy, found
    told = [outcome.stderr.count("adds activations up and is reliable") for outcome in outcomes]
    assert told == [1, 0], outcomes[0].stderr
