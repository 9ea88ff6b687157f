"""A rank dies while ShardedOptimizer or DriftBound trains."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lossycoll
from tests.support.failure_cases import QUIET, catch
from tests.support.harness import Ranks, await_ranks, die, init
from tests.support.links import over
from tests.support.sharded_cases import batch, loss_of, network, sharded, share

WORLD, VICTIM = 3, 1
LIVENESS, SLACK = 6.0, 10.0
"""Seconds: ranks that compute on a starved machine are neither lost nor reported late."""


def train(rank: int, world: int) -> dict[str, Any]:
    """What each call says once rank 1 is dead: (type, text, seconds since)."""
    import torch.distributed as dist

    init()
    model, bound_model = network(), network()
    optimizer = sharded(model.parameters(), torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(bound_model.parameters(), lr=0.1)
    group = dist.new_group()  # of its own: one group's failure is not another's
    bound = lossycoll.DriftBound(bound_model, plain, 2, group=group)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, share(batch(0, world), rank)).backward()
        optimizer.step()

    def until_reported(call: Callable[[], Any]) -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            call()

    step()
    plain.step()
    die(VICTIM)
    await_ranks("here", range(world))  # it dies now
    since = time.monotonic()
    out = {"step": catch(lambda: until_reported(step))}
    out["again"] = catch(step)
    out["consolidate"] = catch(optimizer.consolidate_state_dict)
    if os.environ["LOSSYCOLL_ON_PEER_LOSS"] == "raise":
        out["bound"] = catch(lambda: until_reported(plain.step))
    else:
        for _ in range(20):
            plain.step()
        assert bound.steps == 21
        with torch.no_grad():
            for parameter in bound_model.parameters():
                parameter.fill_(rank)
        # What the dead rank owns in one sweep another one owns in the next.
        for _ in range(2 * bound.period):
            plain.step()
        bound.finish()
        assert lossycoll.measure_drift(bound_model, group).total == 0
    return {"since": since, "caught": out}


@pytest.mark.parametrize(
    ("mode", "link"),
    [
        ("continue", "auto"),
        pytest.param("continue", "udp", marks=pytest.mark.long),
        pytest.param("raise", "auto", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_dies_while_optimizers_train_is_named(mode: str, link: str) -> None:
    own = {"LOSSYCOLL_ON_PEER_LOSS": mode, "LOSSYCOLL_LIVENESS": str(LIVENESS)}
    with Ranks(train, WORLD, {**QUIET, **own, **over(link)}) as ranks:
        outcomes = ranks.collect(100)
    assert outcomes[VICTIM].code == -signal.SIGKILL, outcomes[VICTIM]
    for outcome in (outcomes[0], outcomes[2]):
        assert not outcome.error, outcome
        since, caught = outcome.value["since"], outcome.value["caught"]
        for name, found in caught.items():
            assert found.kind == "PeerLostError", (name, found)
            assert found.peer == VICTIM, (name, found)
            assert found.text.startswith(f"rank {outcome.rank}/{WORLD}: "), (name, found)
            assert f"rank {VICTIM} (127.0.0.1:" in found.text, (name, found)
            # DriftBound has no state that a rank holds alone.
            assert ("last checkpoint" in found.text) is (name != "bound"), (name, found)
            assert found.when < since + LIVENESS + SLACK, (name, found)
        assert ("bound" in caught) is (mode == "raise")
