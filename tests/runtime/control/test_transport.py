"""The transport over real sockets: connections, their ends, strangers, secrets and forks."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from lossycoll.runtime.control import transport as under_test
from lossycoll.runtime.control.context import SHARED, Keys, keys_of
from lossycoll.runtime.control.descriptors import listener
from lossycoll.runtime.control.events import (
    Closed,
    Connected,
    Event,
    Readable,
    Received,
    Refused,
)
from lossycoll.runtime.control.transport import LONGEST, MOST_ZEROS, STRANGERS, Transport
from lossycoll.runtime.keys.secret import Secret
from tests.support.transports import GREETING, HERE, count, hear, listening, meet, pair, stranger
from tests.support.waiting import until

OURS = Secret.of(b"a secret of tests")


@pytest.fixture(params=[False, True], ids=["clear", "sealed"])
def keys(request: pytest.FixtureRequest) -> Keys | None:
    return keys_of(OURS, "tests") if request.param else None


def test_messages_come_whole_and_in_order_and_before_the_end(keys: Keys | None) -> None:
    with pair(keys) as (server, client, place):
        there, here = meet(server, client, place)
        bodies = [b"%d" % number for number in range(300)] + [os.urandom(LONGEST), b"last"]
        for body in bodies:
            assert client.send(here, body)
        closer = threading.Thread(target=client.close, args=(10.0,))
        closer.start()
        found = hear(server, count(len(bodies) + 1))
        closer.join()
        assert found == [*(Received(there, body) for body in bodies), Closed(there, found[-1].why)]  # type: ignore[union-attr]
        assert not server.send(there, b"nobody is there")


def test_who_ends_both_at_once_doesnt_wait(keys: Keys | None) -> None:
    with pair(keys) as (server, client, place):
        meet(server, client, place)
        begin = time.monotonic()
        closers = [threading.Thread(target=one.close, args=(60.0,)) for one in (server, client)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        assert time.monotonic() - begin < 30


def test_a_place_where_nobody_listens_is_refused(keys: Keys | None) -> None:
    with contextlib.closing(Transport(keys)) as client, socket.socket() as bound:
        bound.bind((HERE, 0))  # and doesn't listen
        peers = [client.connect(bound.getsockname()) for _ in range(3)]
        assert sorted(hear(client, count(3)), key=repr) == [Refused(peer) for peer in peers]
        assert not client.send(peers[0], b"to nobody")


def test_its_own_address_is_told_when_a_place_is_reached(keys: Keys | None) -> None:
    """Before the other end has said anything."""
    with pair(keys) as (server, client, place):
        peer = client.connect(place)
        assert client.own(peer) == ""
        until(lambda: not client.poll(0.01) and not server.poll(0) and client.own(peer) == HERE)
        assert server.highest > 2
        client.drop(peer)
        assert client.own(peer) == ""


def test_connections_to_one_place_are_limited() -> None:
    with pair() as (_, client, place):
        peers = [client.connect(place) for _ in range(MOST_ZEROS)]
        with pytest.raises(OSError, match="64 connections lead there already"):
            client.connect(place)
        client.drop(peers[7])
        client.connect(place)


def test_who_is_silent_is_waited_for_until_it_is_dropped() -> None:
    with contextlib.closing(Transport()) as client, socket.socket() as mute:
        mute.bind((HERE, 0))
        mute.listen()
        peer = client.connect(mute.getsockname())
        assert client.send(peer, b"hello")
        assert client.poll(0.2) == []
        client.drop(peer)
        assert not client.send(peer, b"hello")
        assert client.poll(0.1) == []


def test_who_is_no_transport_is_told_as_closed() -> None:
    with contextlib.closing(Transport()) as client, socket.socket() as other:
        other.bind((HERE, 0))
        other.listen()
        peer = client.connect(other.getsockname())
        end, _ = other.accept()
        end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
        end.close()
        found = hear(client, lambda found: any(isinstance(one, Closed) for one in found))
        assert all(one.peer == peer for one in found)  # type: ignore[union-attr]


def test_dropping_one_of_several_connections_between_two_leaves_the_others(
    keys: Keys | None,
) -> None:
    with pair(keys) as (server, client, place):
        first, second, third = (meet(server, client, place) for _ in range(3))
        client.drop(second[1])
        assert hear(server, count(1), client) == [Closed(second[0], "closed by the other end")]
        server.drop(third[0])
        assert hear(client, count(1), server) == [Closed(third[1], "closed by the other end")]
        assert server.send(first[0], b"still")
        assert client.send(first[1], b"here")
        assert hear(server, count(1), client) == [Received(first[0], b"here")]
        assert hear(client, count(1), server) == [Received(first[1], b"still")]
        assert not server.send(third[0], b"gone")
        assert not client.send(second[1], b"gone")


def test_the_last_words_before_a_finish_arrive(keys: Keys | None) -> None:
    with pair(keys) as (server, client, place):
        there, here = meet(server, client, place)
        for _ in range(100):
            assert server.send(there, bytes(1000))
        server.finish(there)
        assert not server.send(there, b"no more")
        found = hear(client, count(101), server)
        assert found == [*[Received(here, bytes(1000))] * 100, Closed(here, "it has finished")]
        assert server.poll(0.1) == []


def test_who_finishes_isnt_waited_for_when_the_other_end_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(under_test, "FINISH_SECONDS", 0.1)
    with pair() as (server, client, place):
        there, here = meet(server, client, place)
        server.finish(there)
        end = time.monotonic() + 10
        while server._peers and time.monotonic() < end:
            server.poll(0.05)
        assert not server._peers
        assert Closed(here, "it has finished") in hear(client, count(1))


def test_who_doesnt_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "UNREAD", 200)
    with pair() as (server, client, place):
        there, here = meet(server, client, place)
        sent = 0
        while server.send(there, bytes(100_000)):
            sent += 1
            assert sent < 4000
        assert sent >= 199
        assert server.poll(0) == [Closed(there, "it doesn't read what is sent")]
        assert hear(client, lambda found: Closed(here, "closed by the other end") in found)


def test_a_wake_ends_a_wait_and_a_watched_descriptor_is_told() -> None:
    with contextlib.closing(Transport()) as one:
        threading.Timer(0.05, one.wake).start()
        assert one.poll(60) == []
        reader, writer = os.pipe()
        try:
            one.watch(reader)
            os.write(writer, b"!")
            assert one.poll(60) == [Readable(reader)]
            one.unwatch(reader)
            assert one.poll(0) == []
        finally:
            os.close(reader)
            os.close(writer)


def test_ipv6() -> None:
    try:
        end = listener("::1", (0, 0), 1)
    except OSError:
        pytest.skip("no IPv6 here")
    place = "::1", int(end.getsockname()[1])
    with contextlib.closing(Transport()) as server, contextlib.closing(Transport()) as client:
        server.listen(end)
        client.send(client.connect(place), b"hello")
        connected, hello = hear(server, count(2), client)
        assert connected == Connected(connected.peer, "::1", "::1")  # type: ignore[union-attr]
        assert hello == Received(connected.peer, b"hello")  # type: ignore[union-attr]
        client.connect(("::1", 1))
        assert isinstance(hear(client, count(1))[0], Refused)


# ---- strangers ----


READY = b"\x04\x1b\x05READY" + b"\x0bSocket-Type\x00\x00\x00\x06DEALER"[:-1] + b"R"
SAID = [
    b"",
    b"GET / HTTP/1.0\r\n\r\n",
    os.urandom(1000),
    GREETING,
    GREETING + b"\x06\xff\xff\xff\xff\xff\xff\xff\xff",
    GREETING.replace(b"NULL\0", b"CURVE") + b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),
]
"""What strangers begin with."""


@pytest.mark.parametrize("said", SAID, ids=range(len(SAID)))
def test_strangers_are_dropped_and_change_nothing(
    said: bytes, keys: Keys | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "HANDSHAKE_SECONDS", 0.2)
    with pair(keys) as (server, client, place):
        there, here = meet(server, client, place)
        with stranger(place, said) as end:
            end.settimeout(0.01)
            over = time.monotonic() + 10
            while time.monotonic() < over:
                for event in server.poll(0.01):
                    # In clear HTTP passes for a message of ZMTP 1.0: the user knows better.
                    assert keys is None
                    assert isinstance(event, Connected | Received | Closed)
                    assert event.peer != there
                with contextlib.suppress(TimeoutError):
                    try:
                        if end.recv(1000) == b"":
                            break
                    except ConnectionResetError:
                        break
            else:
                raise AssertionError("it wasn't hung up on")
        assert client.send(here, b"still")
        assert hear(server, lambda found: Received(there, b"still") in found, client)


def test_the_oldest_stranger_makes_room_and_those_of_known_hosts_go_last() -> None:
    server, place = listening(strangers=4, near={HERE})
    with contextlib.closing(server), contextlib.ExitStack() as stack:
        known = stack.enter_context(stranger(place))
        server.poll(0.2)
        others = [stack.enter_context(stranger(place, source="127.0.0.9")) for _ in range(20)]
        end = time.monotonic() + 10
        while server.counts["crowd"] < 17 and time.monotonic() < end:
            server.poll(0.01)
        assert server.counts["crowd"] == 17
        known.settimeout(0.2)
        assert known.recv(100)  # its greeting, and no end
        with pytest.raises(TimeoutError):
            known.recv(100)
        assert len(others) == 20


def test_a_crowd_that_is_heard_of_late_takes_no_descriptor_of_a_later_one() -> None:
    """The kernel gives a later connection the descriptor of one that was over before."""
    server, place = listening(strangers=4)
    with (
        contextlib.closing(server),
        contextlib.closing(Transport()) as client,
        contextlib.ExitStack() as stack,
    ):
        some = [stack.enter_context(stranger(place)) for _ in range(8)]
        for one in some:
            assert one.recv(100)  # its greeting: it was accepted
        for one in some[:4]:
            one.shutdown(socket.SHUT_WR)
            while one.recv(100):
                pass
        there, _ = meet(server, client, place)
        assert server._peers[there].fd < server.highest


def test_who_isnt_admitted_goes_after_a_while(
    keys: Keys | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "HANDSHAKE_SECONDS", 0.3)
    with pair(keys) as (server, client, place):
        peer = client.connect(place)
        client.send(peer, b"hello")
        there = hear(server, count(2), client)[0].peer  # type: ignore[union-attr]
        found = hear(client, count(1), server)
        assert found == [Closed(peer, "closed by whoever listens there")]
        assert server.counts["silent"] == 1
        assert not server.send(there, b"too late")
        assert server.poll(0) == [Closed(there, "it wasn't admitted in time")]
        assert server.poll(0) == []


def test_the_end_of_a_stranger_in_a_crowd_is_told_if_it_was_heard() -> None:
    server, place = listening(strangers=1)
    with contextlib.closing(server), contextlib.closing(Transport()) as client:
        client.send(client.connect(place), b"first")
        first = hear(server, count(2), client)[0].peer  # type: ignore[union-attr]
        client.send(client.connect(place), b"second")
        told = hear(server, lambda found: any(isinstance(one, Closed) for one in found), client)
        why = "others have come that weren't admitted"
        assert [one for one in told if isinstance(one, Closed)] == [Closed(first, why)]


def test_too_long_a_message_ends_its_connection(keys: Keys | None) -> None:
    with pair(keys) as (server, client, place):
        there, here = meet(server, client, place)
        client.send(here, bytes(LONGEST + 1000))
        assert hear(server, count(1), client) == [Closed(there, "closed by the other end")]


def test_messages_of_several_parts_arent_ours() -> None:
    server, place = listening()
    with contextlib.closing(server), zmq.Context() as context, context.socket(zmq.DEALER) as end:
        end.linger = 0
        end.reconnect_ivl = 60_000
        end.connect(f"tcp://{HERE}:{place[1]}")
        end.send_multipart([b"one", b"two"])
        over = time.monotonic() + 10
        while not server.counts["foreign"] and time.monotonic() < over:
            assert server.poll(0.01) == []
        assert server.counts["foreign"] == 1
        assert not server._peers


def test_an_identity_of_a_stranger_takes_nobodys_place() -> None:
    """It says the routing ids that this end gives its own connections, as far as they are known."""
    with pair() as (server, client, place), zmq.Context() as context:
        there, _ = meet(server, client, place)
        with context.socket(zmq.DEALER) as end:
            end.linger = 0
            end.identity = next(iter(client._by_routing))
            end.connect(f"tcp://{HERE}:{place[1]}")
            end.send(b"hello")
            assert Received(there, b"hello") not in hear(server, count(2), client)


# ---- processes ----


def threads_of() -> list[str]:
    """Names of this process's threads; torch and others may have some."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text())
    return names


def counted() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_a_transport_takes_few_threads_and_descriptors_and_gives_them_back(
    keys: Keys | None,
) -> None:
    with pair(keys):
        pass  # libzmq keeps one of random numbers
    until(lambda: not any(name.startswith("ZMQbg") for name in threads_of()), "the context ends")
    before = counted()
    server, place = listening(keys)
    descriptors, threads = (now - then for now, then in zip(counted(), before, strict=True))
    assert descriptors <= 12
    assert threads <= 2, "beside the one that polls"
    clients = [Transport(keys) for _ in range(3)]
    assert len(os.listdir("/proc/self/task")) - before[1] <= 2, "whatever their number"
    for client in clients:
        meet(server, client, place)
    for client in clients:
        client.close()
    server.close()
    until(lambda: counted() == before)


def test_a_process_without_descriptors_gets_an_error() -> None:
    """libzmq alone would abort it."""
    before = counted()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0) for _ in range(16)]
    most = max(taken) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        for free in range(len(taken) + 1):
            with contextlib.suppress(OSError):
                Transport(keys_of(OURS, "tests")).close()
            if free < len(taken):
                os.close(taken[free])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    Transport(keys_of(OURS, "tests")).close()
    assert SHARED._users == 0
    until(lambda: counted() == before, "libzmq's threads end")


@contextlib.contextmanager
def child(work: Callable[[], None]) -> Iterator[int]:
    """A process that runs ``work``, and is killed at the end."""
    process = os.fork()
    if process == 0:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("listens", [False, True])
def test_the_end_of_a_killed_process_is_told_at_once(forks: bool, listens: bool) -> None:
    """Also where a child of it lives on, which has copies of its descriptors."""
    reader, writer = os.pipe()
    lives, ends = os.pipe()
    with contextlib.ExitStack() as stack:
        for fd in (reader, lives):
            stack.callback(os.close, fd)
        here, place = listening()
        stack.callback(here.close)

        def work() -> None:
            os.close(ends)
            mine, my_place = listening()
            os.write(writer, b"%d\n" % my_place[1])
            if not listens:
                peer = mine.connect(place)
                mine.send(peer, b"hello")
            hear(mine, count(2))
            if forks and os.fork() == 0:
                assert mine.closed
                os.write(writer, b"child\n")
                os.read(lives, 1)  # until the test is over
                os._exit(0)
            os.write(writer, b"ready\n")
            time.sleep(60)

        with child(work) as process, os.fdopen(os.dup(reader), closefd=True) as told:
            os.close(writer)
            port = int(told.readline())
            if listens:
                peer = here.connect((HERE, port))
                here.send(peer, b"hello")
                lines = {told.readline() for _ in range(1 + forks)}
            else:
                found = hear(here, count(2))
                assert isinstance(found[0], Connected)
                peer = found[0].peer
                here.admit(peer)
                here.send(peer, b"welcome")
                lines = {told.readline() for _ in range(1 + forks)}
            assert lines == {"ready\n"} | ({"child\n"} if forks else set())
            os.kill(process, signal.SIGKILL)
            assert isinstance(hear(here, count(1))[0], Closed), "its child lives on"
            said: list[Event] = []
            while not any(isinstance(one, Refused) for one in said):  # its port is open for longer
                here.connect((HERE, port))
                said += hear(here, count(1))
            os.close(ends)


def test_a_forked_child_closes_nothing_of_others() -> None:
    with pair() as (server, client, place):
        meet(server, client, place)
        pipes = [os.pipe() for _ in range(8)]
        with socket.create_server((HERE, 0)) as other:
            process = os.fork()
            if process == 0:
                try:
                    for _, writer in pipes:
                        os.write(writer, b"!")
                    other.getsockname()
                    server.close()
                    client.close()
                except BaseException:
                    os._exit(1)
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        assert [os.read(reader, 1) for reader, _ in pipes] == [b"!"] * len(pipes)
        for ends in pipes:
            for end in ends:
                os.close(end)
        meet(server, client, place)


def test_a_child_has_a_transport_of_its_own() -> None:
    with pair() as (server, client, place):
        meet(server, client, place)
        process = os.fork()
        if process == 0:
            try:
                with contextlib.closing(Transport()) as own:
                    own.send(own.connect(place), b"of a child")
                    hear(own, count(1))
            except BaseException:
                os._exit(1)
            os._exit(0)
        found = hear(server, count(2), client)
        assert found[1] == Received(found[0].peer, b"of a child")  # type: ignore[union-attr]
        server.drop(found[0].peer)  # type: ignore[union-attr]
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_many_come_and_go_and_every_word_is_heard(keys: Keys | None) -> None:
    """Descriptors are used again and again: no connection is taken for another one."""
    server, place = listening(keys, strangers=4 * STRANGERS)
    over = threading.Event()
    failed: list[BaseException] = []
    told = [0]

    def come(name: int) -> None:
        try:
            for turn in range(8):
                with contextlib.closing(Transport(keys)) as client:
                    word = b"%d/%d" % (name, turn)
                    peer = client.connect(place)
                    client.send(peer, word)
                    found = hear(client, count(2), seconds=30)
                    assert found == [Connected(peer, HERE, HERE), Received(peer, word)]
                    with contextlib.suppress(OSError):
                        stranger(place).close()
                told[0] += 1
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=come, args=(name,)) for name in range(6)]
    with contextlib.closing(server):
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for event in server.poll(0.01):
                if isinstance(event, Received):
                    server.admit(event.peer)
                    server.send(event.peer, event.body)
        over.set()
    assert not failed, failed
    assert told[0] == 48
