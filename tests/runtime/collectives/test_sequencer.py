"""One caller submits at a time, none during a view change, and Ctrl-C leaves no lock held."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeAlias

import pytest

from lossycoll.errors import ClosedError
from lossycoll.runtime.collectives import operations
from lossycoll.runtime.collectives.group_context import Members
from lossycoll.runtime.collectives.operations import InterruptSafeLock, Sequencer
from lossycoll.runtime.world.messages import View

Lock: TypeAlias = "threading.Lock | threading.RLock | InterruptSafeLock"


def interrupt_when_taken(lock: Lock, submit: Callable[[], None]) -> None:
    """Runs ``submit`` with Ctrl-C at the moment at which it gets ``lock``.

    Another thread gives the lock away and sends the signal, and lets nobody run in between. So the
    waiter takes the lock first, and then hears of the signal.
    """
    held, begun = threading.Event(), threading.Event()

    def hand_over() -> None:
        lock.acquire()
        held.set()
        begun.wait()
        lock.release()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    other = threading.Thread(target=hand_over)
    before = sys.getswitchinterval()
    # Another test of this process may have left torchelastic's handler, which raises its own error.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    other.start()
    held.wait()
    sys.setswitchinterval(60)
    try:
        begun.set()  # the other thread runs once this one waits for the lock
        with pytest.raises(KeyboardInterrupt):
            submit()
    finally:
        sys.setswitchinterval(before)
        other.join()
        signal.signal(signal.SIGINT, handler)


def is_free(lock: Lock) -> bool:
    """Asked by another thread: the lock may be one that its owner can take again."""
    free: list[bool] = []

    def ask() -> None:
        free.append(lock.acquire(blocking=False))
        if free[0]:
            lock.release()

    other = threading.Thread(target=ask)
    other.start()
    other.join()
    return free[0]


@pytest.mark.parametrize("kind", [operations.INTERRUPT_SAFE, InterruptSafeLock])
def test_an_interrupt_that_comes_as_the_lock_is_taken_gives_it_back(
    kind: Callable[[], Lock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the lock that newer Pythons need; older ones can have it."""
    monkeypatch.setattr(operations, "INTERRUPT_SAFE", kind)
    mine = Sequencer(0, 2, lambda: None)

    def submit() -> None:
        with mine.lock:
            mine.members()
            raise AssertionError("the interrupt came too late")

    for _ in range(20):
        interrupt_when_taken(mine.lock, submit)
        assert is_free(mine.lock)


def test_the_interrupt_comes_when_the_lock_is_taken() -> None:
    """What the test above relies on: code that isn't safe then is caught."""
    lock = threading.Lock()

    def submit() -> None:
        lock.acquire()
        try:
            raise AssertionError("the interrupt came too late")
        finally:
            lock.release()

    interrupt_when_taken(lock, submit)
    assert not is_free(lock)


def test_an_interrupt_during_a_view_change_gives_the_lock_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = Sequencer(0, 2, lambda: None)
    mine.stop()
    free = []

    def sleep(seconds: float) -> None:
        free.append(is_free(mine.lock))
        raise KeyboardInterrupt

    monkeypatch.setattr(operations, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(KeyboardInterrupt), mine.lock:
        mine.members()
    assert free == [True], "whoever waits keeps the control plane out"
    assert is_free(mine.lock)


def test_nobody_submits_before_a_view_change_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Sequencer(0, 3, lambda: None)
    mine.next = 5
    assert mine.stop() == 5
    views = [View(0, (0, 1, 2)), View(5, (0, 2))]
    # The first change isn't the last: another rank is lost meanwhile.
    steps = iter([(views, False), ([*views, View(5, (0,))], True)])

    def sleep(seconds: float) -> None:
        changed, agreed = next(steps)
        mine.resume(changed, agreed=agreed)

    monkeypatch.setattr(operations, "time", SimpleNamespace(sleep=sleep))
    with mine.lock:
        assert mine.members() == Members(3, 0, (0,))
    assert next(steps, None) is None
    assert mine.at(4).complete
    assert mine.latest.lost == (1, 2)


def test_a_failure_ends_the_wait_for_a_view_change() -> None:
    def check() -> None:
        raise ClosedError("gone")

    mine = Sequencer(0, 2, check)
    mine.stop()
    with pytest.raises(ClosedError, match="gone"), mine.lock:
        mine.members()
    assert is_free(mine.lock)
