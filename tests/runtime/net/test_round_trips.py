"""Round trips as the kernel measures them: to whom there is an answer, and what is none."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator

import pytest

from lossycoll.runtime.net import round_trips as module
from lossycoll.runtime.net.round_trips import round_trips


def listener(address: str, stack: contextlib.ExitStack, backlog: int = 8) -> tuple[str, int]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    end = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    try:
        end.bind((address, 0))
    except OSError:
        pytest.skip(f"there is no {address}")
    end.listen(backlog)
    return address, end.getsockname()[1]


def full(stack: contextlib.ExitStack) -> tuple[str, int]:
    """Where a kernel answers nobody, as if the packets were lost: nobody is taken, and no more may
    wait."""
    place = listener("127.0.0.1", stack, backlog=0)
    for _ in range(4):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(place)
    time.sleep(0.05)
    return place


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_listeners_answer_and_leave_nothing_open(address: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        places = {number: listener(address, stack) for number in (3, 5)}
        found = round_trips(places)
        assert found.keys() == {3, 5}
        assert all(0 < seconds < 10 for seconds in found.values())
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_doesnt_answer_is_left_out_within_the_time() -> None:
    with contextlib.ExitStack() as stack:
        silent = full(stack)
        closed = stack.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))
        places = {0: listener("127.0.0.1", stack), 1: silent, 2: closed.getsockname()}
        before = len(os.listdir("/proc/self/fd"))
        assert round_trips(places, tries=2, seconds=0.2).keys() == {0}
        assert len(os.listdir("/proc/self/fd")) == before


def test_two_answers_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def counted(places: dict[int, tuple[str, int]]) -> Iterator[tuple[int, socket.socket]]:
        begun.append(1)
        return begin(places)

    begin = module._begun
    monkeypatch.setattr(module, "_begun", counted)
    # A busy machine may take longer to answer than tries are apart.
    monkeypatch.setattr(module, "APART_SECONDS", 1.0)
    with contextlib.ExitStack() as stack:
        found = round_trips({4: listener("127.0.0.1", stack)}, tries=9, seconds=10.0)
        assert found.keys() == {4}
    assert len(begun) == 2


def test_a_process_without_descriptors_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", refused)
    assert round_trips({0: ("127.0.0.1", 1)}) == {}


def test_the_quickest_try_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    takes = iter([0.0, 0.01, 0.03])
    monkeypatch.setattr(module, "_taken", lambda _: next(takes))
    with contextlib.ExitStack() as stack:
        place = listener("127.0.0.1", stack)
        assert round_trips({7: place}) == {7: 0.01}
