"""A rank dies in the middle of a copy to or from shared memory, or can't have any."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import re
import signal
import tempfile
import time
from typing import Any

import pytest

from tests.support.failure_cases import CALM, QUIET, catch, good, must_name_the_lost
from tests.support.harness import Ranks, await_ranks, init, note, run_ranks
from tests.support.links import mapped_memories, over
from tests.support.refused_calls import MACHINES, Refused, refuse

# ---- a rank dies in the middle of a copy ----

MTU, PACKET = 9000, 7 * 8896 // 4
"""Bytes, and the elements of a large packet between ranks that share memory: as many packets of
that MTU as fit into its 65,024 bytes."""
WHOLE, COUNT = 5, 40
"""Packets: those before the hole, and all."""
HOLE = (WHOLE * PACKET * 4 // mmap.PAGESIZE + 3) * mmap.PAGESIZE
"""Bytes: from here on the tensor has no memory. It is in the middle of packet WHOLE."""


def tensor_with_a_hole() -> Any:
    """A tensor of ones of which only the first HOLE bytes have memory behind them.

    Whoever reads or writes beyond is ended with SIGBUS there, as is a process whose file another
    one makes shorter.
    """
    import torch

    with tempfile.NamedTemporaryFile() as file:
        tensor = torch.from_file(file.name, shared=True, size=COUNT * PACKET)
        tensor.fill_(1)
        os.truncate(file.name, HOLE)
    return tensor


def rank_copies(rank: int, world: int) -> Any:
    """Rank 0 broadcasts. The tensor of one of the ranks has a hole."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    victim = int(os.environ["VICTIM"])
    init()
    dist.barrier()
    t = torch.ones(COUNT * PACKET) if rank == 0 else torch.full((COUNT * PACKET,), -1.0)
    if rank == victim:
        t = tensor_with_a_hole()
        await_ranks("here", [r for r in range(world) if r != victim])
        note("copies")
    _get_default_store().set(f"here/{rank}", "")

    def call() -> None:
        dist.broadcast(t, 0)
        dist.barrier()

    caught = catch(call)
    return caught, (t == 1).tolist()


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_rank_that_dies_in_the_middle_of_a_copy_is_named_and_nobody_sees_half_a_packet(
    victim: int,
) -> None:
    env = {**QUIET, **over("auto"), "LOSSYCOLL_MTU": str(MTU), "VICTIM": str(victim)}
    since = time.monotonic()
    with Ranks(rank_copies, 3, env) as ranks:
        ranks.wait_for(victim, "copies")
        survivors = ranks.collect(100, but=[victim])
        assert ranks.processes[victim].wait(30) == -signal.SIGBUS, "the fault didn't happen"
    ended = time.monotonic()
    for outcome, (caught, arrived) in zip(survivors, good(survivors), strict=True):
        must_name_the_lost(
            caught,
            "broadcast",
            rank=outcome.rank,
            world=3,
            victim=victim,
            since=since,
            liveness=ended - since,
        )
        if victim == 0:
            whole = sum(arrived)  # of packets that came before the death was heard of
            assert whole % PACKET == 0, "a packet was seen before it was there as a whole"
            assert whole <= WHOLE * PACKET
            assert all(arrived[:whole])


# ---- a rank can't have it ----

F_ADD_SEALS = 1033
PROT_READ, PROT_WRITE, MAP_SHARED = mmap.PROT_READ, mmap.PROT_WRITE, mmap.MAP_SHARED
OF_OTHERS = "no address space for that of others"
LACKS = {
    "no memfd": Refused("memfd_create", errno.ENOSYS),
    "no descriptor": Refused("memfd_create", errno.EMFILE),
    "no room in the control group": Refused("fallocate", errno.ENOMEM),
    "no room in the machine": Refused("fallocate", errno.ENOSPC),
    "no seals": Refused("fcntl", errno.EINVAL, {1: F_ADD_SEALS}),
    OF_OTHERS: Refused("mmap", errno.ENOMEM, {2: PROT_READ, 3: MAP_SHARED}),
    "no address space": Refused("mmap", errno.ENOMEM, {2: PROT_READ | PROT_WRITE, 3: MAP_SHARED}),
}
OFTEN = "no room in the control group"
"""Of the short suite."""


def rank_that_lacks(rank: int, world: int) -> Any:
    """Rank 1 can't have memory that it shares; the others can."""
    import torch
    import torch.distributed as dist

    import lossycoll

    assert fcntl.F_ADD_SEALS == F_ADD_SEALS
    if rank == 1:
        refuse(LACKS[os.environ["LACKS"]])
    dist.init_process_group("lossy")
    found = lossycoll.topology().hosts, mapped_memories()
    with lossycoll.reliable():
        for step in range(3):
            t = torch.full((200_000,), float(rank + step))
            dist.all_reduce(t)
            assert (t == 3 + 3 * step).all(), "a sum is wrong"
    parts = [torch.zeros(1000, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(parts, torch.full((1000,), rank))
    assert all((part == sender).all() for sender, part in enumerate(parts))
    if rank < 2:
        t = torch.full((50_000,), float(rank))
        if rank:
            dist.send(t, 0)
        else:
            dist.recv(t, 1)
        assert (t == 1).all()
    dist.destroy_process_group()
    return found


@pytest.mark.skipif(platform.machine() not in MACHINES, reason="no table of its system calls")
@pytest.mark.parametrize(
    "lacks", [pytest.param(one, marks=[pytest.mark.long] * (one != OFTEN)) for one in LACKS]
)
def test_a_rank_that_cant_have_shared_memory_uses_udp_and_says_so_in_one_line(lacks: str) -> None:
    env = {**CALM, "LOSSYCOLL_LOG": "info", "LACKS": lacks}
    outcomes = run_ranks(rank_that_lacks, 3, env)
    for outcome, (hosts, mapped) in zip(outcomes, good(outcomes), strict=True):
        assert hosts == (0, 1, 0), "the fault didn't happen"
        # Rank 1 may have made its own, and have nobody to share it with.
        assert mapped in ((0, 1) if outcome.rank == 1 else (2,))
        lines = re.findall(r"event=apart.*", outcome.stderr)
        assert len(lines) == 1, outcome.stderr
        assert f"ranks={'0,2' if outcome.rank == 1 else '1'} " in lines[0]
        why = os.strerror(LACKS[lacks].error)
        if outcome.rank != 1 and lacks == OF_OTHERS:
            why = "couldn't take this rank's memory"
        assert why in lines[0], lines
