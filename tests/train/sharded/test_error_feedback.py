"""Error feedback beyond one run at one scale: no gradient is lost where a GradScaler changes its
scale, nor in a checkpoint, at whatever number of ranks it is loaded."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lossycoll
from tests.support import harness
from tests.support.harness import run_good
from tests.support.sharded_cases import sharded

WORLD = 4
SIZES = (4000, 1000)
ENV = {
    "LOSSYCOLL_LOG": "warning",
    "LOSSYCOLL_LIVENESS": "30",
    "LOSSYCOLL_MTU": "576",  # many blocks
    "LOSSYCOLL_INJECT": "loss=0.3,seed=11",
}


def made(group: Any = None, **rest: Any) -> tuple[list[nn.Parameter], Any]:
    """SGD at a learning rate of 1: weights say what all gradients were, added up."""
    weights = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    rest = {"error_feedback": True, **rest}
    return weights, sharded(weights, torch.optim.SGD, group, lr=1.0, bucket_bytes=8000, **rest)


def pull(weights: list[nn.Parameter], seed: int) -> tuple[Tensor, list[Tensor]]:
    """A loss, and the gradients that it has."""
    draw = torch.Generator().manual_seed(seed)
    parts = [torch.randn(w.shape, generator=draw) for w in weights]
    products = [(w * part).sum() for w, part in zip(weights, parts, strict=True)]
    return torch.stack(products).sum(), parts


def kept(optimizer: Any) -> list[Tensor]:
    """What this rank still has to send, by parameter."""
    out = [torch.zeros(size) for size in SIZES]
    for shard, flat in zip(optimizer._store.shards, optimizer._reducer.residuals(), strict=True):
        for member in shard.bucket.members:
            out[member.index] += flat[member.begin : member.end]
    return out


def means(values: list[Tensor], group: Any) -> list[Tensor]:
    out = [value.clone() for value in values]
    with lossycoll.reliable():
        for value in out:
            dist.all_reduce(value, group=group)
    return [value / dist.get_world_size(group) for value in out]


def scaled(rank: int) -> dict[str, Any]:
    """Scales double after three steps, and halve where a rank's gradient isn't finite."""
    weights, mine = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    given = [torch.zeros(size) for size in SIZES]
    scales, norms = [], []
    for step in range(14):
        mine.zero_grad()
        loss, parts = pull(weights, 100 * step + rank)
        bad = step in (5, 6) and rank == 1
        scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
        if step % 2:
            scaler.unscale_(mine)
            norms.append(float(mine.clip_grad_norm_(1e9)))
        scales.append(scaler.get_scale())
        scaler.step(mine)
        scaler.update()
        if step not in (5, 6):
            for have, part in zip(given, parts, strict=True):
                have.add_(part)
    assert sorted(set(scales)) == [512.0, 1024.0, 2048.0], scales
    assert mine.residual_norm() > 0
    mine.synchronize_parameters()
    remaining = means([have - left for have, left in zip(given, kept(mine), strict=True)], None)
    for weight, wanted in zip(weights, remaining, strict=True):
        torch.testing.assert_close(weight.data, -wanted, rtol=1e-4, atol=1e-4)
    assert len(mine.param_groups[0]["params"]) == len(mine._store.owned) + 1
    finite = [norm for norm in norms if norm < float("inf")]
    # The mean of four gradients, and a share of what is late; nothing of a scale.
    assert all(0.4 < norm / sum(SIZES) ** 0.5 < 0.8 for norm in finite), norms
    return restored(rank, weights, mine)


def restored(rank: int, weights: list[nn.Parameter], mine: Any) -> dict[str, Any]:
    """At another number of ranks, the sum of all residuals stays, and is sent."""
    before = means(kept(mine), None)
    mine.consolidate_state_dict(to=1)
    received = [copy.deepcopy(mine.state_dict()) if rank == 1 else None]
    with lossycoll.reliable():
        dist.broadcast_object_list(received, 1)
    book: Any = received[0]
    for index, wanted in enumerate(before):
        torch.testing.assert_close(book["error_feedback"][index], wanted)
    torch.optim.SGD(weights, lr=1.0).load_state_dict(copy.deepcopy(book))

    single = [dist.new_group([r]) for r in range(WORLD)][rank]
    for group in (dist.group.WORLD, dist.new_group([1, 2, 3]), single):
        if dist.get_rank(group) >= 0:
            go_on(rank, book, group)
    return {"residual": float(torch.cat(before).norm()), **refused(book)}


def go_on(rank: int, book: Any, group: Any) -> None:
    weights, mine = made(group)
    mine.load_state_dict(copy.deepcopy(book))
    remaining = [book["error_feedback"][index] for index in range(len(SIZES))]
    for have, wanted in zip(means(kept(mine), group), remaining, strict=True):
        torch.testing.assert_close(have, wanted, rtol=1e-5, atol=1e-6)
    given = [torch.zeros(size) for size in SIZES]
    for step in range(4):
        mine.zero_grad()
        loss, parts = pull(weights, 1000 * step + rank)
        loss.backward()  # type: ignore[no-untyped-call]
        mine.step()
        for have, part in zip(given, parts, strict=True):
            have.add_(part)
    mine.synchronize_parameters()
    left = kept(mine)
    sent = means([have - part for have, part in zip(given, left, strict=True)], group)
    for weight, part, late in zip(weights, sent, remaining, strict=True):
        torch.testing.assert_close(weight.data, -(part + late), rtol=1e-4, atol=1e-4)


def refused(book: Any) -> dict[str, Any]:
    """Where it doesn't fit, or nobody would send it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lossycoll")
    logger.addHandler(handler)
    made(error_feedback=False)[1].load_state_dict(copy.deepcopy(book))
    logger.removeHandler(handler)
    _, mine = made()
    other, stray = copy.deepcopy(book), copy.deepcopy(book)
    other["error_feedback"][1] = torch.zeros(7)
    with pytest.raises(lossycoll.CheckpointError, match=r"error_feedback of .*\(7,\).*\(1000,\)"):
        mine.load_state_dict(other)
    stray["error_feedback"][9] = torch.zeros(7)
    with pytest.raises(lossycoll.CheckpointError, match=r"error_feedback of parameters \[9\]"):
        mine.load_state_dict(stray)
    assert mine.residual_norm() == 0
    return {"lines": [line for line in lines if "error_feedback=True" in line]}


def residuals(rank: int, world: int) -> dict[str, Any]:
    harness.init()
    out = scaled(rank)
    out["injected"] = lossycoll.stats().packets_injected
    dist.destroy_process_group()
    return out


def test_nothing_is_lost_when_the_scale_changes_or_in_a_checkpoint() -> None:
    for rank, value in enumerate(run_good(residuals, WORLD, ENV)):
        assert value["residual"] > 1, "no residual"
        assert value["injected"] > 100
        assert len(value["lines"]) == 1
        assert value["lines"][0].startswith(f"rank {rank}/{WORLD}: the checkpoint has gradients")
