"""torch's send and recv on backend "lossy": real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lossycoll._native import lib

import lossycoll
from tests.support.failure_cases import CALM, LIVENESS, QUIET, SLACK
from tests.support.harness import Ranks, init, note, run_good
from tests.support.links import over, over_each_link
from tests.support.waiting import until

LARGE = 300_000
"""Elements that are not sent before they are wanted, whatever their type."""


def rank_tensors(rank: int, world: int) -> int:
    """Every rank sends to the next one; all of it is compared."""
    init()
    right, left = (rank + 1) % world, (rank - 1) % world
    floats = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    small = [torch.float8_e4m3fn, torch.float8_e5m2]
    whole = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16]
    others = [torch.bool, torch.complex64, torch.complex128]
    compared = 0

    def values(who: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(who + 1))
        return found.to(torch.float32).to(dtype) if dtype in small else found.to(dtype)

    def pass_on(make: Any, tag: int = 0) -> None:
        """``make`` gives the sender's tensor of a rank, with the receiver's layout."""
        nonlocal compared
        mine, wanted = make(rank), make(left)
        got = make(rank)
        with torch.no_grad():
            got.zero_()
        received = dist.irecv(got, left, tag=tag)
        sent = dist.isend(mine, right, tag=tag)
        assert sent.wait()
        assert received.wait()
        assert received.source_rank() == left
        # NaN patterns and signed zeros count: compare bytes.
        bytes_of = [t.detach().resolve_conj().contiguous().flatten() for t in (got, wanted)]
        assert torch.equal(*(t.view(torch.uint8) for t in bytes_of)), (got, wanted)
        compared += 1

    for dtype in (*floats, *small, *whole, *others):
        for shape in ((7,), (), (0,), (3, 5), (LARGE,)):
            pass_on(lambda who, s=shape, d=dtype: values(who, s, d), tag=len(shape))
    pass_on(lambda who: values(who, (40, 30), torch.float32).t())
    pass_on(lambda who: values(who, (4 * LARGE,), torch.int16)[::3])
    pass_on(lambda who: values(who, (60, 50), torch.float64)[5:, 10:20])
    pass_on(lambda who: values(who, (9,), torch.complex64).conj().imag)  # negated when read
    pass_on(lambda who: values(who, (6,), torch.float32).requires_grad_())
    wide = values(rank, (1,), torch.float32)
    request = dist.isend(wide.expand(50), right)
    got = torch.zeros(50)
    dist.recv(got, left)
    request.wait()
    assert (got == values(left, (1,), torch.float32)).all()
    dist.destroy_process_group()
    return compared


@over_each_link
def test_tensors_of_every_type_and_layout_arrive_bit_by_bit(link: str) -> None:
    assert set(run_good(rank_tensors, 3, {**CALM, **over(link)})) == {15 * 5 + 5}


def rank_surface(rank: int, world: int) -> str:
    init()
    right, left = (rank + 1) % world, (rank - 1) % world

    # Any source: who came first, and who it was.
    if rank == 0:
        for tag in (5, 0):
            seen = []
            for _ in range(world - 1):
                got = torch.zeros(LARGE)
                source = dist.recv(got, tag=tag)
                assert (got == 10 * source + tag).all()
                seen.append(source)
            assert sorted(seen) == list(range(1, world))
    else:
        requests = [
            dist.isend(torch.full((LARGE,), 10.0 * rank + tag), 0, tag=tag) for tag in (0, 5)
        ]
        for request in requests:
            request.wait()
    dist.barrier()

    # A batch in an order that blocks if sends and receives take turns, and more than once.
    for size in (10, LARGE):
        inputs = {peer: torch.full((size,), float(rank)) for peer in range(world) if peer != rank}
        outputs = {peer: torch.zeros(size) for peer in inputs}
        ops = [dist.P2POp(dist.isend, inputs[peer], peer) for peer in inputs]
        ops += [dist.P2POp(dist.irecv, outputs[peer], peer) for peer in outputs]
        for request in dist.batch_isend_irecv(ops if rank % 2 else ops[::-1]):
            request.wait()
        assert all((got == peer).all() for peer, got in outputs.items())

    # Objects.
    objects: list[Any] = [{"rank": rank}, "x" * 100_000, None]
    if rank == 0:
        dist.send_object_list(objects, 1)
    elif rank == 1:
        found: list[Any] = [None] * 3
        assert dist.recv_object_list(found, 0) == 0
        assert found == [{"rank": 0}, "x" * 100_000, None]

    # Futures and works that nobody waits for.
    got = torch.zeros(LARGE)
    receive = dist.irecv(got, left)
    future = receive.get_future().then(lambda done: float(done.value()[0].sum()))
    dist.isend(torch.ones(LARGE), right)
    assert future.wait() == LARGE
    assert receive.is_completed()
    assert receive.is_success()
    assert receive.exception() is None
    receive = dist.irecv(got.zero_(), left)
    send = dist.isend(torch.full((LARGE,), 2.0), right)
    until(lambda: receive.is_completed() and send.is_completed(), seconds=20)
    assert (got == 2).all()
    dist.barrier()

    # A wait that runs out leaves all as it was.
    receive = dist.irecv(got, left, tag=8)
    begin = time.monotonic()
    with pytest.raises(lossycoll.OperationTimeout, match=rf"a receive from {left} .*0\.2 s given"):
        receive.wait(timedelta(seconds=0.2))
    assert 0.15 < time.monotonic() - begin < 30
    dist.barrier()
    dist.send(torch.full((LARGE,), 3.0), right, tag=8) if rank % 2 else None
    receive.wait() if left % 2 else None
    dist.send(torch.full((LARGE,), 3.0), right, tag=8) if rank % 2 == 0 else None
    receive.wait()
    assert (got == 3).all()

    # Refused, and the group goes on.
    one = torch.ones(1)
    group = dist.group.WORLD
    for call, text in (
        (lambda: dist.isend(one, rank), "to this rank itself"),
        (lambda: dist.irecv(one, rank), "to this rank itself"),
        (lambda: group.send([one], world, 0), f"ranks 0 to {world - 1} only"),
        (lambda: dist.isend(one, right, tag=-1), "tag -1"),
        (lambda: dist.isend(one.to("meta"), right), "on meta, but .* CPU and on CUDA devices"),
        (lambda: dist.isend(torch.eye(2).to_sparse(), right), "dense ones only"),
        (lambda: dist.irecv(one.expand(4), left), "share one place"),
        (lambda: group.send([one, one], right, 0), "2 tensors"),
    ):
        with pytest.raises(lossycoll.UnsupportedError, match=text):
            call()
    sub = dist.new_group([0, 1])
    if rank < 2:
        receive = dist.irecv(got, 1 - rank, group=sub)
        dist.send(torch.full((LARGE,), 4.0), 1 - rank, group=sub)
        receive.wait()
        assert (got == 4).all()
    alone = [dist.new_group([other]) for other in range(world)][rank]
    with pytest.raises(lossycoll.UnsupportedError):
        alone.send([one], 0, 0)
    dist.barrier()
    dist.destroy_process_group()
    return "good"


def test_what_torch_offers_point_to_point_works() -> None:
    assert run_good(rank_surface, 3, CALM) == ["good"] * 3


def rank_disagrees(rank: int, world: int) -> Any:
    return late(rank), mismatches(rank)


def mismatches(rank: int) -> list[tuple[str, str, int]]:
    """A group of its own for each kind of disagreement."""
    init()
    cases = [
        (torch.ones(30), torch.zeros(20)),  # gloo ends the process
        (torch.ones(10), torch.zeros(20)),  # gloo fills a part
        (torch.ones(LARGE), torch.zeros(LARGE - 1)),
        (torch.ones(20), torch.zeros(20, dtype=torch.int32)),  # gloo mixes up the bits
        (torch.ones(20), torch.zeros(10, dtype=torch.float64)),
    ]
    out = []
    for send, receive in cases:
        group = dist.new_group([0, 1])

        def call(send: Any = send, receive: Any = receive, group: Any = group) -> None:
            if rank == 0:
                dist.isend(send, 1, group=group, tag=6).wait()
                dist.recv(torch.zeros(1), 1, group=group)  # a small send is done before
            else:
                dist.recv(receive, 0, group=group, tag=6)

        with pytest.raises(lossycoll.MismatchError) as caught:
            call()
        assert not receive.any()
        out.append((str(caught.value), f"[{send.numel()}]", caught.value.peer))
        with pytest.raises(lossycoll.MismatchError):
            dist.isend(send, 1 - rank, group=group)
        dist.barrier()  # the other groups go on
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    return out


def late(rank: int) -> tuple[str, float]:
    """Rank 0 waits for a message; rank 1 hears of that, but never sends it."""
    init()
    dist.group.WORLD.set_timeout(timedelta(seconds=1.5))
    dist.barrier()
    begin = time.monotonic()
    waits = (lambda: dist.recv(torch.ones(3), 1, tag=2)) if rank == 0 else dist.barrier
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 has its error"], timedelta(seconds=60))
    with pytest.raises(lossycoll.OperationTimeout) as caught:
        waits()
    seconds = time.monotonic() - begin
    store.set(f"rank {rank} has its error", "")
    dist.destroy_process_group()
    return str(caught.value), seconds


@over_each_link
def test_both_sides_hear_of_another_size_or_type_and_of_a_message_that_never_comes(
    link: str,
) -> None:
    values = run_good(rank_disagrees, 2, {**CALM, **over(link)})
    for rank, (_, found) in enumerate(values):
        assert len(found) == 5
        for text, sent, peer in found:
            for part in (f"rank {rank}/2", f"rank {1 - rank} (127.0.0.1:", "tag 6", sent, "make"):
                assert part in text, text
            assert peer == 1 - rank
    (text, seconds), _ = values[0]
    for part in ("rank 0/2", "receive from 1 float32[3] tag 2", "rank 1 (127.0.0.1:", "1.5 s"):
        assert part in text
        assert part in values[1][0][0]
    assert 1.4 < seconds < 1.5 + SLACK


def rank_interrupted(rank: int, world: int) -> float:
    init()
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    over = [f"{number} is interrupted" for number in (0, 1)]
    if rank == 2:  # nothing but Ctrl-C ends the others' waits
        store.wait(over, timedelta(seconds=60))
        return 0.0
    t = torch.ones(LARGE)
    note("ready")
    try:
        dist.recv(t, 2) if rank == 0 else dist.send(t, 2)
    except KeyboardInterrupt:
        when = time.monotonic()
        store.set(over[rank], "")
        store.wait(over, timedelta(seconds=60))  # who leaves ends the other's wait
        return when
    raise AssertionError("not interrupted")


def test_ctrl_c_ends_a_wait_in_recv_and_in_send() -> None:
    with Ranks(rank_interrupted, 3, QUIET) as ranks:
        for number in (0, 1):
            ranks.wait_for(number, "ready")
            ranks.wait_until_still(number)
        begin = [ranks.signal(number, signal.SIGINT) for number in (0, 1)]
        outcomes = ranks.collect(60)[:2]
    for outcome, signalled in zip(outcomes, begin, strict=True):
        assert outcome.value is not None, str(outcome)
        assert outcome.value - signalled < 0.2 + SLACK


def rank_killed(rank: int, world: int) -> Any:
    """Rank 1 streams to rank 0 when it is killed; rank 2 sends what it never takes, and rank 3
    receives from anybody."""
    init()
    t = torch.ones(4 << 20)
    rounds = 0

    def stream() -> None:
        nonlocal rounds
        while True:
            if rank == 0:
                dist.recv(t, 1)
            else:
                dist.send(t, 0)
            rounds += 1
            if rounds == 3:
                note("ready")

    if rank > 1:
        note("ready")
    waits = {2: lambda: dist.send(t, 1), 3: lambda: dist.recv(t)}
    with pytest.raises(lossycoll.PeerLostError) as caught:
        waits.get(rank, stream)()
    return str(caught.value), caught.value.peer, time.monotonic()


@over_each_link
def test_a_rank_that_is_killed_is_named_by_all_that_wait(link: str) -> None:
    with Ranks(rank_killed, 4, {**QUIET, **over(link)}) as ranks:
        for number in range(4):
            ranks.wait_for(number, "ready")
        for number in (2, 3):
            ranks.wait_until_still(number)
        begin = ranks.signal(1, signal.SIGKILL)
        survivors = ranks.collect(90, but=[1])
        assert ranks.processes[1].wait(5) == -signal.SIGKILL
    for outcome in survivors:
        assert outcome.value is not None, str(outcome)
        text, peer, when = outcome.value
        assert peer == 1
        assert "rank 1 (127.0.0.1:" in text
        assert when - begin < LIVENESS + SLACK


def rank_leaves(rank: int, world: int) -> str:
    init()
    dist.barrier()
    if rank == 1:
        for number in range(3):
            dist.isend(torch.full((5000,), float(number)), 0)
        dist.destroy_process_group()
        return "good"
    if rank == 0:
        group: Any = dist.group.WORLD
        until(lambda: group._health.left(1), "the goodbye of rank 1")
        got = torch.zeros(5000)
        for number in range(3):
            dist.recv(got, 1)
            assert (got == number).all()
        begin = time.monotonic()
        with pytest.raises(lossycoll.PeerLostError, match=r"rank 1 .*left the group") as caught:
            dist.recv(got, 1)
        assert caught.value.peer == 1
        assert time.monotonic() - begin < SLACK
        dist.recv(got, 2)  # the others go on
        assert (got == 7).all()
    else:
        dist.send(torch.full((5000,), 7.0), 0)
    return "good"


@over_each_link
def test_what_was_sent_arrives_though_the_sender_has_left(link: str) -> None:
    assert run_good(rank_leaves, 3, {**CALM, **over(link)}) == ["good"] * 3


def fork(got: Any, peer: int, receive: Any) -> int:
    """How a child ends that was forked while messages were under way."""
    child = os.fork()
    if child == 0:
        for use in (receive.wait, lambda: dist.isend(got, peer)):
            try:
                use()
            except lossycoll.ClosedError:
                continue
            os._exit(1)
        dist.destroy_process_group()
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def rank_whose_child_asks_the_engine(rank: int, world: int) -> int:
    """By its library, past what refuses a child; while messages come."""
    init()
    gets = [torch.zeros(LARGE) for _ in range(20)]
    if rank == 1:
        dist.barrier()
        for number in range(len(gets)):
            dist.send(torch.full((LARGE,), float(number)), 0)
        return 7
    works: Any = [dist.irecv(got, 1) for got in gets]
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    messages = backend._point_to_point._messages
    tickets = list(messages._transfers)
    assert len(tickets) == len(works)
    dist.barrier()
    child = os.fork()
    if child == 0:
        for ticket in tickets:  # whoever waits first for a message does the engine's work
            lib.lc_group_wait(messages._engine._handle, ticket, 10**7)
        os._exit(7)
    for number, work in enumerate(works):
        work.wait(timedelta(seconds=20))
        assert (gets[number] == number).all()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@over_each_link
def test_a_forked_child_takes_nothing_of_its_parents(link: str) -> None:
    assert run_good(rank_whose_child_asks_the_engine, 2, {**CALM, **over(link)}) == [7, 7]


def rank_again(rank: int, world: int) -> list[tuple[int, int]]:
    counts = []
    for number in range(4):
        init()
        got = torch.zeros(LARGE)
        receive = dist.irecv(got, 1 - rank)
        if number == 2:
            assert fork(got, 1 - rank, receive) == 7  # refused, and nothing is harmed
        dist.send(torch.full((LARGE,), float(number)), 1 - rank)
        receive.wait()
        assert (got == number).all()
        dist.irecv(got, 1 - rank)  # never comes
        dist.destroy_process_group()
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    # The last group isn't destroyed: at exit its thread is joined all the same.
    init()
    dist.irecv(torch.zeros(1), 1 - rank)
    return counts


def test_groups_come_and_go_and_leave_nothing_behind() -> None:
    for counts in run_good(rank_again, 2, CALM):
        assert counts[1:] == counts[1:2] * 3
