"""on_peer_loss="continue": a job continues with the survivors, and its means are over those."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

import lossycoll
from tests.support import harness
from tests.support.harness import EXACT, Outcome, Ranks, await_ranks, kill_self
from tests.support.links import must_use_link, over, over_each_link
from tests.support.waiting import until

LIVENESS = 8.0
"""Longer than a starved machine keeps a rank that lives from its processor."""
ENV = {
    "LOSSYCOLL_ON_PEER_LOSS": "continue",
    "LOSSYCOLL_LIVENESS": str(LIVENESS),
    "LOSSYCOLL_LOG": "warning",
}


def survivors(world: int, victims: tuple[int, ...], function: Any, **env: str) -> list[Outcome]:
    """Runs ``function``, in which ``victims`` are killed; what became of the others."""
    with Ranks(function, world, {**ENV, **env}) as ranks:
        outcomes = ranks.collect(90)
    for rank in victims:
        assert outcomes[rank].code == -signal.SIGKILL, outcomes[rank]
    left = [outcome for outcome in outcomes if outcome.rank not in victims]
    for outcome in left:
        assert outcome.code == 0, outcome
        for rank in victims:
            assert f"lost rank {rank} (" in outcome.stderr, outcome
    return left


# ---- a rank that is late ----


def late_for_a_loss(rank: int, world: int) -> list[float]:
    """The last rank dies when rank 1 has begun a call, and rank 0 begins it after the loss. That
    call is the last of the view before, and those after it only look like it."""
    dist.init_process_group("lossy")
    must_use_link()
    store = _get_default_store()
    tensors = [torch.full((9_000,), float(rank + 1)) for _ in range(6)]
    dist.all_reduce(tensors[0])
    dist.all_reduce(tensors[1])
    dist.barrier()
    if rank == 2:
        await_ranks("ahead", [1])
        time.sleep(0.2)  # rank 1 has told of the call, and waits
        kill_self()
    if rank == 1:
        store.set("ahead/1", "")
    else:
        until(lambda: lossycoll.stats().lost, "rank 0 knows of the loss", seconds=60)
    for tensor in tensors[2:]:
        dist.all_reduce(tensor)
    dist.destroy_process_group()
    return [tensor.mean().item() for tensor in tensors]


def test_a_rank_that_is_late_for_a_loss_goes_on_with_the_others() -> None:
    for outcome in survivors(3, (2,), late_for_a_loss, LOSSYCOLL_DELIVERY="reliable"):
        assert outcome.value[:2] == [6.0, 6.0]
        assert outcome.value[3:] == [4.5] * 3  # the call before lacks what the dead rank owned


# ---- every collective, afterwards ----


def every_collective(rank: int, world: int) -> dict[str, Any]:
    dist.init_process_group("lossy")
    must_use_link()
    victim = int(os.environ["VICTIM"])
    root = 1 if victim == 0 else 0
    members = [r for r in range(world) if r != victim]
    harness.die(victim)
    large = torch.full((50_000,), float(rank + 1))
    # In flight while the victim dies: some packets are own.
    work = dist.all_reduce(large, async_op=True)
    await_ranks("here", range(world))  # what the victim waits for
    begin = time.monotonic()
    work.wait()
    seconds = time.monotonic() - begin
    out: dict[str, Any] = {"seconds": seconds, "in flight": large.unique().tolist()}

    def ask(name: str, call: Any) -> None:
        try:
            out[name] = call()
        except lossycoll.LossyError as error:
            out[name] = (type(error).__name__, str(error))

    def reduced(value: Tensor, op: Any = dist.ReduceOp.SUM) -> list[float]:
        dist.all_reduce(value, op)
        return distinct(value)

    def broadcast(source: int) -> list[int]:
        value = torch.full((10,), rank)
        dist.broadcast(value, source)
        return value.unique().tolist()

    def reduce_scatter(dtype: torch.dtype) -> list[float]:
        value = torch.full((8,), 0, dtype=dtype)
        dist.reduce_scatter_single(value, torch.full((8 * world,), rank + 1, dtype=dtype))
        return distinct(value)

    def scatter() -> list[int]:
        value = torch.zeros(3, dtype=torch.int64)
        parts = [torch.full((3,), 10 * r) for r in range(world)] if rank == root else None
        dist.scatter(value, parts, src=root)
        return value.unique().tolist()

    def lossy_gather() -> list[float]:
        rows = torch.full((world, 20_000), -1.0)
        with lossycoll.lossy():
            dist.all_gather_single(rows, torch.full((20_000,), float(rank)))
        return [row.unique().item() for row in rows]

    def lossy_gather_of(dtype: torch.dtype, elements: int) -> None:
        with lossycoll.lossy():
            rows = torch.zeros(world, elements, dtype=dtype)
            dist.all_gather_single(rows, torch.ones(elements, dtype=dtype))

    def reduce(dtype: torch.dtype) -> Any:
        value = torch.full((5,), rank + 1, dtype=dtype)
        dist.reduce(value, root)
        return distinct(value) if rank == root else None

    ask("sum", lambda: reduced(torch.full((50_000,), float(rank + 1))))
    ask("small sum", lambda: reduced(torch.full((5,), float(rank + 1))))
    ask("average", lambda: reduced(torch.full((5,), float(rank + 1)), dist.ReduceOp.AVG))
    ask("integers", lambda: reduced(torch.full((5,), rank + 1)))
    negative = torch.full((5,), -rank - 1)
    ask("average of integers", lambda: reduced(negative, dist.ReduceOp.AVG))
    ask("complex", lambda: reduced(torch.full((5,), rank + 1 + 0j)))
    ask("reduce complex", lambda: reduce(torch.complex64))
    ask("reduce_scatter complex", lambda: reduce_scatter(torch.complex64))
    ask("maximum", lambda: reduced(torch.full((5,), float(rank)), dist.ReduceOp.MAX))
    ask("reduce", lambda: reduce(torch.float32))
    ask("reduce integers", lambda: reduce(torch.int64))
    ask("broadcast", lambda: broadcast(root))
    ask("broadcast of the dead", lambda: broadcast(victim))
    ask("reduce_scatter", lambda: reduce_scatter(torch.float32))
    ask("reduce_scatter integers", lambda: reduce_scatter(torch.int64))
    ask("scatter", scatter)
    ask("lossy gather", lossy_gather)
    ask("lossy gather of few", lambda: lossy_gather_of(torch.float32, 5))
    ask("lossy gather of integers", lambda: lossy_gather_of(torch.int64, 20_000))
    ask("all_gather", lambda: dist.all_gather_object([None] * world, rank))
    ask("barrier", dist.barrier)
    # torch's own function of that name is for groups that are called gloo.
    ask("monitored barrier", dist.group.WORLD.monitored_barrier)
    empty = torch.zeros(0)
    ask("nothing", lambda: dist.all_reduce(empty))
    other = members[0] if rank != members[0] else members[-1]
    if len(members) > 1 and rank in (members[0], members[-1]):
        got = torch.zeros(2)
        ops = [
            dist.P2POp(dist.isend, torch.full((2,), float(rank)), other),
            dist.P2POp(dist.irecv, got, other),
        ]
        ask("pair", lambda: [work.wait() for work in dist.batch_isend_irecv(ops)] and got.tolist())
        out["pair"] = out["pair"] == [float(other)] * 2
    else:
        out["pair"] = True
    ask("recv", lambda: dist.recv(torch.zeros(2), victim))
    out["lost"] = (lossycoll.stats().lost, lossycoll.last_report().lost)  # type: ignore[union-attr]
    pair = dist.new_group(members, use_local_synchronization=True)
    out["new group"] = reduced_in(pair, rank)
    dist.destroy_process_group()
    return out


def distinct(value: Tensor) -> list[Any]:
    """Each number in it once; torch's ``unique`` takes no complex ones."""
    return sorted(set(value.tolist()), key=abs)


def reduced_in(group: Any, rank: int) -> list[float]:
    value = torch.full((5,), float(rank + 1))
    dist.all_reduce(value, group=group)
    return value.unique().tolist()


@pytest.mark.parametrize(
    ("world", "victim", "link"),
    [
        (4, 0, "auto"),
        pytest.param(4, 0, "udp", marks=pytest.mark.long),
        pytest.param(4, 2, "auto", marks=pytest.mark.long),
        (2, 0, "auto"),
    ],
)
def test_every_collective_goes_on_or_says_whom_it_lacks(world: int, victim: int, link: str) -> None:
    env = {"VICTIM": str(victim), **EXACT, **over(link)}
    left = survivors(world, (victim,), every_collective, **env)
    members = [rank for rank in range(world) if rank != victim]
    mean = sum(rank + 1 for rank in members) / len(members)
    total = sum(rank + 1 for rank in members)
    root = 1 if victim == 0 else 0
    for outcome in left:
        got, rank = outcome.value, outcome.rank
        assert got["seconds"] < LIVENESS + 5
        # A mean over some or all of the ranks, times the world.
        assert all(world <= value <= world * world for value in got["in flight"])
        for name, want in {
            "sum": world * mean,
            "small sum": world * mean,
            "average": mean,
            "integers": total,
            "average of integers": -(total // len(members)),  # toward zero
            "complex": world * mean,
            "reduce complex": world * mean if rank == root else None,
            "reduce_scatter complex": world * mean,
            "maximum": members[-1],
            "reduce": world * mean if rank == root else None,
            "reduce integers": total if rank == root else None,
            "broadcast": root,
            "reduce_scatter": world * mean,
            "reduce_scatter integers": total,
            "scatter": 10 * rank,
            "new group": total,
        }.items():
            assert got[name] == (None if want is None else [pytest.approx(want)]), (name, outcome)
        rows = [-1.0 if r == victim else float(r) for r in range(world)]
        assert got["lossy gather"] == rows
        assert got["barrier"] is got["monitored barrier"] is got["nothing"] is None
        assert got["pair"] is True
        assert got["recv"][0] == "PeerLostError"
        assert f"rank {victim} (127.0.0.1:" in got["recv"][1]
        assert got["lost"] == ((victim,), (victim,))
        for name in (
            *("all_gather", "broadcast of the dead"),
            *("lossy gather of few", "lossy gather of integers"),
        ):
            kind, text = got[name]
            assert kind == "PeerLostError"
            assert f"rank {rank}/{world}: call #" in text
            assert f"needs data of rank {victim} (127.0.0.1:" in text


def at_once(rank: int, world: int) -> tuple[int, list[float]]:
    """Waits for a rank that dies, with a control plane that takes its time; then adds again."""
    dist.init_process_group("lossy")
    peer_dead = lossycoll.runtime.engine.binding.EngineGroup.peer_dead
    failed = []

    def slowly(engine: lossycoll.runtime.engine.binding.EngineGroup, peer: int) -> None:
        peer_dead(engine, peer)  # ends what waits for the peer
        failed.append(peer)
        time.sleep(0.5)

    lossycoll.runtime.engine.binding.EngineGroup.peer_dead = slowly  # type: ignore[method-assign]
    harness.die(2)
    dist.all_reduce(torch.ones(50_000))
    value = torch.full((50_000,), float(rank + 1))
    dist.all_reduce(value)
    dist.destroy_process_group()
    return len(failed), value.unique().tolist()


def test_what_is_submitted_as_soon_as_a_wait_for_the_dead_ends_is_without_them() -> None:
    for outcome in survivors(4, (2,), at_once, **EXACT):
        assert outcome.value == (1, [pytest.approx(4 * (1 + 2 + 4) / 3)]), outcome


# ---- in flight ----


def copies_in_flight(rank: int, world: int) -> dict[str, Any]:
    """Exact calls that wait for a rank while it dies."""
    dist.init_process_group("lossy")
    must_use_link()
    dist.barrier()
    if rank == 1:
        await_ranks("submitted", (0, 2, 3))
        kill_self()
    out = {}
    calls = {
        "from 0": lambda: dist.broadcast(torch.full((9,), rank), 0, async_op=True),
        "from 1": lambda: dist.broadcast(torch.full((9,), rank), 1, async_op=True),
        "integers": lambda: dist.all_reduce(torch.full((9,), rank), async_op=True),
        "floats": lambda: dist.all_reduce(torch.full((9,), 1.0), async_op=True),
        "barrier": lambda: dist.barrier(async_op=True),
    }
    works = {name: call() for name, call in calls.items()}
    _get_default_store().set(f"submitted/{rank}", "")
    for name, work in works.items():
        try:
            work.wait()
            out[name] = ("", "")
        except lossycoll.LossyError as error:
            out[name] = (type(error).__name__, str(error))
    after = torch.ones(3)
    dist.all_reduce(after)
    out["after"] = after.tolist()
    dist.destroy_process_group()
    return out


@over_each_link
def test_what_waits_for_a_rank_that_dies_ends(link: str) -> None:
    for outcome in survivors(4, (1,), copies_in_flight, **over(link)):
        got = outcome.value
        assert got["from 0"] == got["floats"] == ("", "")
        for name in ("from 1", "integers"):
            kind, text = got[name]
            assert kind == "PeerLostError", outcome
            assert "rank 1 (127.0.0.1:" in text
            assert "died before all of its data came" in text
        assert got["after"] == [4.0] * 3


# ---- ranks that leave, stop or hang ----


def one_raises(rank: int, world: int) -> list[float]:
    dist.init_process_group("lossy")
    dist.barrier()
    if rank == 0:
        raise ValueError("of its own")
    got: list[float] = []
    for _ in range(3):
        value = torch.ones(3)
        dist.all_reduce(value)
        got += value.tolist()
    dist.destroy_process_group()
    return got


def test_a_rank_that_raises_is_gone_without() -> None:
    with Ranks(one_raises, 3, ENV) as ranks:
        outcomes = ranks.collect(90)
    assert outcomes[0].error == "ValueError"
    for outcome in outcomes[1:]:
        assert outcome.code == 0, outcome
        assert outcome.value == [3.0] * 9
        assert "lost rank 0 (" in outcome.stderr


def stopped(rank: int, world: int) -> Any:
    """Rank 2 sums until it gets an error; the others go on as long, so that somebody sends it."""
    dist.init_process_group("lossy")
    must_use_link()
    dist.barrier()
    harness.note("ready")
    store, value = _get_default_store(), torch.ones(3)
    lost: tuple[int, ...] = ()
    step, last = 0, 10**9
    while step < last:
        try:
            dist.all_reduce(value.fill_(1))
        except lossycoll.LossyError:
            store.set("told", "")
            raise
        assert value.tolist() == [3.0] * 3
        step += 1
        if not lost and (lost := lossycoll.stats().lost):
            harness.note("without")
        # Both end with the same step; rank 1 is at most one ahead of where rank 0 says so.
        if rank == 0 and last > step + 2 and store.check(["told"]):
            store.set("last", str(step + 2))
        if rank < 2 and store.check(["last"]):
            last = int(store.get("last"))
        time.sleep(0.01)
    dist.destroy_process_group()
    return lost


@over_each_link
def test_a_stopped_rank_is_gone_without_and_hears_of_it_when_it_comes_back(link: str) -> None:
    with Ranks(stopped, 3, {**ENV, **over(link)}) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "ready")
        ranks.signal(2, signal.SIGSTOP)
        for rank in range(2):
            ranks.wait_for(rank, "without")
        ranks.signal(2, signal.SIGCONT)
        outcomes = ranks.collect(90)
    assert [outcome.value for outcome in outcomes[:2]] == [(2,), (2,)], outcomes
    assert outcomes[2].error in ("AbortedError", "PeerLostError"), outcomes[2]


# ---- training ----

STEPS, KILLED_AT, FEATURES, BATCH = 150, 50, 96, 64


def data_of(rank: int, step: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_000 * seed + 1000 * step + rank)
    inputs = torch.randn(BATCH, FEATURES, generator=generator)
    truth = torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(5))
    noise = torch.randn(BATCH, FEATURES, generator=generator)
    return inputs, torch.tanh(inputs @ truth / FEATURES**0.5) + 0.1 * noise


def fresh_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.Tanh(), nn.Linear(128, FEATURES))
    return model, torch.optim.SGD(model.parameters(), lr=2.0)


def validation_loss(model: nn.Module) -> float:
    inputs, targets = data_of(99, 10**6, 0)
    with torch.no_grad():
        return nn.functional.mse_loss(model(inputs), targets).item()


def train_with_three_from_a_step_on(seed: int) -> float:
    """The same training in one process, with exact means: over four ranks, and then over three."""
    model, optimizer = fresh_model()
    for step in range(STEPS):
        ranks = range(4 if step < KILLED_AT else 3)
        optimizer.zero_grad()
        for rank in ranks:
            inputs, targets = data_of(rank, step, seed)
            (nn.functional.mse_loss(model(inputs), targets) / len(ranks)).backward()
        optimizer.step()
    return validation_loss(model)


def train(rank: int, world: int) -> Any:
    dist.init_process_group("lossy")
    model, optimizer = fresh_model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    for step in range(STEPS):
        if rank == 3 and step == KILLED_AT:
            kill_self()
        inputs, targets = data_of(rank, step, seed=0)
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs), targets).backward()
        optimizer.step()
    stats = lossycoll.stats()
    loss = validation_loss(model)
    del wrapped
    dist.destroy_process_group()
    return loss, stats.lost, stats.packets_injected


@pytest.mark.long
def test_ddp_goes_on_as_if_there_had_been_three_ranks_from_that_step_on() -> None:
    left = survivors(4, (3,), train, LOSSYCOLL_INJECT="loss=0.05,seed=7")
    losses = []
    for outcome in left:
        loss, lost, injected = outcome.value
        assert lost == (3,)
        assert injected > 100
        losses.append(loss)
    references = [train_with_three_from_a_step_on(seed) for seed in range(5)]
    spread = max(references) - min(references)  # of the data's noise alone
    untrained = validation_loss(fresh_model()[0])
    assert spread < 0.1 * (untrained - references[0])  # else this could not fail
    for loss in losses:
        assert abs(loss - references[0]) < 2 * spread, (losses, references)
