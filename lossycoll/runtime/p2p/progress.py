"""Who moves the messages of a group: the thread that waits for one, or else one of its own.

Whoever waits does it himself, which saves a change of threads for each message. The group's own
thread does it while something is under way and nobody waits; otherwise it sleeps.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

SLICE_SECONDS: Final = 0.05
"""Longest stay in the kernel: how late it may be noticed that another thread ended something."""
LEASE_SECONDS: Final = 4 * SLICE_SECONDS
"""How long a thread counts as the one that moves messages if it doesn't say so again."""
TICK_SECONDS: Final = 0.0005
"""How soon the group's thread takes over from one that no longer waits."""
STAY_SECONDS: Final = 0.05
"""How long it goes on ticking when nothing is under way, which saves waking it each time."""

Events = list[tuple[int, int]]


class Waited(Protocol):
    """What a thread waits for; ``bell`` rings when it is done."""

    @property
    def done(self) -> bool: ...
    @property
    def bell(self) -> threading.Event: ...


class Pump:
    """``handle`` takes what epoll found, and is called now and then without any; it locks.

    ``busy``: whether anything is under way. Two threads may move messages at once for a moment
    (an interrupted one gives up its place only when its lease ends): that does no harm.
    """

    def __init__(self, handle: Callable[[Events], None], busy: Callable[[], bool]) -> None:
        self._handle = handle
        self._busy = busy
        self._bell = threading.Event()
        self._parked = False
        self._lead_until = 0.0
        self._turns = 0
        self._poller: select.epoll | None = select.epoll()
        self._thread = threading.Thread(target=self._run, name="lossycoll-messages", daemon=True)
        self._thread.start()

    def watch(self, descriptor: int, *, writable: bool, new: bool = False) -> None:
        if self._poller is not None:
            events = select.EPOLLIN | (select.EPOLLOUT if writable else 0)
            (self._poller.register if new else self._poller.modify)(descriptor, events)

    def unwatch(self, descriptor: int) -> None:
        if self._poller is not None:
            self._poller.unregister(descriptor)

    def wake(self) -> None:
        """Something is under way that may not have been before."""
        if self._parked:
            self._bell.set()

    def drive(self, waited: Waited, end: float) -> None:
        """Moves messages until ``waited`` is done or it is ``end`` (of time.monotonic()), or waits
        a while for another thread that moves them."""
        now = time.monotonic()
        if now < self._lead_until:
            bell = waited.bell
            if not waited.done:  # looked at after there is a bell, so that it rings
                bell.wait(min(SLICE_SECONDS, max(0.0, end - now)))
            return
        try:
            while not waited.done and now < end and self._poller is not None:
                self._lead_until = now + LEASE_SECONDS
                self._turn(min(SLICE_SECONDS, end - now))
                now = time.monotonic()
        finally:
            self._lead_until = 0.0
            if self._busy():
                self._bell.set()

    def glance(self) -> None:
        """Moves what can be moved at once."""
        if time.monotonic() >= self._lead_until:
            self._turn(0)

    def stop(self) -> None:
        """From now on nobody moves anything. Whoever is in the kernel still holds the epoll."""
        self._poller = None
        self._bell.set()

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _turn(self, seconds: float) -> None:
        poller = self._poller
        if poller is not None:
            events = poller.poll(seconds)
            self._turns += 1
            self._handle(events)

    def _run(self) -> None:
        seen = -1
        active = time.monotonic()
        while self._poller is not None:
            now = time.monotonic()
            if self._busy():
                active = now
                if now < self._lead_until:  # it rings the bell when it leaves something undone
                    self._rest(SLICE_SECONDS)
                elif self._turns != seen:  # whoever left may be back at once
                    seen = self._turns
                    self._rest(TICK_SECONDS)
                else:
                    self._lead()
                    seen = self._turns
            elif now - active < STAY_SECONDS:
                self._rest(TICK_SECONDS)
            else:
                self._park()
                seen, active = -1, time.monotonic()

    def _lead(self) -> None:
        try:
            while self._busy() and self._poller is not None:
                self._lead_until = time.monotonic() + LEASE_SECONDS
                self._turn(SLICE_SECONDS)
        finally:
            self._lead_until = 0.0

    def _rest(self, seconds: float) -> None:
        self._bell.wait(seconds)
        self._bell.clear()

    def _park(self) -> None:
        self._parked = True
        # What came under way just before would not have rung.
        while not self._busy() and self._poller is not None:
            self._bell.wait()
            self._bell.clear()
        self._parked = False
