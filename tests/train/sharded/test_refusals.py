"""What ShardedOptimizer refuses, at once and with the remedy; links and ranks that are lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

import lossycoll
from tests.support import harness
from tests.support.harness import Ranks
from tests.support.sharded_cases import (
    batch,
    check_equal,
    flat,
    loss_of,
    network,
    replicas,
    sharded,
    share,
)

WORLD = 3
LIVENESS = 5.0
ENV = {
    "LOSSYCOLL_LOG": "off",
    "LOSSYCOLL_LIVENESS": str(LIVENESS),
    "LOSSYCOLL_ON_PEER_LOSS": "continue",
}


def step(model: nn.Module, optimizer: Any, rank: int, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    (loss_of(model, share(batch(0, WORLD), rank)) * factor).backward()
    optimizer.step()


def refuses(kind: type[BaseException], pattern: str, call: Callable[[], Any]) -> BaseException:
    with pytest.raises(kind, match=pattern) as caught:
        call()
    return caught.value


# ---- when it is made ----


def arguments(rank: int) -> None:
    some = list(network().parameters())
    sgd = torch.optim.SGD
    for bad in (-1, 1.5, True, "3"):
        refuses(lossycoll.OptionError, "max_age is", lambda b=bad: sharded(some, sgd, max_age=b))
    refuses(ValueError, "bucket_bytes is 0, wanted", lambda: sharded(some, sgd, bucket_bytes=0))
    refuses(ValueError, "error_feedback is 'no'", lambda: sharded(some, sgd, error_feedback="no"))
    refuses(ValueError, "'raise' or 'skip'", lambda: sharded(some, sgd, on_nonfinite="ignore"))
    refuses(ValueError, "empty parameter list", lambda: sharded([], sgd))
    refuses(ValueError, "Invalid learning rate", lambda: sharded(some, sgd, lr=-1))
    for other in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon):
        text = f"rank {rank}/3: {other.__name__} is not element-wise"
        refuses(lossycoll.UnsupportedError, text, lambda o=other: sharded(some, o, lr=0.1))
    for model in (network(), nn.DataParallel(network())):
        refuses(TypeError, r"wanted its parameters\(\)", lambda m=model: sharded(m, sgd))
    refuses(TypeError, "element-wise", lambda: sharded(some, torch.optim.SparseAdam))


def parameters(rank: int) -> None:
    refused = lossycoll.UnsupportedError

    def one(parameter: Any) -> Callable[[], Any]:
        return lambda: sharded([parameter], torch.optim.SGD, lr=0.1)

    refuses(refused, "lazy|isn't initialised", one(UninitializedParameter()))
    refuses(
        refused, "complex64, wanted dense", one(nn.Parameter(torch.zeros(3, dtype=torch.cfloat)))
    )
    refuses(
        refused, "on meta, but backend 'lossy'", one(nn.Parameter(torch.zeros(3, device="meta")))
    )
    whole = torch.zeros(10)
    pair = [("a", nn.Parameter(whole[:6])), ("b", nn.Parameter(whole[5:]))]
    text = "'a' .* and 'b' .* share memory but are two parameters"
    refuses(refused, text, lambda: sharded(pair, torch.optim.SGD, lr=0.1))
    frozen = [nn.Parameter(whole[5:], requires_grad=False), nn.Parameter(whole[:6])]
    text = "parameter 1 of group 0 and a frozen one of shape .5,. share memory"
    refuses(refused, text, lambda: sharded(frozen, torch.optim.SGD, lr=0.1))
    # Nothing was moved by what was refused.
    assert pair[0][1].data_ptr() == whole.data_ptr()


def disagreement(rank: int) -> None:
    """Ranks that mean something else all say so."""
    for model, options, text in (
        (network(9 + (rank == 2)), {}, r"shape \(1?[90], 13\).*shape \(1?[90], 13\)"),
        (network(9), {"max_age": 2 + (rank == 1)}, r"max_age = [23] here, max_age = [23] on rank"),
        (network(9), {"lr": 0.1 + (rank == 1)}, r"group 0 = .*'lr': [01].1.* here, group 0 = "),
    ):
        error = refuses(
            lossycoll.MismatchError,
            text,
            lambda m=model, o=options: sharded(m.parameters(), torch.optim.SGD, **{"lr": 0.1, **o}),
        )
        assert isinstance(error, lossycoll.MismatchError)
        assert error.peer != rank


# ---- what scripts do wrong ----


def changed_gradients(rank: int) -> None:
    model = network()
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1)
    changes: list[Callable[[], Any]] = [
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda: model[0].weight.grad.mul_(2),  # type: ignore[union-attr]
        lambda: setattr(model[0].weight, "grad", torch.zeros(37, 13)),
        lambda: setattr(model[2].bias, "grad", None),
    ]
    for change in changes:
        before = flat(model.parameters())
        mine.zero_grad()
        loss_of(model, share(batch(0, WORLD), rank)).backward()
        change()
        refuses(lossycoll.TrainingError, r"optimizer.clip_grad_norm_\(max_norm\)", mine.step)
        assert torch.equal(flat(model.parameters()), before)
    # Of the mean's segments anything may be changed.
    mine.zero_grad()
    loss_of(model, share(batch(0, WORLD), rank)).backward()
    nn.utils.clip_grad_value_([p for g in mine.param_groups for p in g["params"]], 0.0)
    mine.step()
    assert torch.equal(flat(model.parameters()), before)


def late_hooks(rank: int) -> None:
    """What hooks change that are registered after the optimizer's isn't sent."""
    model = network()
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1)

    def shrink(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.1)

    model[2].weight.register_post_accumulate_grad_hook(shrink)
    text = "was changed .*hooks that are registered before"
    refuses(lossycoll.TrainingError, text, lambda: step(model, mine, rank))


def late_parameters(rank: int) -> None:
    """One that is added with a gradient, which hasn't been sent."""
    model = network()
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1)
    extra = nn.Parameter(torch.ones(7))
    (loss_of(model, share(batch(0, WORLD), rank)) + extra.sum()).backward()
    mine.add_param_group({"params": extra})
    refuses(lossycoll.TrainingError, "0 of group 1 was changed .*parameters were added", mine.step)
    mine.reduce_gradients()
    mine.step()
    assert torch.allclose(extra, torch.full((7,), 0.9))


def early_scalers(rank: int) -> None:
    """One that unscales what hasn't been reduced; then nothing is, until zero_grad()."""
    model = network()
    before = flat(model.parameters())
    remedy = r"optimizer.reduce_gradients\(\) .*before scaler.unscale_"
    for unscale, mixed in ((True, False), (False, False), (True, True)):
        mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        loss = scaler.scale(loss_of(model, share(batch(0, WORLD), rank)))
        if mixed:
            loss.backward(retain_graph=True)
        with mine.no_sync():
            loss.backward()
        if unscale:
            scaler.unscale_(mine)
        first = r"optimizer.reduce_gradients\(\)"
        refuses(lossycoll.TrainingError, first, partial(scaler.step, mine))
        for call in (mine.reduce_gradients, mine.step, partial(mine.clip_grad_norm_, 1.0)):
            refuses(lossycoll.TrainingError, remedy, call)
        mine.zero_grad()
        mine.step()
        assert torch.equal(flat(model.parameters()), before)


def moved_parameters(rank: int) -> None:
    def give(model: Any) -> None:
        model[0].weight.data = model[0].weight.data.clone()

    changes: list[Callable[[Any], Any]] = [
        give,
        lambda model: model.double(),
    ]
    for change in changes:
        model = network()
        mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1)
        change(model)
        for parameter in model.parameters():
            parameter.grad = None
        refuses(lossycoll.TrainingError, "was given other memory after", mine.step)


def thawed_parameters(rank: int) -> None:
    model = network()
    model[0].requires_grad_(False)
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1)
    model[0].requires_grad_(True)
    loss_of(model, share(batch(0, WORLD), rank)).backward()
    refuses(lossycoll.TrainingError, "frozen .*add_param_group", mine.step)
    refuses(
        ValueError, "more than one", lambda: mine.add_param_group({"params": [model[2].weight]})
    )


def sparse_gradients(rank: int) -> None:
    table = nn.Embedding(10, 4, sparse=True)
    model = network()
    mine = sharded([*table.parameters(), *model.parameters()], torch.optim.SGD, lr=0.1)
    refuses(
        lossycoll.UnsupportedError,
        "parameter 0 of group 0 is torch.sparse_coo.*sparse=False",
        lambda: table(torch.tensor([rank])).sum().backward(),
    )
    # A backward pass that raised leaves nothing behind: the ranks still agree.
    step(model, mine, rank)
    rows = replicas(model)
    assert bool((rows == rows[0]).all())
    assert bool((rows[0] != flat(network().parameters())).any())


def errors_within_a_pass(rank: int) -> None:
    """One that all ranks raise; the next pass begins anew, with or without zero_grad()."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ZeroDivisionError("on purpose")

    for clear in (True, False):
        model, plain = network(), network()
        mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1)
        hidden = Raises.apply(model[:4](batch(0, 1)[0]))
        refuses(ZeroDivisionError, "purpose", model[4](hidden).sum().backward)
        if clear:
            mine.zero_grad()
        else:
            model.zero_grad()
        loss_of(model, share(batch(1, WORLD), rank)).backward()
        mine.step()
        loss_of(plain, batch(1, WORLD)).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        check_equal(model, plain)


def not_numbers(rank: int) -> None:
    model = network()
    mine = sharded(model.parameters(), torch.optim.AdamW, lr=0.1)
    before = flat(model.parameters())
    for bad in ("nan", "inf"):
        factor = float(bad) if rank == 1 else 1.0
        error = refuses(
            ArithmeticError,
            rf"rank {rank}/3: the gradient of rank 1 \(127.0.0.1:\d+\) holds NaN.*on_nonfinite",
            lambda f=factor: step(model, mine, rank, f),
        )
        assert isinstance(error, lossycoll.NonFiniteError)
        assert (error.ranks, error.peer) == ((1,), 1)
    assert torch.equal(flat(model.parameters()), before)
    assert not mine.state or all(not state for state in mine.state.values())
    step(model, mine, rank)  # and it goes on
    rows = replicas(model)
    assert bool((rows == rows[0]).all())
    assert not torch.equal(flat(model.parameters()), before)


# ---- a link over which nothing comes, a rank that dies ----


def dead_link(rank: int) -> float:
    """From some step on nothing gets through: at age max_age + 1 every rank says so."""
    lost = dist.new_group(pg_options=lossycoll.Options(inject="loss=1", deadline_max=1.5))
    model = network()
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1, max_age=2)
    step(model, mine, rank)
    assert mine.stats().stale == 0
    mine._collectives.lossy = lost  # from here on
    for age in (1, 2):
        with lossycoll.lossy():
            step(model, mine, rank)
        assert mine.ages() == (*[0] * age, mine.stats().blocks // mine.stats().steps)
    begin = time.monotonic()
    error = refuses(
        lossycoll.LinkError,
        rf"rank {rank}/3: parameters of rank [012] \(127.0.0.1:\d+\) are 3 steps old, wanted at "
        rf"most 2 \(max_age\).*link is dead.*checkpoint",
        lambda: step(model, mine, rank),
    )
    assert isinstance(error, ConnectionError)
    assert isinstance(error, lossycoll.LinkError)
    assert error.peer in {0, 1, 2} - {rank}
    assert lossycoll.stats(lost).packets_injected > 0
    return time.monotonic() - begin


def dead_rank(rank: int) -> str:
    model = network()
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1)
    step(model, mine, rank)
    harness.die(1)

    def until_reported() -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            step(model, mine, rank)

    error = refuses(lossycoll.PeerLostError, "", until_reported)
    assert isinstance(error, lossycoll.PeerLostError)
    return f"{error.peer}: {error}"


CASES = (
    arguments,
    parameters,
    disagreement,
    changed_gradients,
    late_hooks,
    late_parameters,
    early_scalers,
    moved_parameters,
    thawed_parameters,
    sparse_gradients,
    errors_within_a_pass,
    not_numbers,
    dead_link,
)


def hostile(rank: int, world: int) -> str:
    harness.init()
    for case in CASES:
        try:
            case(rank)
        except BaseException as error:
            error.args = (f"{case.__name__}: {error}",)
            raise
    return dead_rank(rank)


def test_hostile_cases() -> None:
    with Ranks(hostile, WORLD, ENV) as ranks:
        outcomes = ranks.collect(200)
    assert outcomes[1].code == -signal.SIGKILL, "\n".join(map(str, outcomes))
    for outcome in (outcomes[0], outcomes[2]):
        assert not outcome.error, outcome
        text = str(outcome.value)
        assert text.startswith(f"1: rank {outcome.rank}/3"), text
        assert "rank 1 (127.0.0.1:" in text, text
        assert "checkpoint" in text, text
