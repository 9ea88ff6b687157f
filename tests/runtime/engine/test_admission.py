"""Processes that come, leave and come back while engines run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from lossycoll.errors import EngineError
from lossycoll.options.fields import Options
from lossycoll.plan import Delivery, Plan, hierarchical
from lossycoll.runtime.engine.binding import EngineCall, EngineGroup
from lossycoll.runtime.engine.failures import Code
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.keys.secret import KEY_BYTES, Secret
from tests.oracle.codec import Array
from tests.support.network import DTYPES
from tests.support.waiting import until

PLACES, PAYLOAD, SESSION = 8, 256, 77
SECRET = Secret.of(b"a secret of tests")


def submit(engine: EngineGroup, data: Array, plan: Plan) -> int:
    call = EngineCall.of(plan).given(
        dtype=DTYPES["f32"],
        signature=plan.signature,
        timeout=20.0,
        delivery=Delivery(reliable=True),
    )
    return engine.submit(call, data.ctypes.data, data.ctypes.data)


class Swarm:
    """Hosts of this process that know each other by numbers, and nobody at first."""

    def __init__(self, *, sealed: bool, keepalive: float = 10.0) -> None:
        self.sealed = sealed
        self.options = Options(
            deadline_min=60.0, deadline_max=60.0, link="udp", keepalive=keepalive
        )
        self.hosts: dict[int, Host] = {}
        self.names: dict[int, str] = {}
        self.groups = 0

    def come(self, number: int, name: str) -> None:
        """A process takes a number, and all get to know it."""
        host = Host(number, PLACES, "127.0.0.1", payload_bytes=PAYLOAD, options=self.options)
        if self.sealed:
            host.seal(b"", SECRET.filter("a swarm"))
        own = ("127.0.0.1", host.link().port)
        host.start(SESSION, [own if one == number else None for one in range(PLACES)])
        self.names[number] = name
        for other, theirs in self.hosts.items():
            theirs.admit(number, own, self.keys(other, number))
            place = ("127.0.0.1", theirs.link().port)
            host.admit(other, place, self.keys(number, other))
        self.hosts[number] = host

    def keys(self, here: int, there: int) -> bytes:
        """Of the path between two processes, by their names."""
        if not self.sealed:
            return b""
        names = self.names[here], self.names[there]
        return SECRET.derived("link", *names) + SECRET.derived("link", *names[::-1])

    def go(self, number: int) -> None:
        """A process ends, and nobody is told."""
        self.hosts.pop(number).close()

    def forget(self, number: int) -> None:
        for host in self.hosts.values():
            host.admit(number, None)

    def mean(self, numbers: Sequence[int], count: int = 3000) -> None:
        """A group of its own, in which the mean is exact."""
        self.groups += 1
        engines = [
            EngineGroup(
                self.hosts[number],
                rank,
                len(numbers),
                number=self.groups,
                fault_group=self.groups,
                options=self.options,
                members=numbers,
                met=True,
            )
            for rank, number in enumerate(numbers)
        ]
        world = len(numbers)
        data = [np.arange(count, dtype=np.float32) * (rank + 1) for rank in range(world)]
        plans = [hierarchical.all_reduce(world, rank, count, PAYLOAD // 4) for rank in range(world)]
        tickets = [
            submit(engine, one, plan)
            for engine, plan, one in zip(engines, plans, data, strict=True)
        ]
        for engine, ticket in zip(engines, tickets, strict=True):
            code = Code.PENDING
            while code == Code.PENDING:
                code = Code(engine.wait(ticket, 1.0))
            assert code == Code.OK
        wanted = np.arange(count, dtype=np.float32) * (world + 1) / 2
        for one in data:
            np.testing.assert_allclose(one, wanted, rtol=1e-6)
        for engine in engines:
            engine.close()

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()


@pytest.fixture(params=[False, True], ids=["clear", "sealed"])
def swarm(request: pytest.FixtureRequest) -> Iterator[Swarm]:
    made = Swarm(sealed=request.param)
    yield made
    made.close()


def test_processes_come_one_by_one(swarm: Swarm) -> None:
    swarm.come(0, "a")
    for number in range(1, PLACES):
        swarm.come(number, f"peer {number}")
        swarm.mean(list(range(number + 1)))
    swarm.mean([5, 2, 7])


def test_one_that_starts_again_is_another(swarm: Swarm) -> None:
    """Under its number and name of place, with keys and packet numbers of its own."""
    for number in range(3):
        swarm.come(number, f"peer {number}")
    for again in range(4):
        swarm.mean([0, 1, 2])
        swarm.go(1)
        swarm.mean([2, 0])
        swarm.come(1, f"peer 1, started {again}")
        swarm.mean([1, 0, 2])


def test_a_number_may_be_free_for_a_while(swarm: Swarm) -> None:
    for number in (0, 3, 6):
        swarm.come(number, f"peer {number}")
    swarm.mean([0, 3, 6])
    swarm.go(3)
    swarm.forget(3)
    assert swarm.hosts[0].addresses[3] == "unknown"
    swarm.mean([6, 0])
    swarm.come(3, "somebody else")
    swarm.mean([3, 0, 6])


def test_many_come_and_go_and_nothing_is_left(swarm: Swarm) -> None:
    swarm.come(0, "a")
    swarm.come(1, "b")
    for again in range(300):
        place = ("127.0.0.1", 40_000 + again)
        secrets = SECRET.derived("x", again) * 2 if swarm.sealed else b""
        swarm.hosts[0].admit(5, place, secrets)
        if again % 3 == 0:
            swarm.hosts[0].admit(5, None)
    swarm.mean([0, 1])


def test_what_cannot_be_admitted(swarm: Swarm) -> None:
    swarm.come(0, "a")
    swarm.come(1, "b")
    host, place = swarm.hosts[0], ("127.0.0.1", 4711)
    keys = swarm.keys(0, 1)
    group = EngineGroup(
        host, 0, 2, number=9, fault_group=9, options=swarm.options, members=[0, 1], met=True
    )
    for process, peer, secrets in (
        (0, place, keys),  # this one
        (PLACES, place, keys),
        (1, place, keys),  # a member
        (1, None, b""),
        (2, ("no address", 5), keys),
        (2, ("::1", 5), keys),
        (2, place, b"" if swarm.sealed else bytes(2 * KEY_BYTES)),
    ):
        with pytest.raises(EngineError):
            host.admit(process, peer, secrets)
    group.close()
    swarm.mean([0, 1])
    host.admit(1, None)


def test_a_stranger_in_an_empty_place_is_not_heard(swarm: Swarm) -> None:
    swarm.come(0, "a")
    swarm.come(1, "b")
    stranger = Host(2, PLACES, "127.0.0.1", payload_bytes=PAYLOAD, options=swarm.options)
    if swarm.sealed:
        stranger.seal(b"", SECRET.filter("a swarm"))
    places = {0: ("127.0.0.1", swarm.hosts[0].link().port)}
    places[2] = ("127.0.0.1", stranger.link().port)
    stranger.start(SESSION, [places.get(number) if number == 2 else None for number in range(8)])
    stranger.admit(0, places[0], bytes(2 * KEY_BYTES) if swarm.sealed else b"")
    groups = [
        EngineGroup(
            host, rank, 2, number=9, fault_group=9, options=swarm.options, members=of, met=True
        )
        for host, rank, of in ((stranger, 0, [2, 0]), (swarm.hosts[0], 0, [0, 1]))
    ]
    data = np.ones(3000, np.float32)
    plan = hierarchical.all_reduce(2, 0, 3000, PAYLOAD // 4)
    ticket = submit(groups[0], data, plan)
    until(lambda: groups[1].stats().foreign > 3)
    assert groups[0].wait(ticket, 0.0) == Code.PENDING
    for group in groups:
        group.close()
    stranger.close()
    swarm.mean([0, 1])
