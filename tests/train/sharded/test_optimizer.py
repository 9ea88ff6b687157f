"""ShardedOptimizer of every class, with groups and schedules, and several at once.

Nothing is lost: each step is that of one process that has all data.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lossycoll
from tests.support.sharded_cases import (
    CLASSES,
    FEATURES,
    batch,
    check_equal,
    check_state,
    loss_of,
    network,
    replicas,
    sharded,
    share,
)
from tests.support.sharded_scripts import STEPS, step_both, train, train_as_one_process

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.05}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    (torch.optim.ASGD, {"lr": 0.05}),
]


def optimizers(group: dist.ProcessGroup, some: slice) -> None:
    """Each trains as one process with the whole batch does, and ends with the same state."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for number, (optimizer, options) in enumerate(OPTIMIZERS[some]):
        # In float64, since some divide by what is nearly 0.
        model, plain = network().double(), network().double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank)  # rank 0's count
        mine = sharded(model.parameters(), optimizer, group, **options)
        theirs = optimizer(plain.parameters(), **options)
        for step in range(STEPS):
            data = batch(10 * number + step, world, torch.float64)
            step_both(mine, theirs, model, plain, data, rank)
        check_equal(model, plain, optimizer.__name__)
        to = number % world
        mine.consolidate_state_dict(to=to)
        if rank == to:
            check_state(mine.state_dict(), theirs.state_dict())
        rows = replicas(model, group)
        assert bool((rows == rows[0]).all())
        figures = mine.stats()
        assert (figures.steps, figures.skipped, figures.stale) == (STEPS, 0, 0)
        assert (figures.blocks > 0) is (world > 1)
        assert mine.ages() == ((figures.blocks // STEPS,) if world > 1 else ())


def groups(rank: int, world: int) -> None:
    """All optimizers in a lossy group; some in one of gloo, of two ranks, and of a single one."""
    optimizers(dist.group.WORLD, slice(None))
    optimizers(dist.new_group(backend="gloo"), slice(0, 2))
    pairs = [dist.new_group([0, 2]), dist.new_group([1])]
    optimizers(pairs[rank % 2], slice(2, 4))


def groups_and_schedulers(rank: int, world: int) -> None:
    model, plain = network(), network()

    def groups(net: nn.Module) -> list[dict[str, Any]]:
        named = dict(net.named_parameters())
        decayed = [(n, p) for n, p in named.items() if p.dim() > 1]
        others = [(n, p) for n, p in named.items() if p.dim() == 1]
        return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.03}]

    mine = sharded(groups(model), torch.optim.AdamW, lr=0.01)
    theirs = torch.optim.AdamW(groups(plain), lr=0.01)
    assert isinstance(mine, torch.optim.Optimizer)
    schedules = {
        id(one): [
            torch.optim.lr_scheduler.LambdaLR(one, [lambda s: 0.5**s, lambda s: 1.0 + s]),
            torch.optim.lr_scheduler.StepLR(one, 2, 0.1),
        ]
        for one in (mine, theirs)
    }

    def after(optimizer: Any) -> None:
        for schedule in schedules[id(optimizer)]:
            schedule.step()

    train(mine, theirs, model, plain, rank, world, after=after)
    check_equal(model, plain)
    mine.consolidate_state_dict(to=1)
    if rank == 1:
        assert mine.state_dict()["param_groups"][0]["param_names"][0] == "0.weight"
        check_state(mine.state_dict(), theirs.state_dict())


def added_parameters(rank: int, world: int) -> None:
    """Thawed and new parameters, by add_param_group; those of torch stay in their old group."""
    model, plain = network(), network()
    extra, plain_extra = nn.Linear(5, 5), nn.Linear(5, 5)
    plain_extra.load_state_dict(extra.state_dict())
    torch.manual_seed(rank)
    if rank:
        nn.init.normal_(extra.weight)  # rank 0's count here, too
    for net in (model, plain):
        net[0].requires_grad_(False)
    mine = sharded(model.parameters(), torch.optim.AdamW, lr=0.01)
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
    train(mine, theirs, model, plain, rank, world)
    for net, optimizer, more in ((model, mine, extra), (plain, theirs, plain_extra)):
        net[0].requires_grad_(True)
        optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.05})
        optimizer.add_param_group({"params": list(more.parameters())})
        net.append(more)
    values = [extra.weight.detach().clone()]
    dist.broadcast(values[0], 0)
    with torch.no_grad():
        plain_extra.weight.copy_(values[0])
        plain_extra.bias.copy_(extra.bias)
    train(mine, theirs, model, plain, rank, world, first=STEPS)
    check_equal(model, plain)
    assert [len(group["params"]) > 0 for group in mine.param_groups] == [True] * 3
    assert mine.param_groups[1]["lr"] == 0.05
    mine.consolidate_state_dict()
    if rank == 0:
        check_state(mine.state_dict(), theirs.state_dict())


class Parts(nn.Module):
    """Two layers of one size, added up in either order, or one of them alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(2))

    def forward(self, x: Tensor, *used: int) -> Tensor:
        return sum((i + 1) * self.parts[i](x) for i in used)  # type: ignore[return-value]


def several(rank: int, world: int) -> None:
    """Optimizers of parts of one model, in one group: each rank's passes touch them in an order of
    its own, or not at all; what is gone makes nobody wait."""
    model, plain = Parts(), Parts()
    gc.collect()  # what other tests have left
    gone = sharded(network().parameters(), torch.optim.SGD, lr=0.1)
    mine = [sharded(part.parameters(), torch.optim.SGD, lr=0.1) for part in model.parts]
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    del gone
    rows = (
        [(0, 1), (1, 0), (0, 1)],
        [(0, 1), (0,), (1,)],
        [(1,), (1,), (1,)],
        [(0,), (0, 1), (1, 0)],
    )
    for step, used in enumerate(rows):
        inputs, targets = batch(step, world)
        theirs.zero_grad()
        for optimizer in mine:
            optimizer.zero_grad()
        x, y = share((inputs, targets), rank)
        nn.functional.mse_loss(model(x, *used[rank]), y).backward()
        for other in range(world):
            x, y = share((inputs, targets), other)
            (nn.functional.mse_loss(plain(x, *used[other]), y) / world).backward()
        for optimizer in mine:
            optimizer.step()
        theirs.step()
    check_equal(model, plain)
    order = mine[0]._reducer._order
    assert [one() for one in order._reducers] == [each._reducer for each in mine]


def tiny(rank: int, world: int) -> None:
    """Fewer elements than chunks: the last rank owns padding alone, and a scaler copes."""
    weight, plain = (nn.Parameter(torch.full((3,), 2.0)) for _ in range(2))
    mine = sharded([weight], torch.optim.SGD, lr=0.1)
    theirs = torch.optim.SGD([plain], lr=0.1)
    assert rank == 0 or not mine._store.owned
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        mine.zero_grad()
        theirs.zero_grad()
        bad = step == 1 and rank == 0
        scaler.scale(weight.square().sum() * (float("nan") if bad else 1.0)).backward()
        scaler.step(mine)
        scaler.update()
        assert scaler.get_scale() == (4.0 if step else 8.0)
        if step != 1:
            plain.square().sum().backward()
            theirs.step()
    torch.testing.assert_close(weight, plain)
    assert len(mine.param_groups[0]["params"]) == len(mine._store.owned) + 1


def replaced(rank: int, world: int) -> None:
    """A new optimizer of the same parameters takes them over from one that is still there."""
    model, plain = network(), network()
    gc.collect()  # what other tests have left would send at the end of a pass, too
    old = sharded(model.parameters(), torch.optim.SGD, lr=0.1)
    mine = sharded(model.parameters(), torch.optim.AdamW, lr=0.01)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    before = lossycoll.stats().calls
    train(mine, theirs, model, plain, rank, world)
    calls = STEPS * (2 * len(mine._store.shards) + 1)
    assert lossycoll.stats().calls - before == calls
    check_equal(model, plain)
    with pytest.raises(lossycoll.TrainingError, match="was given other memory"):
        old.step()
    # One that nobody has any more sends nothing.
    del mine, old
    before = lossycoll.stats().calls
    loss_of(model, share(batch(0, world), rank)).backward()
    assert lossycoll.stats().calls == before


def nothing_to_train(rank: int, world: int) -> None:
    fixed = nn.Parameter(torch.ones(3), requires_grad=False)
    mine = sharded([fixed], torch.optim.AdamW, lr=0.1)
    mine.zero_grad()
    assert mine.clip_grad_norm_(1.0) == 0
    mine.step()
    assert mine.ages() == ()
    with pytest.raises(lossycoll.OptionError, match="norm_type is 0"):
        mine.clip_grad_norm_(1.0, 0)


@pytest.mark.parametrize(
    "script",
    [
        groups,
        groups_and_schedulers,
        added_parameters,
        several,
        tiny,
        replaced,
        nothing_to_train,
    ],
)
def test_an_optimizer_trains_as_one_process_does(script: Any) -> None:
    train_as_one_process(script)
