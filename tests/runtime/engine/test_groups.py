"""Groups on the hosts of three processes: each knows nothing of the others."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from lossycoll._native import lib

from lossycoll.errors import EngineError
from lossycoll.options.fields import Options
from lossycoll.plan import Delivery, Plan, draw_order, hierarchical
from lossycoll.runtime.engine.binding import DType, EngineCall, EngineGroup
from lossycoll.runtime.engine.failures import Code
from lossycoll.runtime.engine.host import Host
from tests.support.waiting import until

PROCESSES = 3
PAYLOAD = 1408
COUNT = 5000
PATIENT = {"deadline_min": 30.0, "deadline_max": 30.0}


@contextmanager
def hosts(processes: int = PROCESSES) -> Iterator[list[Host]]:
    """Started, and closed at the end."""
    made = [
        Host(number, processes, "127.0.0.1", payload_bytes=PAYLOAD, options=Options())
        for number in range(processes)
    ]
    peers = [("127.0.0.1", host.link().port) for host in made]
    for host in made:
        host.start(0x5EED, peers)
    try:
        yield made
    finally:
        for host in made:
            host.close()


class Group:
    """Engines of ``members`` (processes by rank); those in ``absent`` are made by :meth:`come`."""

    def __init__(
        self,
        made: Sequence[Host],
        number: int,
        members: Sequence[int],
        absent: Sequence[int] = (),
        **options: object,
    ) -> None:
        self.hosts, self.number, self.members = made, number, list(members)
        self.options = Options(**{**PATIENT, **options})  # type: ignore[arg-type]
        self.engines: dict[int, EngineGroup] = {}
        for rank in range(len(members)):
            if rank not in absent:
                self.come(rank)
        self.op = 0

    def come(self, rank: int) -> None:
        self.engines[rank] = EngineGroup(
            self.hosts[self.members[rank]],
            rank,
            len(self.members),
            number=self.number,
            fault_group=self.number,
            options=self.options,
            members=self.members,
        )

    def plan(self, rank: int) -> Plan:
        world = len(self.members)
        order = draw_order(0, self.number, self.op, world)
        return hierarchical.all_reduce(world, rank, COUNT, PAYLOAD // 4, order=order)

    def submit(
        self, rank: int, data: np.ndarray, timeout: float = 20.0, *, reliable: bool = False
    ) -> int:
        call = EngineCall.of(self.plan(rank)).given(
            dtype=DType.F32,
            scale=float(len(self.members)),
            signature=self.plan(rank).signature,
            timeout=timeout,
            delivery=Delivery(reliable),
        )
        return self.engines[rank].submit(call, data.ctypes.data, data.ctypes.data)

    def end(self, rank: int, ticket: int) -> tuple[int, int]:
        """The operation's code, and the packets that it misses."""
        engine = self.engines[rank]
        until(lambda: engine.wait(ticket, 0.1) != Code.PENDING, "the operation's end", seconds=30)
        code, report = engine.wait(ticket, 0.0), engine.result(ticket)[0]
        engine.release(ticket)
        return code, report.packets_missing

    def inputs(self) -> list[np.ndarray]:
        return [
            np.full(COUNT, float(self.number + rank), np.float32)
            for rank in range(len(self.members))
        ]

    def start(self) -> tuple[list[np.ndarray], list[int]]:
        data = self.inputs()
        tickets = [self.submit(rank, data[rank]) for rank in range(len(self.members))]
        self.op += 1
        return data, tickets

    def check(self, started: tuple[list[np.ndarray], list[int]]) -> None:
        """All have ended with the sum, and nothing is missing."""
        data, tickets = started
        world = len(self.members)
        for rank, ticket in enumerate(tickets):
            assert self.end(rank, ticket) == (Code.OK, 0)
            assert (data[rank] == sum(self.number + other for other in range(world))).all()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


def test_groups_that_overlap_run_at_the_same_time() -> None:
    with hosts() as made:
        groups = [Group(made, 1, (0, 1, 2)), Group(made, 2, (2, 0)), Group(made, 3, (1, 2, 0))]
        for _ in range(5):
            for group, started in [(group, group.start()) for group in groups for _ in range(3)]:
                group.check(started)
        for group in groups:
            assert [engine.stats().operations for engine in group.engines.values()] == [15] * len(
                group.members
            )


def test_loss_in_one_group_is_none_in_another() -> None:
    with hosts() as made:
        lossy = Group(made, 1, (0, 1, 2), inject="loss=0.3,seed=4")
        sound = Group(made, 2, (0, 1, 2))
        missing = 0
        for _ in range(4):
            data, tickets = lossy.start()
            sound.check(sound.start())
            missing += sum(lossy.end(rank, ticket)[1] for rank, ticket in enumerate(tickets))
            assert len(data) == PROCESSES
        assert missing > 20
        assert sound.engines[0].stats().packets_injected == 0


def test_a_group_that_a_process_makes_late_is_waited_for() -> None:
    """Nothing is lost meanwhile, though lossy packets may go at any time."""
    with hosts() as made:
        late = Group(made, 7, (0, 1, 2), absent=(1,), deadline_min=0.2, deadline_max=0.5)
        other = Group(made, 8, (0, 1, 2))
        data = late.inputs()
        tickets = {rank: late.submit(rank, data[rank]) for rank in (0, 2)}
        begin = time.monotonic()
        while time.monotonic() - begin < 1.0:  # twice the longest silence of a lossy stream
            other.check(other.start())
        assert late.engines[0].wait(tickets[0], 0.01) == Code.PENDING
        late.come(1)
        tickets[1] = late.submit(1, data[1])
        late.check((data, [tickets[rank] for rank in range(3)]))


def test_a_group_that_a_process_has_closed_is_not_waited_for() -> None:
    with hosts() as made:
        group = Group(made, 5, (0, 1, 2), deadline_min=0.1, deadline_max=0.5)
        other = Group(made, 6, (0, 1, 2))
        group.check(group.start())
        group.engines.pop(1).close()
        data = group.inputs()
        tickets = {rank: group.submit(rank, data[rank]) for rank in (0, 2)}
        for rank, ticket in tickets.items():
            code, missing = group.end(rank, ticket)
            assert (code, missing > 0) == (Code.OK, True)
        other.check(other.start())


def test_the_failure_of_a_group_is_its_own() -> None:
    with hosts() as made:
        failing, sound = Group(made, 1, (0, 1, 2)), Group(made, 2, (0, 1, 2))
        data = failing.inputs()
        pending = failing.submit(0, data[0])
        started = sound.start()
        failing.engines[0].abort(Code.ABORTED)
        assert failing.end(0, pending)[0] == Code.ABORTED
        sound.check(started)
        sound.check(sound.start())
        failing.close()
        sound.check(sound.start())


def test_a_link_that_is_dead_in_a_group_is_not_in_another() -> None:
    """There a rank is only late."""
    short = {"deadline_min": 0.2, "deadline_max": 0.5, "liveness": 0.5}
    with hosts() as made:
        cut = Group(made, 1, (0, 1, 2), inject="loss=1", **short)
        sound = Group(made, 2, (0, 1, 2), **short)
        data = sound.inputs()
        tickets = {rank: sound.submit(rank, data[rank], 60.0, reliable=True) for rank in (1, 2)}
        lost = cut.inputs()
        pending = [cut.submit(rank, lost[rank], 60.0, reliable=True) for rank in range(3)]
        for rank, ticket in enumerate(pending):
            assert cut.end(rank, ticket)[0] == Code.LINK
        time.sleep(0.2)  # many looks at what is pending
        tickets[0] = sound.submit(0, data[0], 60.0, reliable=True)
        sound.check((data, [tickets[rank] for rank in range(3)]))


def test_groups_come_and_go_in_any_order() -> None:
    rng = random.Random(3)
    with hosts() as made:
        groups = [Group(made, 10 + i, (0, 1, 2), absent=(0, 1, 2)) for i in range(200)]
        comings = [(group, rank) for group in groups for rank in range(3)]
        rng.shuffle(comings)
        for group, rank in comings:
            group.come(rank)
        for group, started in [(group, group.start()) for group in groups]:
            group.check(started)
        goings = [engine for group in groups for engine in group.engines.values()]
        rng.shuffle(goings)
        for engine in goings:
            engine.close()
        last = Group(made, 999, (0, 1, 2))
        last.check(last.start())


@pytest.mark.parametrize(
    ("number", "members", "rank"),
    [(1, (0, 1, 2), 0), (0, (0, 1, 2), 0), (2, (0, 0, 1), 0), (2, (1, 0, 2), 0), (2, (0, 3), 0)],
    ids=["taken", "zero", "twice", "elsewhere", "stranger"],
)
def test_a_group_that_can_not_be_is_refused(
    number: int, members: tuple[int, ...], rank: int
) -> None:
    with hosts() as made:
        Group(made, 1, (0, 1, 2))
        with pytest.raises(EngineError):
            EngineGroup(
                made[0],
                rank,
                len(members),
                number=number,
                fault_group=0,
                options=Options(),
                members=members,
            )


def test_packets_that_no_link_takes_are_an_error_with_both_sizes() -> None:
    with pytest.raises(EngineError) as caught:
        Host(0, 2, "127.0.0.1", payload_bytes=65528, options=Options())
    text = str(caught.value)
    assert f"rank 0/2: packets have {65528 + lib.lc_header_bytes()} bytes" in text, text
    assert f"link 0 takes {65535 - 28} at most; lower LOSSYCOLL_MTU" in text, text
