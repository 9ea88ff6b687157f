"""ShardedOptimizer's step with accumulation, clipping, scalers and closures.

Nothing is lost: each step is that of one process that has all data.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.sharded_cases import (
    batch,
    check_equal,
    loss_of,
    network,
    sharded,
    share,
)
from tests.support.sharded_scripts import STEPS, train, train_as_one_process


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
    assert mine.stats().steps == STEPS - 1
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


def overlap(rank: int, world: int) -> None:
    """Buckets leave while the backward pass still computes, in the same order on all ranks."""
    model = network()
    gc.collect()  # with other optimizers around, buckets leave at the end
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1)
    sent: list[tuple[int, int]] = []
    average = mine._collectives.reduce_scatter_mean

    def noting(output: Tensor, source: Tensor, *counts: Any) -> Any:
        missing = sum(len(bucket.missing) for bucket in mine._reducer._buckets)
        sent.append((len(source), 6 - missing))
        return average(output, source, *counts)

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


@pytest.mark.parametrize(
    "script",
    [
        accumulation_and_clipping,
        closures_and_repeated_steps,
        scaled,
        scaled_accumulation,
        overlap,
        old_graphs,
    ],
)
def test_a_step_is_that_of_one_process(script: Any) -> None:
    train_as_one_process(script)
