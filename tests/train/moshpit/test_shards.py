"""Peers of two ranks each, with a model that ``fully_shard`` has split: rank by rank."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lossycoll import MoshpitAverager, MoshpitSGD, Swarm
from lossycoll.errors import OperationTimeout, OptionError, RendezvousError
from lossycoll.train.common.collectives import extremes
from tests.support.harness import init, run_good
from tests.support.swarms import SECRET
from tests.train.moshpit.test_sgd import backward, inner, model, parameters, weighted

PEERS, SHARDS, STEPS, EVERY = 2, 2, 8, 4


def whole(of: nn.Module) -> list[Tensor]:
    found: list[Any] = list(of.parameters())
    return [one.full_tensor().detach().clone() for one in found]


def moments(of: torch.optim.Optimizer) -> list[Tensor]:
    return [kept["exp_avg"].full_tensor().clone() for kept in of.state.values()]


def rank_shards(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    init()
    mesh = dist.init_device_mesh("cpu", (PEERS, SHARDS), mesh_dim_names=("peer", "shard"))
    peer, place = rank // SHARDS, rank % SHARDS
    with ExitStack() as stack:
        first = peer == 0
        listening = stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET)) if first else None
        every: list[Any] = [None] * world
        dist.all_gather_object(every, None if listening is None else listening.address)
        swarm = listening or stack.enter_context(Swarm(join=[every[place]], secret=SECRET))

        def peer_of(members: Swarm) -> tuple[nn.Module, MoshpitSGD]:
            own = model()
            fully_shard(own[0], mesh=mesh["shard"])  # type: ignore[index]
            fully_shard(own, mesh=mesh["shard"])
            averager = MoshpitAverager(members, own.parameters())
            return own, MoshpitSGD(
                own, inner(own.parameters()), averager, every=EVERY, timeout=30.0
            )

        own, optimizer = peer_of(swarm)
        optimizer._averager.wait_for(PEERS)
        dist.barrier()
        failures = []
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(own, peer, step)
            report = optimizer.step(weight=peer + 1.0)
            failures += [] if report is None else [report.failure]
        trained = whole(own)

        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "shard.pt"
        optimizer.save(path)
        kept = moments(optimizer._inner[0])
        alone = stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET))
        again, reborn = peer_of(alone)
        reborn.load(path)
        loaded = whole(again), moments(reborn._inner[0])
        for one, of in ((own, optimizer), (again, reborn)):
            of.zero_grad()
            backward(one, peer, STEPS)
            of._inner[0].step()
        went_on = all(map(torch.equal, whole(own), whole(again)))

        wrong = ""
        if place == 1:  # a shard that would be averaged with others' first ones
            stray = stack.enter_context(Swarm(join=[every[0]], secret=SECRET, name=f"stray {peer}"))
            try:
                peer_of(stray)
            except RendezvousError as error:
                wrong = str(error)
        dist.barrier()
    return {
        "trained": trained,
        "failures": failures,
        "same": all(map(torch.equal, loaded[0], trained))
        and all(map(torch.equal, loaded[1], kept)),
        "went on": went_on,
        "wrong": wrong,
    }


def wanted() -> list[Tensor]:
    models = [model() for _ in range(PEERS)]
    optimizers = [inner(one.parameters()) for one in models]
    for step in range(STEPS):
        for peer, one in enumerate(models):
            optimizers[peer].zero_grad()
            backward(one, peer, step)
            optimizers[peer].step()
        if (step + 1) % EVERY == 0:
            means = weighted([parameters(one) for one in models])
            with torch.no_grad():
                for one in models:
                    for own, mean in zip(one.parameters(), means, strict=True):
                        own.copy_(mean)
    return parameters(models[0])


def test_shards_are_averaged_rank_by_rank() -> None:
    found = run_good(rank_shards, PEERS * SHARDS)
    for one in found:
        assert one["failures"] == ["", ""]
        for own, want in zip(one["trained"], wanted(), strict=True):
            torch.testing.assert_close(own, want, rtol=1e-4, atol=1e-5)
        assert one["same"]
        assert one["went on"]
    assert [("shard=1 of 2, wanted 0 of 2" in one["wrong"]) for one in found] == [False, True] * 2


def rank_newcomer(rank: int, world: int) -> dict[str, Any]:
    """A peer of two ranks trains; another one comes, its second rank later than its first."""
    from torch.distributed.fsdp import fully_shard

    init()
    mesh = dist.init_device_mesh("cpu", (PEERS, SHARDS), mesh_dim_names=("peer", "shard"))
    peer, place = rank // SHARDS, rank % SHARDS
    with ExitStack() as stack:
        listening = None if peer else stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET))
        every: list[Any] = [None] * world
        dist.all_gather_object(every, None if listening is None else listening.address)
        swarm = listening or stack.enter_context(Swarm(join=[every[place]], secret=SECRET))
        own = model()
        fully_shard(own, mesh=mesh["shard"])
        averager = MoshpitAverager(swarm, own.parameters())
        optimizer = MoshpitSGD(own, inner(own.parameters()), averager, every=EVERY, timeout=30.0)
        store = dist.distributed_c10d._get_default_store()

        def train(step: int) -> None:
            optimizer.zero_grad()
            backward(own, peer, step)
            time.sleep(0.02)
            optimizer.step()

        if peer:
            store.wait(["has a state"])
            time.sleep(0.3 * place)
            told = failing(optimizer, place) if "FAILS" in os.environ else ""
            caught = optimizer.catch_up(30.0)
            assert caught is not None
            at = optimizer._replica.steps
            store.set(f"came {place}", "1")
            train(at)
        else:
            at, step, told = 0, 0, ""
            came, shard = [f"came {one}" for one in range(SHARDS)], next(own.parameters())
            # The ranks of a peer stop at the same step.
            while step % EVERY or not extremes(int(store.check(came)), shard)[0]:
                train(step)
                step += 1
                if step == EVERY:
                    store.set("has a state", "1")
        dist.barrier()
    return {"at": at, "told": told, "refused": refused(own, averager)}


def failing(optimizer: MoshpitSGD, place: int) -> str:
    """What each rank hears when the second one has no state in time."""
    averager, wanted = optimizer._averager, optimizer._averager.fetch_state

    def fails(*given: Any) -> Any:
        raise OperationTimeout("no answer, on purpose")

    if place:
        averager.fetch_state = fails  # type: ignore[method-assign]
    try:
        optimizer.catch_up(30.0)
    except OperationTimeout as error:
        return str(error)
    finally:
        averager.fetch_state = wanted  # type: ignore[method-assign]
    return ""


def refused(own: nn.Module, averager: MoshpitAverager) -> str:
    try:
        MoshpitSGD(own, inner(own.parameters()), averager, target_samples=64)
    except OptionError as error:
        return str(error)
    return ""


def test_the_ranks_of_a_newcomer_come_to_one_step() -> None:
    found = run_good(rank_newcomer, PEERS * SHARDS)
    assert found[2]["at"] == found[3]["at"] > 0
    assert all("shards (fully_shard)" in one["refused"] for one in found)


def test_a_rank_of_a_newcomer_that_fails_is_an_error_of_all_its_ranks() -> None:
    """None is left behind in a call, and all may try again."""
    found = run_good(rank_newcomer, PEERS * SHARDS, {"FAILS": "1"})
    assert found[2]["told"] == "another rank of this peer can't come to the others' step"
    assert found[3]["told"] == "no answer, on purpose"
    assert found[2]["at"] == found[3]["at"] > 0
