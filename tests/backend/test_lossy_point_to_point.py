"""Sends and receives in a scope of ``lossy()``: real processes, real sockets, injected loss."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from tests.support.failure_cases import CALM, LIVENESS, QUIET, SLACK
from tests.support.harness import Ranks, init, note, run_good
from tests.support.links import over, over_each_link

LARGE = 300_000
"""Elements that are not sent before they are wanted."""
SMALL = 8_000
"""Elements of more than ``lossy_min_bytes`` that are."""
LOSING = {**CALM, "LOSSYCOLL_INJECT": "loss=0.3,seed=5"}
BEFORE = -3.0


def sent_by(rank: int, size: int = LARGE) -> Any:
    return torch.rand(size, generator=torch.Generator().manual_seed(rank)) + 1


def exchange(rank: int, send: Any, receive: Any, tensor: Any = None) -> Any:
    """Rank 0 sends within the scope that ``send`` opens, 1 receives within ``receive``'s.

    Returns what rank 1 has then; None on rank 0.
    """
    tensor = sent_by(0) if tensor is None else tensor
    if rank == 0:
        with send():
            dist.send(tensor, 1)
        return None
    got = torch.full_like(tensor, BEFORE)
    with receive():
        dist.recv(got, 0)
    return got


def figures() -> dict[str, int]:
    found = lossycoll.stats()
    names = ("packets_missing", "packets_injected", "packets_resent", "messages_received")
    return {name: getattr(found, name) for name in names}


def rank_loses(rank: int, world: int) -> list[Any]:
    init()
    store = torch.distributed.distributed_c10d._get_default_store()
    wanted = sent_by(0)
    out: list[Any] = []

    def counted(*arguments: Any) -> dict[str, int]:
        before = figures()
        # A small message is sent eagerly: it must not arrive before its receiver has counted.
        # The store's packets are none of the engine's.
        meeting = f"counted/{len(out)}"
        store.set(f"{meeting}/{rank}", "")
        store.wait([f"{meeting}/{peer}" for peer in range(world)])
        got = exchange(rank, *arguments)
        change = {name: value - before[name] for name, value in figures().items()}
        if got is not None:
            tensor = arguments[2] if len(arguments) > 2 else wanted
            change["exact"] = int((got == tensor).sum()) == tensor.numel()
            change["arrived"] = int((got == tensor).sum())
            change["kept"] = int((got == BEFORE).sum())
            change["zero"] = int((got == 0).sum())
        torch.distributed.barrier()
        return change

    def zero() -> Any:
        return lossycoll.lossy(on_missing="zero")

    def repaired() -> Any:
        return lossycoll.lossy(repair=20)

    lossy, reliable = lossycoll.lossy, lossycoll.reliable
    out = [counted(lossy, lossy), counted(lossy, zero)]
    for pair in ((lossy, reliable), (reliable, lossy), (lossy, repaired), (repaired, lossy)):
        out.append(counted(*pair))
    out.append(counted(lossy, lossy, sent_by(0, SMALL)))
    out.append(counted(lossy, lossy, torch.arange(LARGE)))
    out.append(counted(lambda: lossycoll.lossy(lossy_min_bytes=4 * LARGE + 1), lossy))
    torch.distributed.destroy_process_group()
    return out


def test_a_message_loses_packets_where_both_ends_ask_for_it_and_nowhere_else() -> None:
    sender, receiver = run_good(rank_loses, 2, LOSING)
    assert all(change["packets_injected"] > 0 for change in receiver)
    for sends, change in zip(sender[:2], receiver[:2], strict=True):
        assert sends["packets_resent"] == 0
        assert change["messages_received"] == 1
        assert change["packets_missing"] > 0
        assert LARGE // 2 < change["arrived"] < LARGE
    assert receiver[0]["arrived"] + receiver[0]["kept"] == LARGE
    assert receiver[1]["arrived"] + receiver[1]["zero"] == LARGE
    for change in receiver[2:]:
        assert change["packets_missing"] == 0
        assert change["exact"]
    assert all(sends["packets_resent"] > 0 for sends in sender[2:6])


def rank_exact(rank: int, world: int) -> int:
    """Nothing is lost, whoever comes first."""
    init()
    dist.barrier()
    for late in (0, 1, 0, 1):
        if rank == late:
            time.sleep(0.4)
        got = exchange(rank, lossycoll.lossy, lossycoll.lossy)
        assert got is None or torch.equal(got, sent_by(0))
    with lossycoll.lossy():
        strided = torch.full((LARGE, 2), BEFORE)
        if rank == 0:
            dist.send(sent_by(0, 2 * LARGE).view(LARGE, 2)[:, 1], 1)
        else:
            dist.recv(strided[:, 1], 0)
            assert torch.equal(strided[:, 1], sent_by(0, 2 * LARGE).view(LARGE, 2)[:, 1])
            assert (strided[:, 0] == BEFORE).all()
    missing = lossycoll.stats().packets_missing
    dist.destroy_process_group()
    return missing


@over_each_link
def test_nothing_is_missing_where_nothing_is_lost(link: str) -> None:
    assert run_good(rank_exact, 2, {**CALM, **over(link)}) == [0, 0]


def rank_many(rank: int, world: int) -> tuple[int, int]:
    """All send to all in a batch, and rank 0 then receives from whoever comes."""
    init()
    others = [peer for peer in range(world) if peer != rank]
    outputs = {peer: torch.full((LARGE,), BEFORE) for peer in others}
    with lossycoll.lossy():
        ops = [dist.P2POp(dist.isend, sent_by(rank), peer) for peer in others]
        ops += [dist.P2POp(dist.irecv, outputs[peer], peer) for peer in others]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
    lacks = 0

    def check(got: Any, source: int) -> int:
        arrived = got == sent_by(source)
        assert arrived.any()
        assert (got[~arrived] == BEFORE).all()
        return int((~arrived).sum())

    lacks += sum(check(got, peer) for peer, got in outputs.items())
    with lossycoll.lossy():
        if rank:
            dist.send(sent_by(rank), 0, tag=4)
        for _ in range(world - 1 if rank == 0 else 0):
            got = torch.full((LARGE,), BEFORE)
            lacks += check(got, dist.recv(got, tag=4))
    found = lossycoll.stats()
    dist.barrier()
    dist.destroy_process_group()
    return lacks, found.packets_missing


def test_batches_and_receives_from_any_rank_lose_packets_too() -> None:
    for lacks, missing in run_good(rank_many, 3, LOSING):
        assert lacks > 0
        assert missing > 0


def rank_waits(rank: int, world: int) -> tuple[str, int | None, float] | None:
    """Rank 1 is killed: 0 waits for what it never sends, and 2 sends what it never takes."""
    init()
    dist.barrier()
    note("ready")
    tensor = torch.ones(LARGE)
    with lossycoll.lossy():
        if rank == 1:
            time.sleep(60)
        with pytest.raises(lossycoll.PeerLostError) as caught:
            dist.recv(tensor, 1) if rank == 0 else dist.send(tensor, 1)
    return str(caught.value), caught.value.peer, time.monotonic()


def test_a_rank_that_is_killed_is_named_in_a_lossy_scope_too() -> None:
    with Ranks(rank_waits, 3, QUIET) as ranks:
        for number in range(3):
            ranks.wait_for(number, "ready")
        begin = ranks.signal(1, signal.SIGKILL)
        survivors = ranks.collect(60, but=[1])
        ranks.processes[1].wait(5)
    for outcome in survivors:
        assert outcome.value is not None, str(outcome)
        text, peer, when = outcome.value
        assert peer == 1
        assert "rank 1" in text
        assert when - begin < LIVENESS + SLACK
