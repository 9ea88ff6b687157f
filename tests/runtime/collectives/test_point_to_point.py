"""Messages by themselves: several ranks in one process, over real sockets, without torch."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lossycoll.errors import (
    ClosedError,
    LossyError,
    MismatchError,
    OperationTimeout,
    PeerLostError,
)
from lossycoll.options.fields import Options
from lossycoll.runtime.collectives.point_to_point import Messages, Transfer
from lossycoll.runtime.core.call import Collective
from lossycoll.runtime.engine.failures import Code, error_of
from lossycoll.runtime.world.group_state import Health
from tests.support.network import Network
from tests.support.waiting import until

SMALL = 1 << 16
"""LC_MAIL_SMALL: bytes of the largest message that is sent before it is wanted."""
LARGE = SMALL + 1
CREDIT = 1 << 20
CHARGE = 256


class End:
    """One rank's messages, with a health whose control plane the test plays."""

    def __init__(self, network: Network, rank: int) -> None:
        world = network.world
        self.rank = rank
        self.engine = network.engines[rank]
        self.health = Health(
            rank,
            world,
            addresses=[f"host{other}" for other in range(world)],
            liveness=1.0,
            control=None,
            on_failure=lambda _: self.engine.abort(Code.ABORTED),
            outlive=True,
        )
        self.messages = Messages(self.engine, self.health, network.options, self.group_failure)

    def group_failure(self, call: Collective) -> LossyError | None:
        """As Endpoint's."""
        failure = self.engine.failure()
        if failure.code < 0 and self.health.failure is None:
            self.health.fail(error_of(failure, self.health.where))
        return self.health.failure

    def send(self, data: bytes, to: int, tag: int = 0, timeout: float = 30.0) -> Transfer:
        return self._post(f"send to {to}", bytearray(data), to, tag, timeout)

    def receive(
        self, into: bytearray, source: int | None, tag: int = 0, timeout: float = 30.0
    ) -> Transfer:
        name = "receive" if source is None else f"receive from {source}"
        return self._post(name, into, source, tag, timeout)

    def _post(
        self, name: str, data: bytearray, peer: int | None, tag: int, timeout: float
    ) -> Transfer:
        call = Collective(name, "uint8", len(data), f"tag {tag}")
        view = np.frombuffer(data or bytearray(1), np.uint8)
        return self.messages.post(
            *(call, view.ctypes.data, 1, peer, tag),
            is_send=name.startswith("send"),
            keep=view,
            timeout=timeout,
        )

    def until_heard(self) -> None:
        """All that was sent has met nothing or its receive: an announcement too, since messages
        are heard in their order."""
        for other in range(self.health.where.world):
            if other != self.rank:
                assert self.send(b"", other, tag=HEARD).done
        until(lambda: self.engine.unheard() == 0)


@contextlib.contextmanager
def ends(world: int) -> Iterator[list[End]]:
    with Network(world) as network:
        made = [End(network, rank) for rank in range(world)]
        yield made
        for end in made:
            end.engine.close()
            end.messages.close()


def payload(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


HEARD = 999
"""The tag of what nobody receives."""
SIZES = (0, 1, 4096, SMALL, LARGE, 5_000_000)


@pytest.mark.parametrize("first", ["send", "receive"])
def test_bytes_arrive_whoever_comes_first(first: str) -> None:
    with ends(2) as (a, b):
        for number, size in enumerate(SIZES):
            data, got = payload(size, number), bytearray(size)
            if first == "send":
                send = a.send(data, 1, tag=number)
                a.until_heard()
                receive = b.receive(got, 0, tag=number)
            else:
                receive = b.receive(got, 0, tag=number)
                b.until_heard()
                send = a.send(data, 1, tag=number)
            receive.wait(20)
            send.wait(20)
            assert got == data
            assert receive.peer == 0


def test_a_small_message_is_taken_over_at_once_and_a_large_one_when_it_is_wanted() -> None:
    with ends(2) as (a, b):
        assert a.send(bytes(SMALL), 1).done
        large = a.send(bytes(LARGE), 1)
        with pytest.raises(OperationTimeout, match=r"rank 0/2: a send to 1 .* 0\.2 s given"):
            large.wait(0.2)
        # A wait that ran out has changed nothing.
        b.receive(bytearray(SMALL), 0).wait(10)
        b.receive(bytearray(LARGE), 0).wait(10)
        large.wait(10)


def test_nobody_needs_to_wait_for_messages_to_move() -> None:
    with ends(2) as (a, b):
        got = bytearray(5_000_000)
        receive = b.receive(got, 0)
        send = a.send(payload(len(got), 1), 1)
        until(lambda: got == payload(len(got), 1))
        done: list[str] = []
        for transfer in (receive, send):
            transfer.on_done(lambda: done.append("one"))
            until(transfer.poll)
        assert done == ["one", "one"]
        receive.on_done(lambda: done.append("at once"))
        assert done[-1] == "at once"


def test_works_that_nobody_keeps_are_forgotten_once_they_are_done() -> None:
    with ends(2) as (a, b):
        for number in range(40):
            got = bytearray(3)
            b.receive(got, 0)
            a.send(bytes([number] * 3), 1)
            until(lambda got=got, number=number: got == bytes([number] * 3))
        # Posting looks for them, from the eighth on.
        assert len(b.messages._transfers) < 12


def test_figures_have_messages_once_they_are_done() -> None:
    with ends(2) as (a, b):
        sizes = (10, SMALL, LARGE)
        for number, size in enumerate(sizes):
            got = bytearray(size)
            receive = b.receive(got, 0, tag=number)
            send = a.send(payload(size, number), 1, tag=number)
            receive.wait(20)
            send.wait(20)
        unmet = a.receive(bytearray(3), 1)
        until(lambda: a.engine.stats().messages_sent == len(sizes))
        sent, received = a.engine.stats(), b.engine.stats()
        assert (sent.messages_received, received.messages_sent) == (0, 0)
        assert received.messages_received == len(sizes)
        assert (sent.operations, sent.operation_ns) == (0, 0)
        assert received.bytes_received > sum(sizes)
        assert sent.bytes_sent >= received.bytes_received
        assert sent.packets_sent - sent.packets_resent == received.packets_received
        assert received.packets_received == b.engine.peer_stats(0).packets_received
        assert not unmet.poll()


def test_many_small_messages_wait_at_the_sender_once_the_credit_is_used() -> None:
    with ends(2) as (a, b):
        size = 10_000
        count = 4 * CREDIT // size
        sends = [a.send(payload(size, number), 1, tag=number % 2) for number in range(count)]
        assert sum(send.done for send in sends) == CREDIT // (size + CHARGE)
        # Odd tags first: what comes of the others meanwhile is kept.
        for tag in (1, 0):
            for number in range(tag, count, 2):
                got = bytearray(size)
                b.receive(got, 0, tag=tag).wait(10)
                assert got == payload(size, number)
        for send in sends:
            send.wait(10)

        def all_room_is_back() -> bool:
            """Each try that is too early takes a little, and gives it back."""
            done = [a.send(bytes(SMALL - CHARGE), 1).done for _ in range(16)]
            for _ in done:
                b.receive(bytearray(SMALL - CHARGE), 0).wait(10)
            return all(done)

        until(all_room_is_back)


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
            a.send(bytes(sent), 1, tag=4)
            a.until_heard()
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
        (0, r"receive from 0 uint8\[4\] tag 9: rank 0 \(host0\) never sent it within 0.3"),
        (None, r"no rank sent anything with this tag within 0.3 s"),
    ):
        with ends(2) as (_, b):
            receive = b.receive(bytearray(4), peer, tag=9, timeout=0.3)
            with pytest.raises(OperationTimeout, match=text) as caught:
                receive.wait(20)
            assert caught.value.peer == peer
            assert isinstance(b.health.failure, OperationTimeout)
    text = r"rank 1 \(host1\) never took it within 0.3 s"
    with ends(2) as (a, _), pytest.raises(OperationTimeout, match=text):
        a.send(bytes(LARGE), 1, timeout=0.3).wait(20)


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
        group[0].health.fail(PeerLostError("gone", peer=2))
        thread.join(10)
        assert errors, "it goes on waiting"
        for transfer in pending[1:]:
            with pytest.raises(PeerLostError, match="gone"):
                transfer.wait(5)


def lose(ends: list[End], rank: int) -> None:
    """The others continue without ``rank``."""
    for end in ends:
        if end.rank != rank:
            end.health.on_lost(rank, 0.0, True)
            end.engine.peer_dead(rank)


def test_a_lost_rank_ends_only_what_needs_it() -> None:
    with ends(3) as group:
        lost = [group[0].receive(bytearray(4), 2), group[0].send(bytes(LARGE), 2)]
        kept = [group[0].receive(bytearray(4), 1), group[0].receive(bytearray(4), None, tag=1)]
        lose(group, 2)
        for transfer in lost:
            with pytest.raises(PeerLostError, match=r"lost rank 2 .*has ended"):
                transfer.wait(5)
        for post in (lambda: group[0].send(b"", 2), lambda: group[0].receive(bytearray(1), 2)):
            with pytest.raises(PeerLostError, match=r"lost rank 2 "):
                post()
        for tag in (0, 1):
            group[1].send(b"good", 0, tag=tag).wait(5)
        for transfer in kept:
            transfer.wait(5)
        assert group[0].health.failure is None
        # From any rank, when none is left.
        last = group[0].receive(bytearray(4), None)
        lose(group, 1)
        with pytest.raises(PeerLostError, match=r"lost rank (1|2) "):
            last.wait(5)
        with pytest.raises(PeerLostError, match=r"lost rank (1|2) "):
            group[0].receive(bytearray(4), None).wait(5)
        assert group[0].health.failure is None


def test_what_a_rank_sent_before_it_left_still_arrives_and_then_its_leaving_is_reported() -> None:
    with ends(3) as group:
        for number in range(5):
            group[1].send(payload(SMALL, number), 0, tag=1).wait(5)
        waits = group[0].receive(bytearray(4), 1, tag=2)
        unwanted = group[0].send(bytes(LARGE), 1)
        group[1].messages.flush()
        group[0].health.on_bye(1, 7)
        group[0].engine.peer_left(1)
        group[1].engine.close()
        for transfer in (waits, unwanted):
            with pytest.raises(PeerLostError, match=r"rank 1 \(host1\) left the group after"):
                transfer.wait(10)
        for number in range(5):
            got = bytearray(SMALL)
            group[0].receive(got, 1, tag=1).wait(5)
            assert got == payload(SMALL, number)
        with pytest.raises(PeerLostError, match=r"left the group"):
            group[0].send(b"", 1)
        # The others go on.
        group[2].send(b"good", 0).wait(5)
        group[0].receive(bytearray(4), None).wait(5)
        assert group[0].health.failure is None


def test_a_failed_group_is_the_reason_though_the_engine_hears_first_that_a_rank_left() -> None:
    with ends(3) as group:
        end = group[0]
        end.health = Health(
            0,
            3,
            addresses=["a", "b", "c"],
            liveness=1.0,
            control=None,
            on_failure=lambda _: end.engine.peer_left(1),  # as that rank does when it hears it
        )
        end.messages = Messages(end.engine, end.health, Options(), end.group_failure)
        waits = end.receive(bytearray(4), 1)
        end.health.fail(PeerLostError("lost rank 2", peer=2))
        end.health.on_bye(1, 7)
        with pytest.raises(PeerLostError, match="lost rank 2"):
            waits.wait(10)


def test_what_a_rank_only_announced_before_it_left_keeps_its_place() -> None:
    with ends(3) as (a, b, _):
        announced = a.send(bytes(LARGE), 1, tag=1)
        assert a.send(b"late", 1, tag=1).done
        a.until_heard()
        never = b.receive(bytearray(4), 0, tag=2)
        b.health.on_bye(0, 7)
        b.engine.peer_left(0)
        with pytest.raises(PeerLostError):  # the engine's thread has taken the goodbye by then
            never.wait(10)
        for size, gone in ((LARGE, True), (4, False)):
            into = bytearray(size)
            receive = b.receive(into, 0, tag=1)
            if gone:
                with pytest.raises(PeerLostError, match=r"rank 0 \(host0\) left the group"):
                    receive.wait(10)
            else:
                receive.wait(10)
                assert into == b"late"
        assert not announced.done
        assert b.health.failure is None


def test_closing_ends_what_is_pending() -> None:
    with ends(2) as (a, _):
        waits = a.receive(bytearray(4), 1)
        a.engine.close()
        a.messages.close()
        with pytest.raises(ClosedError, match="destroyed"):
            waits.wait(5)
        with pytest.raises(ClosedError):
            a.send(b"", 1)
        a.messages.close()
