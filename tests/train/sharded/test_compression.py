"""ShardedOptimizer with its gradients compressed by ARC-Top-K, also where packets are lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lossycoll
from tests.support import harness
from tests.support.harness import run_good
from tests.support.sharded_cases import check_equal, loss_of, network, replicas, sharded, share

WORLD = 3
ROWS, FEATURES, CLASSES = 6, 13, 5
ENV = {
    "LOSSYCOLL_LOG": "off",
    "LOSSYCOLL_LIVENESS": "30",
    "LOSSYCOLL_MTU": "576",
    "LOSSYCOLL_INJECT": "loss=0.3,seed=7",
}


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    inputs = torch.randn(WORLD * ROWS, FEATURES, generator=draw)
    targets = torch.stack([inputs[:, i].sin() + inputs[:, i + 5] for i in range(CLASSES)], 1)
    return share((inputs, targets), rank)


def compressed(**rest: Any) -> Any:
    return lossycoll.ARCTopKState(**{"start_iter": 2, "dense_below": 200, **rest})


def learn(optimizer: Any, model: Any, rank: int, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def lossy(rank: int, world: int) -> dict[str, Any]:
    harness.init()
    model = network(100)
    state = compressed(ratio=0.2, error_feedback="ef14")
    optimizer = sharded(
        model.parameters(), torch.optim.AdamW, lr=0.01, max_age=0, repair=0, compression=state
    )
    losses = learn(optimizer, model, rank, 60)
    assert state.iter == 60
    rows = replicas(model)
    assert bool((rows == rows[0]).all())
    traffic = dict(state.traffic())

    # With all rows, momentum 1 and nothing lost it is the optimizer without compression.
    pair = [network(37), network(37)]
    one = sharded(pair[0].parameters(), torch.optim.SGD, lr=0.1)
    two = sharded(pair[1].parameters(), torch.optim.SGD, lr=0.1, compression=compressed(ratio=1.0))
    with lossycoll.reliable():
        for each, net in zip((one, two), pair, strict=True):
            learn(each, net, rank, 5)
    check_equal(pair[0], pair[1], rtol=1e-5, atol=1e-6)

    # A pass that is sent twice would be remembered twice.
    loss_of(model, batch(0, rank)).backward()
    with pytest.raises(lossycoll.TrainingError, match="no_sync"):
        loss_of(model, batch(1, rank)).backward()
    optimizer.zero_grad()
    with optimizer.no_sync():
        loss_of(model, batch(0, rank)).backward()
    loss_of(model, batch(1, rank)).backward()
    optimizer.step()
    with pytest.raises(lossycoll.OptionError, match="error_feedback"):
        sharded(
            network().parameters(), torch.optim.SGD, lr=1.0, error_feedback=True,
            compression=compressed(),
        )  # fmt: skip
    with pytest.raises(lossycoll.OptionError, match="compression"):
        sharded(network().parameters(), torch.optim.SGD, lr=1.0, compression="arc")
    injected = lossycoll.stats().packets_injected
    dist.destroy_process_group()
    return {"losses": losses, "traffic": traffic, "injected": injected}


class Halves(torch.nn.Module):
    """Of which a pass may leave out one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = network(40), network(40)
        self.both = True

    def forward(self, x: Tensor) -> Tensor:
        left: Tensor = self.left(x)
        return left + self.right(x) if self.both else left


def remembered(state: Any) -> Any:
    held = state.state_dict()
    return copy.deepcopy([held["memories"], held["owed"]])


def unused(rank: int, world: int) -> None:
    """The memory of errors changes by the steps that are taken, and by nothing else."""
    del world
    harness.init()
    for rule in ("ef14", "ef21", "ef21m"):
        model = Halves()
        state = compressed(start_iter=0, error_feedback=rule)
        optimizer = sharded(
            model.parameters(), torch.optim.SGD, lr=0.1, compression=state, on_nonfinite="skip"
        )
        learn(optimizer, model, rank, 3)
        for factor in (1.0, float("inf")):
            before = remembered(state)
            (loss_of(model, batch(9, rank)) * factor).backward()
            if factor != 1.0:
                optimizer.step()  # which is skipped
            optimizer.zero_grad()
            torch.testing.assert_close(remembered(state), before, rtol=0, atol=0)

        # What no rank uses has no part in the step: its error is still to come.
        model.both = False
        loss_of(model, batch(9, rank)).backward()
        optimizer.step()
        keys = state.keys(model.parameters())
        for old, new in zip(before, remembered(state), strict=True):
            for key in keys[len(keys) // 2 :]:
                torch.testing.assert_close(new.get(key), old.get(key), rtol=0, atol=0)
        assert not equal(remembered(state), before)
        model.both = True
        learn(optimizer, model, rank, 2)
    dist.destroy_process_group()


def shared(rank: int, world: int) -> None:
    """Two optimizers use one memory: what one's step takes or refuses leaves the other's alone."""
    del world
    harness.init()
    models, state = (network(40), network(41)), compressed(start_iter=0)
    taken, refused = (
        sharded(one.parameters(), torch.optim.SGD, lr=0.1, compression=state, on_nonfinite="skip")
        for one in models
    )
    for optimizer, model in zip((taken, refused), models, strict=True):
        learn(optimizer, model, rank, 2)
    first = state.keys(models[0].parameters())

    def of_first() -> Any:
        return [{key: one.get(key) for key in first} for one in remembered(state)]

    before = of_first()
    loss_of(models[0], batch(9, rank)).backward()
    sent = of_first()
    assert not equal(sent, before)
    (loss_of(models[1], batch(9, rank)) * float("inf")).backward()
    refused.step()
    refused.zero_grad()
    torch.testing.assert_close(of_first(), sent, rtol=0, atol=0)
    taken.zero_grad()  # no step is taken with it either, and it can be undone still
    torch.testing.assert_close(of_first(), before, rtol=0, atol=0)
    dist.destroy_process_group()


def test_optimizers_that_share_a_memory_undo_their_own_steps_alone() -> None:
    run_good(shared, WORLD, ENV, timeout=150)


def equal(one: Any, other: Any) -> bool:
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    except AssertionError:
        return False
    return True


def test_gradients_that_no_step_takes_are_not_remembered() -> None:
    run_good(unused, WORLD, ENV, timeout=150)


def test_it_learns_where_packets_are_lost_and_replicas_are_equal() -> None:
    for value in run_good(lossy, WORLD, ENV, timeout=150):
        losses, traffic = value["losses"], value["traffic"]
        assert value["injected"] > 300
        assert traffic["lost"] > 100
        assert 0 < traffic["rows"] < traffic["whole"] * 10
        assert sum(losses[-10:]) < 0.5 * 10 * losses[0], losses


RELIABLE = {**ENV, "LOSSYCOLL_DELIVERY": "reliable", "LOSSYCOLL_INJECT": ""}


def refused(rank: int, world: int) -> dict[str, Any]:
    """Training by model.zero_grad(), in which rank 1 has a gradient that isn't finite once."""
    harness.init()
    found: dict[str, Any] = {}
    for on_nonfinite in ("skip", "raise", "scaler"):
        model, state = network(37), compressed()
        optimizer = sharded(
            model.parameters(), torch.optim.SGD, lr=0.1, max_age=0, compression=state,
            on_nonfinite="skip" if on_nonfinite == "skip" else "raise",
        )  # fmt: skip
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=on_nonfinite == "scaler")
        losses, told = [], []
        for step in range(8):
            model.zero_grad()
            loss = loss_of(model, batch(step % 2, rank))
            losses.append(loss.item())
            scaler.scale(loss * (float("inf") if (rank, step) == (1, 3) else 1.0)).backward()
            try:
                scaler.step(optimizer)
            except lossycoll.NonFiniteError:
                told.append(step)
            scaler.update()
        rows = replicas(model)
        assert bool((rows == rows[0]).all()), on_nonfinite
        found[on_nonfinite] = losses, told, optimizer.stats().steps, scaler.get_scale(), state.iter
    # One that could have been taken must be, or taken back by the optimizer itself.
    loss_of(model, batch(0, rank)).backward()
    model.zero_grad()
    with pytest.raises(lossycoll.TrainingError, match=r"optimizer\.zero_grad.*model\.zero_grad"):
        loss_of(model, batch(0, rank)).backward()
    optimizer.zero_grad()
    loss_of(model, batch(0, rank)).backward()
    optimizer.step()
    dist.destroy_process_group()
    return found


def test_the_next_pass_may_begin_when_a_step_was_refused() -> None:
    for found in run_good(refused, WORLD, RELIABLE):
        for how, (losses, told, steps, scale, passes) in found.items():
            assert steps == 7, how
            assert passes == 8, how
            assert losses[6] < losses[0], how  # of one batch
            assert told == ([3] if how == "raise" else []), how
            assert scale == (32.0 if how == "scaler" else 1.0), how
