"""ShardedOptimizer(model=...): parameters travel while the next forward pass runs.

What a step sends comes only when somebody waits for it, so whoever reads a parameter too early
reads the old value, and trains differently from one process that has all data.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import lossycoll
from lossycoll.train.common.collectives import BlockGather
from tests.support.sharded_cases import (
    CLASSES,
    FEATURES,
    batch,
    check_equal,
    loss_of,
    network,
    replicas,
    sharded,
    share,
)
from tests.support.sharded_scripts import STEPS, train, train_as_one_process


class Late:
    """Collectives whose gathers of blocks are made when they are waited for."""

    def __init__(self, collectives: Any) -> None:
        self._collectives = collectives

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collectives, name)

    def all_gather_blocks(self, *what: Any) -> Any:
        gathered: list[Any] = []

        class Work:
            def wait(work) -> None:
                if not gathered:
                    gathered.append(self._collectives.all_gather_blocks(*what).wait())

        return BlockGather(Work(), lambda: gathered[0])


def overlapped(model: nn.Module, optimizer: Any, **rest: Any) -> Any:
    """An optimizer of all of the model's parameters, which come late."""
    mine = sharded(model.parameters(), optimizer, model=model, **rest)
    sync = mine._parameter_sync
    sync._collectives = Late(sync._collectives)  # type: ignore[assignment]
    return mine


def under_way(mine: Any) -> list[bool]:
    """By bucket, whether what was sent hasn't been waited for."""
    sent = [bucket.sent for bucket in mine._parameter_sync._buckets]
    return [each is not None and not each.is_here for each in sent]


class Attention(nn.Module):
    """torch's attention reads the parameters of its last layer, which it doesn't call. The head
    shares the first layer's weight, and the scale is the model's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(FEATURES, 8)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(FEATURES, 8)
        self.head.weight = self.first.weight
        self.last = nn.Linear(8, CLASSES)
        self.spare = nn.Linear(8, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = (self.first(x) + self.head(x)).view(len(x), 2, 4)
        mixed = self.attention(hidden, hidden, hidden, need_weights=False)[0].reshape(len(x), 8)
        # Called in some passes only, and not in the first.
        last = self.last if self.passes % 2 == 0 else self.spare
        self.passes += 1
        out: Tensor = last(mixed) * self.scale + linear(x, self.first.weight)[:, :CLASSES]
        return out


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Any:
        x = checkpoint(self.inner[:2], x, use_reentrant=False)
        return self.inner[4](checkpoint(self.inner[2:4], x, use_reentrant=False))


def as_one_process(rank: int, world: int) -> None:
    makes: tuple[Callable[[], nn.Module], ...] = (network, Attention, Checkpointed)
    for make in makes:
        model, plain = make(), make()
        # Adam would make something of gradients that are 0 but for rounding: those of the keys.
        mine = overlapped(model, torch.optim.SGD, lr=0.1, momentum=0.9, bucket_bytes=300)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        train(mine, theirs, model, plain, rank, world)
        assert all(under_way(mine))  # no step has waited
        mine.wait_parameters()
        assert not any(under_way(mine))
        check_equal(model, plain, make.__name__)
        assert mine.stats().steps == STEPS
        accumulated(mine, theirs, model, plain, rank, world)
        check_equal(model, plain, f"{make.__name__}, accumulated")


def accumulated(
    mine: Any, theirs: Any, model: nn.Module, plain: nn.Module, rank: int, world: int
) -> None:
    """Two steps of two passes each, with a scaler that skips the first."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    for step in range(2):
        mine.zero_grad()
        theirs.zero_grad()
        first, second = batch(20 + step, world), batch(30 + step, world)
        factor = float("inf") if step == 0 else 1.0
        with mine.no_sync():
            scalers[0].scale(loss_of(model, share(first, rank)) * factor).backward()
        scalers[1].scale(loss_of(plain, first) * factor).backward()
        scalers[0].scale(loss_of(model, share(second, rank))).backward()
        scalers[1].scale(loss_of(plain, second)).backward()
        for scaler, optimizer in zip(scalers, (mine, theirs), strict=True):
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 32.0
    assert mine.stats().steps == STEPS + 1
    assert not any(under_way(mine))


def module_by_module(rank: int, world: int) -> None:
    """A module waits for its own parameters only, but in the first pass, and to evaluate."""
    model = network()
    mine = overlapped(model, torch.optim.SGD, lr=0.1, bucket_bytes=300)
    seen: list[tuple[int, list[bool]]] = []
    for number in (0, 2, 4):
        model[number].register_forward_pre_hook(
            lambda *_, number=number: seen.append((number, under_way(mine)))
        )

    def run() -> None:
        mine.step()
        assert all(under_way(mine))
        mine.zero_grad()
        seen.clear()
        loss_of(model, share(batch(0, world), rank)).backward()

    run()
    assert not any(seen[0][1])  # which modules will be called isn't known yet
    run()
    places = mine._parameter_sync.places
    for number, flags in seen:
        own = {places[parameter] for parameter in model[number].parameters()}
        later = {places[p] for other in (2, 4) if other > number for p in model[other].parameters()}
        assert not any(flags[bucket] for bucket in own), (number, flags)
        assert all(flags[bucket] for bucket in later - own), (number, flags)
    assert seen[0][1].count(True) > 2
    mine.step()
    model.eval()
    seen.clear()
    model(batch(0, world)[0])
    assert not any(seen[0][1])


def outside_of_a_pass(rank: int, world: int) -> None:
    """Whatever else reads or writes the parameters through the model sees what was sent."""
    model = network()
    mine = overlapped(model, torch.optim.SGD, lr=0.1)

    def step() -> None:
        mine.zero_grad()
        loss_of(model, share(batch(0, world), rank)).backward()
        mine.step()
        assert all(under_way(mine))

    step()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert torch.equal(replicas(model), replicas(model)[:1].expand(world, -1))
    step()
    model.load_state_dict(saved)
    assert not any(under_way(mine))
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name])
    step()
    mine.synchronize_parameters()
    assert mine.ages() == (sum(mine.ages()),)
    step()
    mine.consolidate_state_dict()
    step()
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for copied in copies:
        copied.eval()(batch(0, world)[0])
    mine.wait_parameters()
    failing(mine, model, rank, world)


def failing(mine: Any, model: nn.Module, rank: int, world: int) -> None:
    """A forward pass that raises leaves the rest under way; the next one goes on."""

    def fail(*_: Any) -> None:
        raise KeyError

    handle = model[1].register_forward_pre_hook(fail)
    for _ in range(2):
        mine.step()
        with pytest.raises(KeyError):
            model(batch(0, world)[0])
    assert any(under_way(mine))
    handle.remove()
    mine.zero_grad()
    loss_of(model, share(batch(0, world), rank)).backward()
    mine.step()
    mine.wait_parameters()
    assert torch.equal(replicas(model), replicas(model)[:1].expand(world, -1))


class Early(nn.Module):
    """From its second pass on it reads the last layer's weight before it calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.early = False

    def forward(self, x: Tensor) -> Tensor:
        early = self.layers[4].weight.square().sum() if self.early else 0.0
        out: Tensor = self.layers(x).sum() + early
        return out


def read_outside_of_its_module(rank: int, world: int) -> None:
    model = Early()
    mine = overlapped(model, torch.optim.SGD, lr=0.1)
    inputs = batch(0, world)[0]
    model(inputs).backward()
    mine.step()
    model.early = True
    with pytest.raises(RuntimeError, match="inplace"):
        model(inputs).backward()
    mine.zero_grad()
    with pytest.raises(lossycoll.UnsupportedError, match="model is a list, wanted"):
        sharded(model.parameters(), torch.optim.SGD, lr=0.1, model=list(model.parameters()))
    with pytest.raises(lossycoll.UnsupportedError, match=r"\(37, 13\) isn't in the model \(Linear"):
        sharded(network().parameters(), torch.optim.SGD, lr=0.1, model=nn.Linear(3, 3))
    with pytest.raises(lossycoll.UnsupportedError, match=r"\(2,\) isn't in the model \(Early"):
        mine.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    model.early = False
    model(inputs).backward()
    mine.step()
    mine.wait_parameters()
    assert torch.equal(replicas(model), replicas(model)[:1].expand(world, -1))


def compiled(rank: int, world: int) -> None:
    model, plain = network(), network()
    fast: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    mine = overlapped(fast, torch.optim.AdamW, lr=0.01)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(mine, theirs, fast, plain, rank, world)
    assert all(under_way(mine))
    mine.wait_parameters()
    check_equal(model, plain)


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(hooks)
        for module in model.modules()
        for name, hooks in vars(module).items()
        if name.endswith("_hooks")
    )


def leaves_no_hooks() -> None:
    model = network()
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1, model=model)
    assert hooks_of(model) > 6
    del mine
    gc.collect()  # what other tests have left may hold it
    assert hooks_of(model) == 0


def in_one_process_group(rank: int, world: int) -> None:
    as_one_process(rank, world)
    module_by_module(rank, world)
    outside_of_a_pass(rank, world)
    read_outside_of_its_module(rank, world)
    leaves_no_hooks()


def test_a_module_waits_for_its_own_parameters() -> None:
    train_as_one_process(in_one_process_group)


@pytest.mark.long
def test_a_compiled_model_waits_as_a_whole() -> None:
    train_as_one_process(compiled)
