"""Connections and questions between ranks, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lossycoll.errors import EngineError, RendezvousError
from lossycoll.runtime.control import transport
from lossycoll.runtime.control.events import Closed
from lossycoll.runtime.control.transport import STRANGERS, Transport
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.world.connections import (
    Alive,
    Broken,
    Connected,
    Connections,
    Event,
    Received,
    Refused,
    RekeyAsked,
)
from lossycoll.runtime.world.messages import VERSION, Heartbeat, Hello, Left, Ready, pack
from lossycoll.runtime.world.queries import answers, ask_for_rekey
from lossycoll.runtime.world.rank_states import RankState
from tests.support.waiting import until


@contextlib.contextmanager
def ends(world: int, secret: Secret | None = None) -> Iterator[list[Connections]]:
    made = [Connections(rank, world, secret=secret) for rank in range(world)]
    try:
        places = [("127.0.0.1", one.open("127.0.0.1", (0, 0))) for one in made]
        for one in made:
            one.start("secret", places)
        yield made
    finally:
        for one in made:
            one.close(0)


def poll(
    one: Connections, others: list[Connections], wanted: int, seconds: float = 5
) -> list[Event]:
    """What ``one`` is told while the others run, up to ``wanted`` events."""
    found: list[Event] = []
    end = time.monotonic() + seconds
    while len(found) < wanted and time.monotonic() < end:
        found += one.poll(0.01)
        for other in others:
            other.poll(0)
    return found


def _is_refused(place: tuple[str, int]) -> bool:
    with socket.socket() as prober:
        return prober.connect_ex(place) != 0


def meet(coordinator: Connections, member: Connections) -> None:
    member.follow(0, 0.0)
    found: list[Event] = []
    end = time.monotonic() + 5
    while len(found) < 2 and time.monotonic() < end:
        found += coordinator.poll(0.01) + member.poll(0.01)
    assert found == [Connected(1), Connected(0)]


def test_messages_come_in_order_both_ways_and_before_the_end() -> None:
    with ends(2) as (coordinator, member):
        meet(coordinator, member)
        for _ in range(100):
            assert coordinator.send(1, pack(Heartbeat()))
        coordinator.send(1, pack(Ready()))
        found = poll(member, [], 101)
        assert found == [Received(0, Heartbeat())] * 100 + [Received(0, Ready())]
        member.send(0, pack(Left(1)))
        coordinator.send(1, pack(Heartbeat()))  # which it won't read
        member.close(0.5)
        assert poll(coordinator, [], 2) == [Received(1, Left(1)), Broken(1)]
        assert not coordinator.send(1, pack(Heartbeat()))


def test_questions_are_answered_by_who_lives_and_refused_by_the_hosts_of_others() -> None:
    with ends(4) as (asker, alive, shy, ended):
        ended.close(0)
        shy.states.move(0, RankState.LOST)
        # libzmq closes a listener on a thread of its own, a little later.
        until(lambda: _is_refused(asker.places[3]), "nobody listens there")
        asker.ask([1, 2, 3], 10.0, 0.0)
        found = poll(asker, [alive, shy], 2) + poll(asker, [alive, shy], 1, 0.3)
        assert sorted(found, key=repr) == [Alive(1), Refused(3)]
        asker.ask([1], 10.0, 1.0)
        answered: list[Event] = []
        end = time.monotonic() + 5
        while len(answered) < 1 and time.monotonic() < end:
            asker.poll(0)
            answered += alive.poll(0.01)
        assert answered == [Alive(0)], "who asks lives as well"


@contextlib.contextmanager
def running(one: Connections) -> Iterator[list[Event]]:
    """What happens to ``one``, which a thread of its own polls and ticks."""
    found: list[Event] = []
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            found.extend(one.poll(0.01))
            one.tick(time.monotonic(), 1.0)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def test_probes_are_answered_by_that_rank_of_that_world_alone() -> None:
    with contextlib.ExitStack() as stack:
        coordinator = Connections(0, 3)
        stack.callback(coordinator.close, 0)
        port = coordinator.open("127.0.0.1", (0, 0))
        coordinator.start("secret", [("127.0.0.1", port)] * 3)
        for rank in (1, 2):
            coordinator.states.move(rank, RankState.LOST)
        with running(coordinator) as found:
            assert answers("127.0.0.1", port, 0, "secret", 2)  # the asker's world is another's
            assert coordinator.foreign == 0
            end = time.monotonic() + 10
            while (
                coordinator.foreign < 2 and time.monotonic() < end
            ):  # one may end before it is heard
                assert not answers("127.0.0.1", port, 0, "another", 3)
                assert not answers("127.0.0.1", port, 1, "secret", 3)
            assert coordinator.foreign >= 2
        assert found == [], "no rank is taken for alive because of a probe"


@pytest.mark.parametrize("purpose", ["status", "probe"])
def test_who_has_its_answer_and_holds_the_connection_is_forgotten(
    purpose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_SECONDS", 0.2)
    with ends(1) as (rank,), contextlib.closing(Transport()) as asker:
        peer = asker.connect(rank.places[0])
        asker.send(peer, pack(Hello(VERSION, "secret", 0, purpose)))
        until(lambda: [rank.poll(0.01), asker.poll(0)] and rank._connections)
        assert not rank.foreign
        until(lambda: [rank.poll(0.01)] and not rank._connections)


def test_a_port_that_is_anothers_by_now_is_no_answer() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert not answers("127.0.0.1", port, 0, "secret", 2, seconds=0.1)  # silent

        def serve() -> None:
            with contextlib.closing(other.accept()[0]):
                pass  # that of before
            with contextlib.closing(other.accept()[0]) as end:
                end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        assert not answers("127.0.0.1", port, 0, "secret", 2)
        thread.join()
    assert not answers("127.0.0.1", port, 0, "secret", 2)  # refused


def test_hosts_that_do_not_answer_keep_nobody_waiting() -> None:
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(4):  # who neither accepts nor has room for more doesn't answer
            mute = stack.enter_context(socket.socket())
            mute.bind(("127.0.0.1", 0))
            mute.listen(0)
            for _ in range(2):
                full = stack.enter_context(socket.socket())
                full.setblocking(False)
                full.connect_ex(mute.getsockname())
            ports.append(mute.getsockname()[1])
        with socket.socket() as ended:
            ended.bind(("127.0.0.1", 0))
            ports = [0, *ports, ended.getsockname()[1]]
        made = Connections(0, len(ports))
        made.start("secret", [("127.0.0.1", port) for port in ports])
        begin = time.monotonic()
        made.ask(range(1, len(ports)), 10.0, 0.0)
        assert poll(made, [], 1) == [Refused(5)]
        assert time.monotonic() - begin < 4
        made.close(0)


def test_a_second_connection_of_a_rank_takes_the_place_of_the_first() -> None:
    with ends(2) as (coordinator, member):
        meet(coordinator, member)
        member.follow(0, 1.0)
        assert poll(member, [coordinator], 1) == [Connected(0)]
        member.send(0, pack(Ready()))
        assert Received(1, Ready()) in poll(coordinator, [], 9, 0.3)
        assert coordinator.send(1, pack(Heartbeat()))
        assert poll(member, [], 1) == [Received(0, Heartbeat())]


def test_a_connection_that_breaks_is_made_again() -> None:
    with ends(2) as (coordinator, member):
        meet(coordinator, member)
        coordinator.hang_up(1)
        assert poll(member, [], 1) == [Broken(0)]
        member.tick(10.0, 1.0)
        assert poll(member, [coordinator], 1) == [Connected(0)]


@contextlib.contextmanager
def far_away(place: tuple[str, int], seconds: float) -> Iterator[tuple[int, list[int]]]:
    """A way to ``place`` on which everything takes ``seconds`` longer: its port, and a list with an
    entry for each connection that came."""
    came: list[int] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(len(came))
        await asyncio.sleep(seconds)
        there = await asyncio.open_connection(*place)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while body := await source.read(1 << 16):
                    asyncio.get_running_loop().call_later(seconds, target.write, body)
            asyncio.get_running_loop().call_later(seconds, target.close)

        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(carry, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1], came
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(2 * seconds))
        loop.close()


def test_a_coordinator_whose_answer_outlasts_an_attempt_is_reached_by_a_longer_one() -> None:
    """The first time, and after a cut."""
    with contextlib.ExitStack() as stack:
        coordinator, member = Connections(0, 2), Connections(1, 2)
        places = [("127.0.0.1", one.open("127.0.0.1", (0, 0))) for one in (coordinator, member)]
        far, came = stack.enter_context(far_away(places[0], 0.1))
        coordinator.start("secret", places)
        member.start("secret", [("127.0.0.1", far), places[1]])
        for one in (coordinator, member):
            stack.callback(one.close, 0)
        member.follow(0, time.monotonic())

        def until_connected() -> None:
            end, before = time.monotonic() + 60, len(came)
            found: list[Event] = []
            while Connected(0) not in found and time.monotonic() < end:
                for event in coordinator.poll(0.01):
                    if isinstance(event, Connected):
                        coordinator.send(1, pack(Heartbeat()))
                found += member.poll(0.01)
                member.tick(time.monotonic(), 0.1)
            assert Connected(0) in found
            assert len(came) > before + 1, "the first attempt had time enough"
            while not any(isinstance(event, Received) for event in found):
                assert time.monotonic() < end
                found += member.poll(0.01)

        until_connected()
        member.hang_up(0)
        until_connected()


def test_a_range_of_ports_that_is_too_narrow_says_how_many_are_needed() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sockets = Connections(1, 2)
        try:
            with pytest.raises(RendezvousError) as caught:
                sockets.open("127.0.0.1", (port, port))
        finally:
            sockets.close(0.0)
    text = str(caught.value)
    assert f"rank 1/2: no free TCP port at 127.0.0.1 in {port}-{port} (1 port)" in text
    assert "each rank of a host takes one; widen LOSSYCOLL_PORT_RANGE to at least as many" in text


@pytest.mark.parametrize(
    ("address", "ports", "code", "said"),
    [
        ("198.51.100.7", (0, 0), errno.EADDRNOTAVAIL, "198.51.100.7: Cannot assign requested"),
        ("198.51.100.7", (4000, 4003), errno.EADDRNOTAVAIL, " in 4000-4003 (4 ports): Cannot"),
        ("127.0.0.1", (0, 0), errno.EADDRINUSE, "widen sysctl net.ipv4.ip_local_port_range"),
        ("127.0.0.1", (700, 701), errno.EACCES, "ports from 1024 on need no rights"),
        ("127.0.0.1", (0, 0), errno.EPERM, "127.0.0.1: Operation not permitted; see `ip address`"),
    ],
)
def test_a_rank_that_cant_listen_says_why(
    address: str,
    ports: tuple[int, int],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bind(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    sockets = Connections(1, 2)
    try:
        if code != errno.EADDRNOTAVAIL:  # which is real
            monkeypatch.setattr(socket.socket, "bind", bind)
        with pytest.raises(EngineError, match=r"rank 1/2: can't listen for TCP at") as caught:
            sockets.open(address, ports)
    finally:
        sockets.close(0.0)
    assert said in str(caught.value)
    assert caught.value.errno == code


# ---- sealed ----

OURS, ANOTHER = Secret.of(b"a secret of tests"), Secret.of(b"another secret of tests")


def test_sealed_ranks_meet_and_talk_and_answer_probes_that_have_the_secret() -> None:
    with ends(2, OURS) as (coordinator, member):
        meet(coordinator, member)
        assert member.send(0, pack(Left(1)))
        assert poll(coordinator, [member], 1) == [Received(1, Left(1))]
        with served(coordinator) as port:
            assert answers("127.0.0.1", port, 0, "secret", 2, secret=OURS)
            assert not answers("127.0.0.1", port, 0, "another", 2, seconds=0.3, secret=OURS)
            assert not answers("127.0.0.1", port, 0, "secret", 2, seconds=0.3, secret=ANOTHER)
            assert not answers("127.0.0.1", port, 0, "secret", 2, seconds=0.3)
        assert coordinator.foreign >= 2
        assert list(coordinator.members) == [1]


def test_whoever_connects_in_clear_or_scans_ports_is_dropped_and_changes_nothing() -> None:
    with ends(2, OURS) as (coordinator, member):
        meet(coordinator, member)
        place = coordinator.places[0]
        for said in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(100)):
            with socket.create_connection(place) as stranger:
                stranger.sendall(said)
                assert poll(coordinator, [member], 1, 0.1) == []
        for _ in range(20):  # one that closes first is no stranger
            if coordinator.foreign >= 2:
                break
            with contextlib.closing(Transport()) as in_clear:
                peer = in_clear.connect(place)
                in_clear.send(peer, pack(Hello(VERSION, "secret", 1, "member")))
                assert poll(coordinator, [member], 1, 0.2) == []
                assert isinstance(in_clear.poll(5)[0], Closed)
        assert coordinator.foreign >= 2
        assert member.send(0, pack(Left(1)))
        assert poll(coordinator, [member], 1) == [Received(1, Left(1))]


def test_strangers_by_the_hundred_keep_nobody_out() -> None:
    with ends(2, OURS) as (coordinator, member), contextlib.ExitStack() as stack:
        member.follow(0, 0.0)
        for _ in range(3 * STRANGERS):
            place = coordinator.places[0]
            stranger = socket.create_connection(place, source_address=("127.0.0.9", 0))
            stack.enter_context(stranger).sendall(b"\xff")
            coordinator.poll(0)
        until(
            lambda: (
                [coordinator.poll(0.01), member.poll(0)] and coordinator.members and member.members
            )
        )
        assert list(coordinator.members) == [1]
        assert coordinator._transport.counts["crowd"] > 0


def test_new_keys_are_asked_for_by_whoever_has_the_secret_alone() -> None:
    with ends(2, OURS) as (coordinator, member):
        meet(coordinator, member)
        found: list[Event] = []
        with served(coordinator, found) as port:
            assert not ask_for_rekey("127.0.0.1", port, ANOTHER, 0.3)
            assert found == []
            assert ask_for_rekey("127.0.0.1", port, OURS)
        assert found == [RekeyAsked(0)]
        with pytest.raises(ConnectionRefusedError):
            ask_for_rekey("127.0.0.1", 1, OURS)
    with ends(2) as (coordinator, member), served(coordinator) as port:
        assert not ask_for_rekey("127.0.0.1", port, OURS, 0.3)


def test_a_plain_connection_cannot_ask_for_new_keys() -> None:
    with ends(2) as (coordinator, member):
        meet(coordinator, member)
        with contextlib.closing(Transport()) as stranger:
            peer = stranger.connect(coordinator.places[0])
            stranger.send(peer, pack(Hello(VERSION, "secret", 0, "rekey")))
            assert poll(coordinator, [member], 1, 0.2) == []
        assert coordinator.foreign == 1


@contextlib.contextmanager
def served(coordinator: Connections, found: list[Event] | None = None) -> Iterator[int]:
    """The coordinator's port, while it takes what comes, to ``found``."""
    stop, events = threading.Event(), [] if found is None else found

    def work() -> None:
        while not stop.is_set():
            events.extend(coordinator.poll(0.01))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield coordinator.places[0][1]
    finally:
        stop.set()
        thread.join()
