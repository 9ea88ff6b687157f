"""ShardedOptimizer where nothing is lost: each step is that of one process that has all data."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lossycoll
from tests.support import harness
from tests.support.harness import run_good
from tests.support.sharded_cases import (
    CLASSES,
    FEATURES,
    batch,
    check_equal,
    check_state,
    flat,
    loss_of,
    network,
    replicas,
    sharded,
    share,
)

STEPS = 4
ENV = {"LOSSYCOLL_LOG": "warning", "LOSSYCOLL_LIVENESS": "30"}

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
            mine.zero_grad()
            theirs.zero_grad()
            loss_of(model, share(data, rank)).backward()
            loss_of(plain, data).backward()
            mine.step()
            theirs.step()
        check_equal(model, plain, optimizer.__name__)
        to = number % world
        mine.consolidate_state_dict(to=to)
        if rank == to:
            check_state(mine.state_dict(), theirs.state_dict())
        rows = replicas(model, group)
        assert bool((rows == rows[0]).all())
        figures = mine.figures()
        assert (figures.steps, figures.skipped, figures.stale) == (STEPS, 0, 0)
        assert (figures.blocks > 0) is (world > 1)
        assert mine.ages() == ((figures.blocks // STEPS,) if world > 1 else ())


def groups(rank: int, world: int) -> None:
    """All optimizers in a lossy group; some in one of gloo, of two ranks, and of a single one."""
    optimizers(dist.group.WORLD, slice(None))
    optimizers(dist.new_group(backend="gloo"), slice(0, 2))
    pairs = [dist.new_group([0, 2]), dist.new_group([1])]
    optimizers(pairs[rank % 2], slice(2, 4))


# ---- what training scripts do ----


def train(
    mine: Any, theirs: Any, model: nn.Module, plain: nn.Module, rank: int, world: int, **rest: Any
) -> None:
    """STEPS steps of both, ``each`` called between backward and step with either optimizer."""
    each, after = rest.get("each"), rest.get("after")
    for step in range(rest.get("first", 0), rest.get("first", 0) + STEPS):
        data = batch(step, world)
        for optimizer, network_, own in ((mine, model, share(data, rank)), (theirs, plain, data)):
            optimizer.zero_grad()
            loss_of(network_, own).backward()
            if each:
                each(optimizer, network_)
            optimizer.step()
            if after:
                after(optimizer)


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


class Images(nn.Module):
    """channels_last weights, a tied one, a frozen one, one of no dimension, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.fixed = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((2, 3)) * self.scale + self.empty.sum()
        return self.fixed(self.second(torch.tanh(self.first(x))))


def odd_parameters(rank: int, world: int) -> None:
    model, plain = Images(), Images()
    before = model.fixed.weight.clone()
    mine = sharded(model.parameters(), torch.optim.Adam, lr=0.01)
    theirs = torch.optim.Adam(plain.parameters(), lr=0.01)
    assert model.conv.weight.stride() == plain.conv.weight.stride()
    assert model.first.weight is model.second.weight
    for step in range(STEPS):
        draws = torch.Generator().manual_seed(step)
        images = torch.randn(2 * world, 3, 8, 8, generator=draws)
        mine.zero_grad()
        theirs.zero_grad()
        model(images[2 * rank : 2 * rank + 2]).square().mean().backward()
        plain(images).square().mean().backward()
        mine.step()
        theirs.step()
    check_equal(model, plain)
    assert torch.equal(model.fixed.weight, before)
    mine.consolidate_state_dict()
    if rank == 0:
        whole, wanted = mine.state_dict(), theirs.state_dict()
        number = [name for name, _ in plain.named_parameters()].index("empty")
        del wanted["state"][number]  # without elements there is no state to keep
        check_state(whole, wanted)
        assert whole["state"][2]["exp_avg"].stride() == plain.conv.weight.stride()
        assert len(whole["param_groups"][0]["params"]) == len(list(plain.parameters()))


def accumulation_and_clipping(rank: int, world: int) -> None:
    for norm_type in (2.0, "inf", 1.0):
        for quiet in (True, False):
            model, plain = network(), network()
            mine = sharded(model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9)
            theirs = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
            for step in range(2):
                mine.zero_grad()
                theirs.zero_grad()
                for part in range(3):
                    data = batch(10 * step + part, world)
                    with ExitStack() as stack:
                        if quiet and part < 2:
                            stack.enter_context(mine.no_sync())
                        loss_of(model, share(data, rank)).backward()
                    loss_of(plain, data).backward()
                norm = mine.clip_grad_norm_(0.1, norm_type)
                wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
                assert wanted > 0.1  # or nothing is clipped
                torch.testing.assert_close(norm.float(), wanted)
                norms = [None] * world
                dist.all_gather_object(norms, norm.item())
                assert len(set(norms)) == 1, norms
                mine.step()
                theirs.step()
            check_equal(model, plain, f"norm {norm_type}, no_sync {quiet}")
    # Only accumulated, never sent by a backward pass: step() sends it.
    mine.zero_grad()
    theirs.zero_grad()
    with mine.no_sync():
        loss_of(model, share(data, rank)).backward()
    loss_of(plain, data).backward()
    mine.step()
    theirs.step()
    check_equal(model, plain)


def closures_and_repeated_steps(rank: int, world: int) -> None:
    model, plain = network(), network()
    mine = sharded(model.parameters(), torch.optim.RMSprop, lr=0.01)
    theirs = torch.optim.RMSprop(plain.parameters(), lr=0.01)
    for step in range(STEPS):
        data = batch(step, world)

        def closure(net: nn.Module, optimizer: Any, own: Any) -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = loss_of(net, own)
            loss.backward()
            return loss

        own = share(data, rank)
        value = mine.step(lambda own=own: closure(model, mine, own))
        assert value == loss_of(network(), own) or step
        theirs.step(lambda data=data: closure(plain, theirs, data))
        mine.step()  # once more with the same gradients
        theirs.step()
    check_equal(model, plain)


def unused_parameters(rank: int, world: int) -> None:
    """What no rank used isn't touched; what one used is, with zeros of the others."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.branches = nn.ModuleList(nn.Linear(13, 5) for _ in range(world + 2))

        def forward(self, x: Tensor, *used: int) -> Tensor:
            return sum(self.branches[i](x) for i in used)  # type: ignore[return-value]

    model, plain = Branches(), Branches()
    options = {"lr": 0.01, "weight_decay": 0.5}
    mine = sharded(model.parameters(), torch.optim.AdamW, bucket_bytes=100, **options)
    theirs = torch.optim.AdamW(plain.parameters(), **options)
    for step in range(STEPS):
        inputs, _ = batch(step, world)
        mine.zero_grad()
        theirs.zero_grad()
        used = (rank, world) if step else (world,)
        model(share((inputs, inputs), rank)[0], *used).square().mean().backward()
        for other in range(world):
            used = (other, world) if step else (world,)
            own = share((inputs, inputs), other)[0]
            (plain(own, *used).square().mean() / world).backward()
        mine.step()
        theirs.step()
    check_equal(model, plain)
    assert mine.figures().steps == STEPS
    mine.consolidate_state_dict()
    if rank == 0:
        check_state(mine.state_dict(), theirs.state_dict())
        assert 2 * (world + 1) not in mine.state_dict()["state"]
    # One rank whose loss has nothing to do with the model still takes part.
    mine.zero_grad()
    if rank:
        model(inputs, world).square().mean().backward()
    mine.step()
    assert bool((replicas(model) == replicas(model)[0]).all())


def half_precision(rank: int, world: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        half_precision_of(dtype, rank, world)


def half_precision_of(dtype: torch.dtype, rank: int, world: int) -> None:
    model, plain = network().to(dtype), network().to(dtype)
    model[4].float()
    plain[4].float()

    def forward(net: Any, data: Any) -> Tensor:
        hidden = net[:4](data[0].to(dtype))
        return nn.functional.mse_loss(net[4](hidden.float()), data[1])

    # What tells error feedback of a scale doesn't fit float16, which no GradScaler takes.
    mine = sharded(
        model.parameters(), torch.optim.SGD, lr=2.0, error_feedback=dtype == torch.float16
    )
    theirs = torch.optim.SGD(plain.parameters(), lr=2.0)
    for step in range(STEPS):
        data = batch(step, world)
        mine.zero_grad()
        theirs.zero_grad()
        forward(model, share(data, rank)).backward()
        forward(plain, data).backward()
        mine.step()
        theirs.step()
    assert model[0].weight.dtype == dtype
    check_equal(model, plain, rtol=0.02, atol=0.01)
    moved = flat(p.float() for p in model.parameters()) - flat(network().parameters())
    assert moved.abs().max() > 0.05


def compiled(rank: int, world: int) -> None:
    model, plain = network(), network()
    fast = torch.compile(model, backend="aot_eager")
    mine = sharded(fast.parameters(), torch.optim.AdamW, lr=0.01)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(mine, theirs, fast, plain, rank, world)
    check_equal(model, plain)


def checkpointed(rank: int, world: int) -> None:
    """Reentrant checkpoints run a backward pass within another; each is a part of one whole."""

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Sequential, whole: bool) -> None:
            super().__init__()
            self.inner, self.whole = inner, whole

        def forward(self, x: Tensor) -> Any:
            x = x.clone().requires_grad_()
            x = checkpoint(self.inner[:2], x, use_reentrant=True)
            if self.whole:
                return checkpoint(self.inner[2:], x, use_reentrant=True)
            return self.inner[4](checkpoint(self.inner[2:4], x, use_reentrant=True))

    for whole in (True, False):
        model, plain = network(), network()
        mine = sharded(model.parameters(), torch.optim.AdamW, lr=0.01)
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
        train(mine, theirs, Checkpointed(model, whole), plain, rank, world)
        check_equal(model, plain, f"whole {whole}")


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


def scaled(rank: int, world: int) -> None:
    """GradScaler and autocast: finite steps are plain ones, and after an overflow at one rank all
    ranks skip the step and lower the scale alike, also those without any gradient."""
    model, plain = network(4), network(4)
    # So large a bucket is one chunk; the last ranks own nothing but padding.
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.05, bucket_bytes=1 << 20)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05)
    scalers = {id(one): torch.amp.GradScaler("cpu", init_scale=1024.0) for one in (mine, theirs)}
    scales = []
    for step in range(STEPS):
        data = batch(step, world)
        for optimizer, net, own in ((mine, model, share(data, rank)), (theirs, plain, data)):
            scaler = scalers[id(optimizer)]
            optimizer.zero_grad()
            half = torch.float16 if step == 3 else torch.bfloat16
            with torch.autocast("cpu", half, enabled=step > 1):
                loss = loss_of(net, own).float()
            if step == 2 and (optimizer is theirs or rank == 1):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                if optimizer is mine:
                    mine.clip_grad_norm_(0.3)
                else:
                    nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scalers[id(mine)].get_scale())
        assert scales[-1] == scalers[id(theirs)].get_scale()
    assert scales == [1024.0, 1024.0, 512.0, 512.0]
    check_equal(model, plain, rtol=0.01, atol=1e-3)
    assert mine.figures().steps == STEPS - 1
    mine.consolidate_state_dict()
    received: list[Any] = [None] * world
    dist.all_gather_object(received, scales)
    assert all(entry == scales for entry in received)


def scaled_accumulation(rank: int, world: int) -> None:
    """Nothing is left of a step for a scaler to find; what it has unscaled stays, whatever is added
    before the step."""
    model, plain = network(), network()
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.05)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05)
    extra, plain_extra = (nn.Parameter(torch.ones(7)) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        data = batch(step, world)
        model.zero_grad()
        theirs.zero_grad()
        with mine.no_sync():
            loss = loss_of(model, share(data, rank)) + (extra.sum() if step == 2 else 0)
            scaler.scale(loss).backward()
        (loss_of(plain, data) + (plain_extra.sum() if step == 2 else 0)).backward()
        mine.reduce_gradients()
        if step == 1:
            scaler.unscale_(mine)
            mine.clip_grad_norm_(0.1)
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            mine.add_param_group({"params": extra})
            theirs.add_param_group({"params": plain_extra})
        scaler.step(mine)
        scaler.update()
        theirs.step()
        assert all(each.parameter.grad is None for each in mine._store.owned)
    check_equal(model, plain)
    torch.testing.assert_close(extra, plain_extra)


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


def overlap(rank: int, world: int) -> None:
    """Buckets leave while the backward pass still computes, in the same order on all ranks."""
    model = network()
    gc.collect()  # with other optimizers around, buckets leave at the end
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1)
    sent: list[tuple[int, int]] = []
    average = mine._collectives.reduce_scatter_mean

    def noting(output: Tensor, source: Tensor) -> Any:
        sent.append((len(source), len(mine._reducer._seen)))
        return average(output, source)

    mine._collectives.reduce_scatter_mean = noting  # type: ignore[method-assign]
    loss_of(model, share(batch(0, world), rank)).backward()
    sizes = [shard.bucket.size for shard in mine._store.shards]
    assert [size for size, _ in sent] == sizes
    assert len(sizes) > 2
    gradients = [seen for _, seen in sent]
    assert 0 < gradients[0] < gradients[1] < gradients[-1] == 6, gradients
    mine.step()


def old_graphs(rank: int, world: int) -> None:
    """A graph from before a step can't be used after it, as with any optimizer; and that error
    leaves nothing behind."""
    model, plain = network(), network()
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    loss = loss_of(model, share(batch(0, world), rank))
    loss.backward(retain_graph=True)
    mine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss_of(plain, batch(0, world)).backward()
    theirs.step()
    train(mine, theirs, model, plain, rank, world)
    check_equal(model, plain)


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


SCRIPTS = (
    groups,
    groups_and_schedulers,
    odd_parameters,
    accumulation_and_clipping,
    closures_and_repeated_steps,
    unused_parameters,
    half_precision,
    compiled,
    checkpointed,
    added_parameters,
    scaled,
    scaled_accumulation,
    several,
    tiny,
    overlap,
    old_graphs,
    replaced,
    nothing_to_train,
)


def run_script(rank: int, world: int) -> int:
    """Runs the script that the environment names; returns the packets that were lost."""
    script = globals()[os.environ["SCRIPT"]]
    harness.init()
    script(rank, world)
    dropped = lossycoll.stats().packets_missing
    dist.destroy_process_group()
    return dropped


@pytest.mark.parametrize("script", [script.__name__ for script in SCRIPTS])
def test_a_script_trains_as_one_process(script: str) -> None:
    assert run_good(run_script, 3, {**ENV, "SCRIPT": script}, timeout=200) == [0, 0, 0]
