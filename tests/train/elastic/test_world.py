"""ElasticWorld with real processes: killed ones come back, the others go on."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from lossycoll.errors import (
    CheckpointError,
    LossyError,
    OperationTimeout,
    OptionError,
    PeerLostError,
    RendezvousError,
)
from tests.support.harness import EXACT, Ranks, run_good, run_ranks

SEATS = 3
RATE = 0.1
BEFORE = 10
"""Steps until somebody dies."""
AFTER = 10
"""Steps after the last has come back."""


def job_store() -> Any:
    """The launcher's: it outlives the ranks."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False)


def inputs(seat: int, step: int) -> Tensor:
    """(1, 4): also the gradient of this seat in this step."""
    return torch.randn(1, 4, generator=torch.Generator().manual_seed(1000 * seat + step))


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, broadcast_buffers=False)


def victims() -> list[int]:
    return [int(seat) for seat in os.environ.get("VICTIMS", "").split(",") if seat]


def job(seat: int, seats: int) -> dict[str, Any]:
    """Trains until it has AFTER steps in a whole group after a change. Victims kill themselves
    before step BEFORE, and their second processes wait for that."""
    store = job_store()
    again = "AGAIN" in os.environ
    if again:
        store.wait([f"died/{one}" for one in victims()])
    torch.manual_seed(seat)
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    changes: list[Any] = []
    seen: list[tuple[int, Tensor, Tensor]] = []
    with lossycoll.ElasticWorld(store, seat, seats, timeout=60.0) as world:
        step = world.share(model, optimizer)
        began = step
        ddp, last = wrapped(model), step + AFTER if step else None
        while last is None or step < last:
            if step == BEFORE and seat in victims() and not again:
                store.set(f"died/{seat}", "")
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            ddp(inputs(seat, step)).sum().backward()
            optimizer.step()
            momentum = optimizer.state[model.weight]["momentum_buffer"]
            seen.append((step, model.weight.detach().clone(), momentum.clone()))
            step += 1
            change = world.boundary(step)
            if change:
                changes.append(change)
                step = world.share(model, optimizer)
                ddp = wrapped(model)
            if change and len(world.seats) == seats:
                last = step + AFTER
        return {"began": began, "changes": changes, "seen": seen}


def check(values: list[dict[str, Any]], gone: set[int]) -> None:
    """Before the death and after the change all have the weights of a training of all. (In the step
    of a death a mean may be of fewer, and replicas differ.)"""
    changes = values[0]["changes"]
    assert changes[0].lost == tuple(sorted(gone))
    assert {seat for change in changes for seat in change.came} == gone
    assert changes[-1].seats == tuple(range(SEATS))
    whole = max(value["began"] for value in values)  # whoever came last has come
    assert whole > BEFORE
    for value in values:
        for (_, weights, momentum), (step, after, _) in itertools.pairwise(value["seen"]):
            if step < BEFORE or step > whole:
                gradient = torch.stack([inputs(seat, step) for seat in range(SEATS)]).mean(0)
                wanted = weights - RATE * (0.5 * momentum + gradient)
                torch.testing.assert_close(after, wanted, rtol=1e-4, atol=1e-5)
        assert [step for step, *_ in value["seen"]][-AFTER:] == list(range(whole, whole + AFTER))
    ends = {tuple(value["seen"][-1][1].flatten().tolist()) for value in values}
    assert len(ends) == 1


@pytest.mark.parametrize("gone", [{2}, {0}, {1, 2}], ids=str)
def test_the_killed_come_back(gone: set[int]) -> None:
    order = [*range(SEATS), *sorted(gone)]
    env = {**EXACT, "VICTIMS": ",".join(map(str, gone)), "LOSSYCOLL_LIVENESS": "5"}
    per_rank = {SEATS + at: {"AGAIN": "1"} for at in range(len(gone))}
    with Ranks(job, SEATS, env, ranks=order, per_rank=per_rank) as ranks:
        survivors = [seat for seat in range(SEATS) if seat not in gone]
        outcomes = ranks.collect(90.0)
    for seat in gone:
        assert outcomes[seat].code == -signal.SIGKILL, str(outcomes[seat])
    good = [outcomes[n] for n in (*survivors, *range(SEATS, len(order)))]
    assert not [str(one) for one in good if one.error], "\n".join(map(str, good))
    check([one.value for one in good], gone)
