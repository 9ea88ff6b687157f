"""Point to point by itself: several ranks in one process, over real sockets, without torch."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from lossycoll.errors import (
    ClosedError,
    LossyError,
    MismatchError,
    OperationTimeout,
    PeerLostError,
    RendezvousError,
)
from lossycoll.runtime.core.call import Collective
from lossycoll.runtime.membership.group_state import Health
from lossycoll.runtime.p2p import endpoint as messages
from lossycoll.runtime.p2p.connection import EAGER_BYTES, HEADER_BYTES, Frame, Kind
from lossycoll.runtime.p2p.endpoint import Messages
from lossycoll.runtime.p2p.peer_state import CHARGE_BYTES, WINDOW_BYTES
from lossycoll.runtime.p2p.request import Transfer

TOKEN = "0123456789abcdef" * 2
LIVENESS = 1.0
LARGE = EAGER_BYTES + 1


class End:
    """One rank's messages, with a health whose control plane the test plays."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.messages = Messages(rank, world, token=TOKEN, address="127.0.0.1", ports=(0, 0))
        self.health = Health(
            rank,
            world,
            addresses=[f"host{other}" for other in range(world)],
            liveness=LIVENESS,
            control=None,
            on_failure=self.messages.fail,
        )

    def has_met(self, tag: int) -> bool:
        """Whether a message with this tag has arrived before it was wanted."""
        return tag in self.messages._mailbox._arrived

    def send(self, data: bytes, to: int, tag: int = 0, timeout: float = 30.0) -> Transfer:
        call = Collective(f"send to {to}", "uint8", len(data), f"tag {tag}")
        view = memoryview(bytearray(data))
        return self.messages.send(call, view, to, tag, keep=view, timeout=timeout)

    def receive(
        self, into: bytearray, source: int | None, tag: int = 0, timeout: float = 30.0
    ) -> Transfer:
        call = Collective("receive", "uint8", len(into), f"tag {tag}")
        view = memoryview(into)
        return self.messages.receive(call, view, source, tag, keep=view, timeout=timeout)


@contextlib.contextmanager
def ends(world: int) -> Iterator[list[End]]:
    made = [End(rank, world) for rank in range(world)]
    try:
        addresses = [("127.0.0.1", end.messages.port) for end in made]
        for end in made:
            end.messages.start(end.health, LIVENESS, addresses)
        yield made
    finally:
        for end in made:
            end.messages.close()


def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def payload(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


BUSY = 999
"""The tag of what is never sent: who waits for it takes in all that arrives."""
SIZES = (0, 1, 4096, EAGER_BYTES, LARGE, 5_000_000)


@pytest.mark.parametrize("first", ["send", "receive"])
def test_bytes_arrive_whoever_comes_first(first: str) -> None:
    with ends(2) as (a, b):
        b.receive(bytearray(1), 0, tag=BUSY)
        for number, size in enumerate(SIZES):
            data, got = payload(size, number), bytearray(size)
            if first == "send":
                send = a.send(data, 1, tag=number)
                until(partial(b.has_met, number))
                receive = b.receive(got, 0, tag=number)
            else:
                receive = b.receive(got, 0, tag=number)
                time.sleep(0.02)
                send = a.send(data, 1, tag=number)
            receive.wait(20)
            send.wait(20)
            assert got == data
            assert receive.peer == 0


def test_a_small_message_is_taken_over_at_once_and_a_large_one_when_it_is_wanted() -> None:
    with ends(2) as (a, b):
        assert a.send(bytes(EAGER_BYTES), 1).done
        large = a.send(bytes(LARGE), 1)
        with pytest.raises(OperationTimeout, match=r"rank 0/2: a send to 1 .* 0\.2 s given"):
            large.wait(0.2)
        # A wait that ran out has changed nothing.
        b.receive(bytearray(EAGER_BYTES), 0).wait(10)
        b.receive(bytearray(LARGE), 0).wait(10)
        large.wait(10)


def test_nobody_needs_to_wait_for_messages_to_move() -> None:
    with ends(2) as (a, b):
        done: list[str] = []
        got = bytearray(5_000_000)
        receive = b.receive(got, 0)
        receive.on_done(lambda: done.append("received"))
        send = a.send(payload(len(got), 1), 1)
        send.on_done(lambda: done.append("sent"))
        until(lambda: sorted(done) == ["received", "sent"])
        assert receive.done
        assert send.done
        assert got == payload(len(got), 1)
        receive.on_done(lambda: done.append("at once"))
        assert done[-1] == "at once"


def test_a_small_message_wakes_the_thread_that_has_to_connect_for_it() -> None:
    with ends(3) as (a, b, c):
        assert a.send(b"b", 1).done
        b.receive(bytearray(1), 0).wait(10)
        pump = a.messages._pump
        assert pump is not None
        until(lambda: pump._parked)
        assert a.send(b"c", 2).done  # so nobody waits for it, and the connection isn't made yet
        c.receive(bytearray(1), 0).wait(10)


def test_many_small_messages_wait_at_the_sender_once_the_window_is_full() -> None:
    with ends(2) as (a, b):
        size = 10_000
        count = 4 * WINDOW_BYTES // size
        sends = [a.send(payload(size, number), 1, tag=number % 2) for number in range(count)]
        eager = sum(send.done for send in sends)
        assert eager == WINDOW_BYTES // (size + CHARGE_BYTES)
        # Odd tags first: what comes of the others meanwhile is kept, within the window.
        for tag in (1, 0):
            for number in range(tag, count, 2):
                got = bytearray(size)
                b.receive(got, 0, tag=tag).wait(10)
                assert got == payload(size, number)
                assert b.messages._peers[0].held <= WINDOW_BYTES
        for send in sends:
            send.wait(10)
        # All room has been given back, but for what is reported later.
        peer = b.messages._peers[0]
        assert peer.held == 0
        a.send(b"x", 1).wait(1)
        assert a.messages._peers[1].window > WINDOW_BYTES // 2


def test_large_messages_cross_in_every_order() -> None:
    """All pairs, both ways, posted in an order of each rank's own."""
    world, each = 3, 4
    with ends(world) as group:
        received: list[tuple[bytearray, bytes]] = []
        transfers: list[Transfer] = []
        for end in group:
            others = [rank for rank in range(world) if rank != end.rank]
            jobs = [(kind, other, n) for kind in "rs" for other in others for n in range(each)]
            random.Random(end.rank).shuffle(jobs)
            for kind, other, number in jobs:
                sender, receiver = (end.rank, other) if kind == "s" else (other, end.rank)
                size = 300_000 * (number % 2) + 1000 + number
                data = payload(size, 100 * sender + 10 * receiver + number)
                if kind == "s":
                    transfers.append(end.send(data, other, tag=number))
                else:
                    got = bytearray(size)
                    transfers.append(end.receive(got, other, tag=number))
                    received.append((got, data))
        for transfer in transfers:
            transfer.wait(20)
        assert len(received) == world * (world - 1) * each
        assert all(got == data for got, data in received)


def test_threads_may_send_and_receive_at_once() -> None:
    with ends(2) as (a, b):
        wrong: list[Any] = []

        def talk(end: End, tag: int) -> None:
            try:
                for number in range(30):
                    size = (100, 20_000, 200_000)[number % 3]
                    seed = 1000 * tag + number
                    got = bytearray(size)
                    receive = end.receive(got, 1 - end.rank, tag)
                    send = end.send(payload(size, seed), 1 - end.rank, tag)
                    receive.wait(30)
                    send.wait(30)
                    if got != payload(size, seed):
                        wrong.append((end.rank, tag, number))
            except BaseException as error:
                wrong.append(error)

        threads = [
            threading.Thread(target=talk, args=(end, tag)) for end in (a, b) for tag in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not wrong


# ---- what goes wrong ----


@pytest.mark.parametrize("sent", [10, 30, LARGE])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_another_size_is_a_mismatch_that_ends_the_group(sent: int, first: str) -> None:
    with ends(2) as (a, b):
        into = bytearray(20)
        if first == "send":
            b.receive(bytearray(1), 0, tag=BUSY)
            a.send(bytes(sent), 1, tag=4)
            until(partial(b.has_met, 4))
            receive = b.receive(into, 0, tag=4)
        else:
            receive = b.receive(into, 0, tag=4)
            a.send(bytes(sent), 1, tag=4)
        with pytest.raises(MismatchError) as caught:
            receive.wait(10)
        for part in ("rank 1/2", "rank 0 (host0)", "tag 4", f"uint8[{sent}]", "uint8[20]", "make"):
            assert part in str(caught.value)
        assert caught.value.peer == 0
        assert b.health.failure is not None
        assert into == bytes(20)
        with pytest.raises(MismatchError):
            b.send(b"", 0)


def test_a_timeout_names_peer_and_tag() -> None:
    for peer, text in (
        (0, r"receive uint8\[4\] tag 9: rank 0 \(host0\) never sent it within 0.3"),
        (None, r"no rank sent anything with this tag within 0.3 s"),
    ):
        with ends(2) as (_, b):
            receive = b.receive(bytearray(4), peer, tag=9, timeout=0.3)
            with pytest.raises(OperationTimeout, match=text) as caught:
                receive.wait()
            assert caught.value.peer == peer
            assert isinstance(b.health.failure, OperationTimeout)
    text = r"rank 1 \(host1\) never took it within 0.3 s"
    with ends(2) as (a, _), pytest.raises(OperationTimeout, match=text):
        a.send(bytes(LARGE), 1, timeout=0.3).wait()


def test_a_failure_ends_all_that_is_pending() -> None:
    with ends(3) as group:
        pending = [
            group[0].receive(bytearray(4), 1),
            group[0].receive(bytearray(4), None, tag=1),
            group[0].send(bytes(LARGE), 2),
        ]
        errors: list[LossyError | None] = []

        waiting = threading.Event()

        def wait() -> None:
            waiting.set()
            with pytest.raises(PeerLostError, match="gone"):
                pending[0].wait()
            errors.append(pending[0].error)

        thread = threading.Thread(target=wait)
        thread.start()
        assert waiting.wait(10)
        begin = time.monotonic()
        group[0].health.fail(PeerLostError("gone", peer=2))
        thread.join(10)
        assert time.monotonic() - begin < 1
        assert [type(transfer.error) for transfer in pending] == [PeerLostError] * 3
        assert errors


def test_a_lost_rank_ends_only_what_needs_it() -> None:
    with ends(3) as group:
        gone = PeerLostError("rank 2 is gone", peer=2)
        lost = [group[0].receive(bytearray(4), 2), group[0].send(bytes(LARGE), 2)]
        kept = [group[0].receive(bytearray(4), 1), group[0].receive(bytearray(4), None, tag=1)]
        called_by: list[int] = []
        lost[0].on_done(lambda: called_by.append(threading.get_ident()))
        group[0].messages.peer_lost(2, gone)
        # Not here, where the control plane's thread would be: a callback may take long.
        until(lambda: bool(called_by))
        assert called_by != [threading.get_ident()]
        for transfer in lost:
            with pytest.raises(PeerLostError, match="rank 2 is gone"):
                transfer.wait(5)
        for post in (lambda: group[0].send(b"", 2), lambda: group[0].receive(bytearray(1), 2)):
            with pytest.raises(PeerLostError, match="rank 2 is gone"):
                post()
        for tag in (0, 1):
            group[1].send(b"good", 0, tag=tag).wait(5)
        for transfer in kept:
            transfer.wait(5)
        assert group[0].health.failure is None
        # From any rank, when none is left.
        last = group[0].receive(bytearray(4), None)
        group[0].messages.peer_lost(1, PeerLostError("rank 1 too", peer=1))
        with pytest.raises(PeerLostError, match="rank 1 too"):
            last.wait(5)
        with pytest.raises(PeerLostError, match=r"rank (1|2) "):
            group[0].receive(bytearray(4), None).wait(5)
        assert group[0].health.failure is None


def test_what_a_rank_sent_before_it_left_still_arrives_and_then_its_leaving_is_reported() -> None:
    with ends(3) as group:
        for number in range(5):
            group[1].send(payload(EAGER_BYTES, number), 0, tag=1).wait(5)
        waits = group[0].receive(bytearray(4), 1, tag=2)
        unwanted = group[0].send(bytes(LARGE), 1)
        group[1].messages.flush()
        group[0].health.on_bye(1, 7)
        group[1].messages.close()
        for transfer in (waits, unwanted):
            with pytest.raises(PeerLostError, match=r"rank 1 \(host1\) left the group after"):
                transfer.wait(10)
        for number in range(5):
            got = bytearray(EAGER_BYTES)
            group[0].receive(got, 1, tag=1).wait(5)
            assert got == payload(EAGER_BYTES, number)
        with pytest.raises(PeerLostError, match=r"left the group"):
            group[0].send(b"", 1)
        # The others go on.
        group[2].send(b"good", 0).wait(5)
        group[0].receive(bytearray(4), None).wait(5)
        assert group[0].health.failure is None


def test_a_connection_that_breaks_is_reported_when_the_control_plane_knows_no_better() -> None:
    with ends(2) as (a, b):
        a.send(b"good", 1).wait(5)
        b.receive(bytearray(4), 0).wait(5)
        waits = b.receive(bytearray(4), 0)
        begin = time.monotonic()
        a.messages._peers[1].outbound.socket.close()  # type: ignore[union-attr]
        with pytest.raises(
            PeerLostError, match=r"rank 0 \(host0\) broke though all ranks are"
        ) as e:
            waits.wait(20)
        assert e.value.peer == 0
        assert time.monotonic() - begin > 0.8 * LIVENESS


def test_closing_ends_what_is_pending() -> None:
    with ends(2) as (a, _):
        waits = a.receive(bytearray(4), 1)
        a.messages.close()
        with pytest.raises(ClosedError, match="destroyed"):
            waits.wait(5)
        with pytest.raises(ClosedError):
            a.send(b"", 1)
        a.messages.close()


def test_an_interrupt_in_the_middle_of_a_message_ends_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ends(2) as (a, b):
        into = bytearray(4)

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(b.messages, "_post_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            b.receive(into, 0)
        monkeypatch.undo()
        assert "interrupted in the middle" in str(b.health.failure)
        with pytest.raises(LossyError):
            b.receive(into, 0)
        a.send(b"", 1)


# ---- strangers ----


def hello(rank: int, to: int, token: str = TOKEN) -> bytes:
    return Frame(Kind.HELLO, rank, to, nbytes=len(token)).pack() + token.encode()


def eager(number: int, size: int, announced: int | None = None) -> bytes:
    announced = size if announced is None else announced
    return Frame(Kind.EAGER, 0, number, size, announced, "uint8").pack() + bytes(size)


STRANGE = {
    "noise": random.Random(5).randbytes(3000),
    "http": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 4,
    "no token": eager(0, 4),
    "wrong token": hello(1, 0, "f" * len(TOKEN)),
    "short token": hello(1, 0, TOKEN[:-1]),
    "huge token": Frame(Kind.HELLO, 1, 0, nbytes=1 << 60).pack(),
    "own rank": hello(0, 0),
    "no such rank": hello(9, 0),
    "negative rank": hello(-1, 0),
    "for another": hello(1, 1),
    "ends early": hello(1, 0)[: HEADER_BYTES + 3],
}
"""From somebody who isn't of the group."""
BROKEN = {
    "hello twice": hello(1, 0),
    "no kind": struct.pack("<4sB", b"LCm1", 99) + bytes(HEADER_BYTES - 5),
    "out of order": eager(1, 4),
    "too large": Frame(Kind.EAGER, 0, 0, LARGE, LARGE, "uint8").pack(),
    "huge": Frame(Kind.EAGER, 0, 0, 1 << 62, 1 << 62, "uint8").pack(),
    "data that nobody wanted": Frame(Kind.DATA, number=0, nbytes=8).pack(),
    "grant": Frame(Kind.GRANT, number=0).pack(),
    "credit": Frame(Kind.CREDIT, nbytes=8).pack(),
    "dtype": Frame(Kind.EAGER, 0, 0, 4, 4, "").pack()[:8] + b"\xff" * 16 + bytes(32),
    "beyond the window": b"".join(eager(n, EAGER_BYTES) for n in range(17)),
}
"""From somebody who has the token."""


def until_cut(raw: socket.socket) -> None:
    raw.settimeout(10)
    with contextlib.suppress(ConnectionError):
        while raw.recv(4096):
            pass


@pytest.mark.parametrize("what", STRANGE)
def test_strangers_are_cut_off_and_counted(what: str) -> None:
    with ends(3) as group:
        waits = group[0].receive(bytearray(4), 2)
        with socket.create_connection(("127.0.0.1", group[0].messages.port)) as raw:
            raw.sendall(STRANGE[what])
            if what == "ends early":
                raw.shutdown(socket.SHUT_WR)
            until_cut(raw)
        until(lambda: group[0].messages.foreign == 1)
        assert not waits.done
        group[2].send(b"good", 0)
        waits.wait(5)
        assert group[0].health.failure is None
        assert not group[0].messages._strangers


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_not_of_the_protocol_is_cut_off(what: str) -> None:
    with ends(3) as group:
        waits = group[0].receive(bytearray(4), 2, tag=3)
        with socket.create_connection(("127.0.0.1", group[0].messages.port)) as raw:
            raw.sendall(hello(1, 0))
            until(lambda: group[0].messages._peers[1].inbound is not None)
            with contextlib.suppress(ConnectionError):
                raw.sendall(BROKEN[what])
            until_cut(raw)
        until(lambda: group[0].messages.foreign == 1)
        assert group[0].messages._peers[1].inbound is None
        group[2].send(b"good", 0, tag=3)
        waits.wait(5)
        # Nothing was waiting for rank 1, so the group needn't end.
        assert group[0].health.failure is None


def test_who_never_says_whose_it_is_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "HELLO_SECONDS", 0.3)
    monkeypatch.setattr(messages, "STRANGERS", 20)
    with ends(2) as (a, b):
        waits = a.receive(bytearray(4), 1)
        with contextlib.ExitStack() as stack:
            silent = [
                stack.enter_context(socket.create_connection(("127.0.0.1", a.messages.port)))
                for _ in range(30)
            ]
            until(lambda: a.messages.foreign == len(silent))
            for raw in silent:
                until_cut(raw)
        b.send(b"good", 0)
        waits.wait(5)


# ---- what it takes ----


def test_threads_and_descriptors_are_given_back() -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = count()
    for number in range(4):
        with ends(2) as (a, b):
            if number:  # the first group never sends anything
                a.send(b"good", 1)
                b.receive(bytearray(4), 0).wait(5)
                b.receive(bytearray(4), 0)
                b.send(bytes(LARGE), 0)
                assert count()[1] == before[1] + 2
        assert count() == before


def test_a_group_without_messages_has_no_thread() -> None:
    before = threading.active_count()
    with ends(3):
        assert threading.active_count() == before


def test_the_port_is_one_of_those_given() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=rf"no free TCP port .* {port}-{port} .*; widen"):
            Messages(1, 2, token=TOKEN, address="127.0.0.1", ports=(port, port))
