"""Descriptors that go from process to process: whose are taken, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lossycoll.runtime.net import descriptor_exchange
from lossycoll.runtime.net.descriptor_exchange import DescriptorExchange
from tests.support.shared_memory import BYTES, memory

TOKEN = "the world's"


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    before = len(descriptors())
    yield
    assert len(descriptors()) == before


@contextlib.contextmanager
def ends(number: int) -> Iterator[list[DescriptorExchange]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(DescriptorExchange(8))) for _ in range(number)
        ]


@contextlib.contextmanager
def own() -> Iterator[tuple[int, int]]:
    """What a process sends: its memory, and a pipe to write to."""
    asleep, wake = os.pipe()
    made = memory()
    try:
        yield made, wake
    finally:
        for descriptor in (made, wake, asleep):
            os.close(descriptor)


def test_each_gets_the_memory_and_the_pipe_of_each_other() -> None:
    with ends(3) as exchanges, contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(own()) for _ in exchanges]
        for rank, exchange in enumerate(exchanges):
            names = {n: other.name for n, other in enumerate(exchanges) if n != rank}
            assert exchange.send(rank, TOKEN, names, pairs[rank]) == {}
        for rank, exchange in enumerate(exchanges):
            others = {0, 1, 2} - {rank}
            exchange.take(TOKEN, others)
            assert exchange.taken.keys() == others
            assert not exchange.refused
            for other in others:
                taken, wake = exchange.taken[other]
                assert os.pread(taken, BYTES, 0).startswith(f"{pairs[other][0]};".encode())
                with pytest.raises(PermissionError):
                    os.pwrite(taken, b"x", 0)  # only its owner could, through its own mapping
                assert not os.get_inheritable(taken)
                assert os.path.sameopenfile(wake, pairs[other][1])


Send = Callable[[DescriptorExchange, DescriptorExchange, tuple[int, int]], object]


def refusals(send: Send) -> dict[int, str]:
    """What process 1 refuses of what ``send`` sends it; it takes nothing."""
    with ends(2) as (sender, receiver), own() as pair:
        send(sender, receiver, pair)
        receiver.take(TOKEN, [0])
        assert not receiver.taken
        return receiver.refused


def test_another_token_isnt_believed() -> None:
    found = refusals(lambda a, b, pair: a.send(0, "a guess", {1: b.name}, pair))
    assert found == {-1: "a process sent another token"}


@pytest.mark.parametrize("number", [1, 7, -1])
def test_a_process_that_isnt_expected_isnt_believed(number: int) -> None:
    found = refusals(lambda a, b, pair: a.send(number, TOKEN, {1: b.name}, pair))
    assert found == {-1: f"a process calls itself number {number}"}


@pytest.mark.parametrize(
    "message",
    [
        *(b"", b"{", b"[]", b"7", b'{"token": 1}', b'{"token": 1, "process": 0}', b"\xff" * 5000),
        *(b"[" * 4000, b'{"token": "\\ud800", "process": 0}'),
    ],
)
def test_nonsense_isnt_believed(message: bytes) -> None:
    def send(_: DescriptorExchange, receiver: DescriptorExchange, pair: tuple[int, int]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.connect(f"\0{receiver.name}")
            socket.send_fds(end, [message], pair)

    assert refusals(send).keys() == {-1}


def test_another_users_process_isnt_believed_by_either_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ends(2) as (sender, receiver), own() as pair:
        assert sender.send(0, TOKEN, {1: receiver.name}, pair) == {}
        monkeypatch.setattr(descriptor_exchange, "peer_user", lambda end: os.geteuid() + 1)
        receiver.take(TOKEN, [0])
        assert receiver.refused == {-1: "another user's process connected"}
        assert not receiver.taken
        failed = sender.send(0, TOKEN, {1: receiver.name}, pair)
        assert "another user listens there" in failed[1]
        receiver.refused.clear()
        receiver.take(TOKEN, [0])
        assert not receiver.taken, "it was given nothing"


def test_the_kernel_says_whose_an_end_is() -> None:
    with ends(1) as (exchange,), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.connect(f"\0{exchange.name}")
        assert descriptor_exchange.peer_user(end) == os.geteuid()


def file() -> int:
    return os.open(__file__, os.O_RDONLY)


UNFIT: dict[str, tuple[Callable[[], int], str]] = {
    "no memory": (file, "no memory that could be sealed"),
    "not sealed": (lambda: memory(0), "isn't sealed (seals 0x0)"),
    "may shrink": (lambda: memory(descriptor_exchange.F_SEAL_FUTURE_WRITE), "isn't sealed"),
    "all may write": (lambda: memory(descriptor_exchange.SEALS), "isn't sealed (seals 0x6)"),
    "truncated": (lambda: memory(size=0), "can't be mapped"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_memory_that_isnt_safe_to_read_is_refused(what: str) -> None:
    make, reason = UNFIT[what]

    def send(a: DescriptorExchange, b: DescriptorExchange, pair: tuple[int, int]) -> None:
        unfit = make()
        assert a.send(0, TOKEN, {1: b.name}, (unfit, pair[1])) == {}
        os.close(unfit)

    found = refusals(send)
    assert found.keys() == {0}
    assert reason in found[0]


def test_what_is_no_pipe_is_refused() -> None:
    found = refusals(lambda a, b, pair: a.send(0, TOKEN, {1: b.name}, (pair[0], pair[0])))
    assert found == {0: "it sent no pipe"}


def test_a_pipe_with_a_name_is_refused(tmp_path: Path) -> None:
    """Its file system could have whoever opens it wait."""
    os.mkfifo(tmp_path / "named")
    named = os.open(tmp_path / "named", os.O_RDWR | os.O_NONBLOCK)
    found = refusals(lambda a, b, pair: a.send(0, TOKEN, {1: b.name}, (pair[0], named)))
    os.close(named)
    assert found == {0: "it sent no pipe"}


def test_a_pipe_that_cannot_be_opened_once_more_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where /proc isn't mounted: ranks go by UDP then, and say so."""

    def unmounted(path: str) -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(descriptor_exchange.os, "readlink", unmounted)
    found = refusals(lambda a, b, pair: a.send(0, TOKEN, {1: b.name}, pair))
    assert found.keys() == {0}
    assert "is /proc mounted?" in found[0]


@pytest.mark.parametrize("number", [0, 1])
def test_a_descriptor_that_is_missing_is_noticed(number: int) -> None:
    """As the kernel leaves them out where the receiver can open no more."""

    def send(_: DescriptorExchange, receiver: DescriptorExchange, pair: tuple[int, int]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.connect(f"\0{receiver.name}")
            message = b'{"process": 0, "token": "the world\'s"}'
            socket.send_fds(end, [message], pair[:number])

    found = refusals(send)
    assert f"{number} descriptors came, not 2" in found[0]


def test_a_second_message_of_a_process_is_refused_and_the_first_stays() -> None:
    with ends(2) as (sender, receiver), own() as pair:
        for _ in range(2):
            assert sender.send(0, TOKEN, {1: receiver.name}, pair) == {}
        receiver.take(TOKEN, [0])
        assert receiver.taken.keys() == {0}
        assert receiver.refused == {-1: "process 0 sent twice"}


def test_who_connects_and_says_nothing_holds_nobody_up() -> None:
    with ends(2) as (sender, receiver), own() as pair:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            silent.connect(f"\0{receiver.name}")
            sender.send(0, TOKEN, {1: receiver.name}, pair)
            receiver.take(TOKEN, [0])
            assert receiver.taken.keys() == {0}
        receiver.take(TOKEN, [0])  # it has gone
        assert receiver.taken.keys() == {0}


def test_those_who_say_nothing_are_kept_up_to_a_bound() -> None:
    with ends(2) as (sender, receiver), own() as pair, contextlib.ExitStack() as stack:
        before = len(descriptors())
        for _ in range(10):
            for _ in range(8):  # as many as may come at once
                end = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                end.connect(f"\0{receiver.name}")
            receiver.take(TOKEN, [0])
        assert len(descriptors()) - before == 80 + 16, "80 are ours, 16 are kept"
        assert sender.send(0, TOKEN, {1: receiver.name}, pair) == {}
        receiver.take(TOKEN, [0])
        assert receiver.taken.keys() == {0}


def test_names_at_which_nobody_listens_are_said_and_the_others_served() -> None:
    """As where an image was cloned after it had booted: one boot number on two machines."""
    with ends(2) as (sender, receiver), own() as pair:
        failed = sender.send(0, TOKEN, {5: "lossycoll-of-a-clone", 1: receiver.name}, pair)
        assert failed == {5: "sending it memory failed: Connection refused"}
        receiver.take(TOKEN, [0])
        assert receiver.taken.keys() == {0}


def test_a_listener_that_never_takes_anything_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptor_exchange, "FULL_SECONDS", 0.05)
    with ends(1) as (sender,), own() as pair, contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        full.bind(f"\0{sender.name}-full")
        full.listen(0)
        for _ in range(2):
            end = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            end.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                end.connect(f"\0{sender.name}-full")
        failed = sender.send(0, TOKEN, {1: f"{sender.name}-full"}, pair)
        assert failed == {1: "sending it memory failed: Resource temporarily unavailable"}


def test_who_may_send_no_more_takes_what_came_and_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user's descriptors under way are limited, and the others may wait for this one's."""
    works = descriptor_exchange._send_one
    with ends(2) as (one, other), own() as pair:
        assert other.send(1, TOKEN, {0: one.name}, pair) == {}

        def limited(name: str, message: bytes, descriptors: tuple[int, int]) -> None:
            if not one.taken:
                raise OSError(errno.ETOOMANYREFS, "Too many references")
            works(name, message, descriptors)

        monkeypatch.setattr(descriptor_exchange, "_send_one", limited)
        assert one.send(0, TOKEN, {1: other.name}, pair) == {}
        other.take(TOKEN, [0])
        assert one.taken.keys() == {1}
        assert other.taken.keys() == {0}


def test_seals_are_those_of_the_kernel() -> None:
    made = memory()
    try:
        assert fcntl.fcntl(made, fcntl.F_GET_SEALS) == 0x2 | 0x4 | 0x10
    finally:
        os.close(made)
