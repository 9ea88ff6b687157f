"""A peer's knocks: by its engine's socket, on a thread of its own.

It asks the directory how the world sees the socket, meets peers (meetings.py), and keeps what lies
between open for as long as the peer is in the swarm.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lossycoll.errors import ClosedError
from lossycoll.runtime.engine.out_of_band import OutOfBand, Place
from lossycoll.runtime.membership.messages import Malformed

from .knock import DIRECTORY, NONCE, NOTHING, Forged, Kind, Knock, pack, unpack
from .meetings import Counts, Meetings, Route, Sends
from .protocol import Member

KEEP_SECONDS: Final = 15.0
"""Between two signs of life to the directory and to each peer, so that mappings stay. Many are kept
for 30 s, and should be for two minutes (RFC 4787, section 4.3)."""
MEET_SECONDS: Final = 2.5
"""For which a peer is tried to be met."""
OBSERVE_SECONDS: Final = 1.0
"""For which the directory's first answer is waited for."""
ASK_AGAIN: Final = 0.1
ASKS: Final = 8
"""Times that it is asked at such intervals, until the next sign of life."""


@dataclass(slots=True)
class KnockerCounts(Counts):
    """What came by the socket and changed nothing. ``forged``: nobody of this swarm has made it;
    ``malformed``: no knock; ``dropped``: too long, or more than was taken."""

    forged: int = 0
    malformed: int = 0
    dropped: int = 0


class Knocker:
    """Of one peer, until ``close``. Any thread may call.

    Args:
        out_of_band: Of its engine, which has been started.
        number: The peer's.
        key: What knocks of the swarm are known by.
        directory: Whom to ask how the socket is seen, at present; None: nobody can say.
        on_seen: Called by the thread when the directory says something new: how the socket is seen,
            and whether the same directory saw it otherwise before.
        keep: Seconds between two signs of life.
    """

    def __init__(
        self,
        out_of_band: OutOfBand,
        number: int,
        key: bytes,
        directory: Callable[[], Place | None],
        on_seen: Callable[[Place, bool], None],
        keep: float = KEEP_SECONDS,
    ) -> None:
        self._out_of_band = out_of_band
        self._number = number
        self._key = key
        self._directory = directory
        self._on_seen = on_seen
        self._keep = keep
        self._meetings = Meetings(number, time.monotonic, keep)
        self._counts = KnockerCounts()
        self._asked: tuple[bytes, Place] = NOTHING, ("", 0)
        """The latest question to a directory: nonce, and which."""
        self._asks_left = ASKS
        self._asks_at = 0.0
        self._alive_at = time.monotonic() + keep
        self._seen: tuple[Place, Place] | None = None
        """How the socket is seen, and by which directory."""
        self._changed = threading.Condition()
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="lossycoll-knocker", daemon=True)
        self._thread.start()

    def seen(self, timeout: float = OBSERVE_SECONDS) -> Place | None:
        """How the directory sees the socket; None: it hasn't said so within ``timeout`` seconds, or
        there is none that could."""
        if self._directory() is None:
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._seen is not None, timeout)
            return None if self._seen is None else self._seen[0]

    def meet(
        self, members: Sequence[Member], own: str, timeout: float = MEET_SECONDS
    ) -> dict[int, Route]:
        """Finds routes to peers, which look for one to this peer at the same time.

        Args:
            members: The peers.
            own: This peer's coming.
            timeout: Seconds.

        Returns:
            The route to each that was met, by its number.

        Raises:
            ClosedError: This peer has left the swarm.
        """
        meetings = self._meetings

        def found() -> dict[int, Route]:
            routes = [(one.number, meetings.route(one, own)) for one in members]
            return {number: route for number, route in routes if route is not None}

        with self._changed:
            for one in members:
                self._say(meetings.begin(one, own))
            self._nudge()
            self._changed.wait_for(
                lambda: self._closed or not any(map(meetings.tries, members)), timeout
            )
            if self._closed:
                raise ClosedError(f"peer {self._number} has left the swarm")
            for one in members:
                meetings.give_up(one.coming)
            return found()

    def give_up(self, coming: str) -> None:
        """A peer has gone: nobody waits until it is met."""
        with self._changed:
            self._meetings.give_up(coming)
            self._changed.notify_all()

    def forget(self, number: int) -> None:
        """A peer has gone."""
        with self._changed:
            self._meetings.forget(number)

    def ask(self) -> None:
        """Another directory may be asked now."""
        with self._changed:
            self._asks_left, self._asks_at = ASKS, 0.0
            self._nudge()

    @property
    def counts(self) -> KnockerCounts:
        """What came and changed nothing."""
        with self._changed:
            found, own = self._meetings.counts, self._counts
            return KnockerCounts(
                found.foreign, found.stale, own.forged, own.malformed, self._out_of_band.dropped
            )

    def close(self) -> None:
        """Whoever is meeting somebody hears that it is over. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            self._nudge()
        self._thread.join()
        with self._changed:
            os.close(self._wake)
            self._wake = -1

    # ---- the thread ----

    def _nudge(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poller = select.poll()
        for descriptor in (self._wake, self._out_of_band.descriptor):
            poller.register(descriptor, select.POLLIN)
        while not self._closed:
            for descriptor, _ in poller.poll(1000 * self._wait()):
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(descriptor)
            while not self._closed and (heard := self._out_of_band.heard()) is not None:
                self._take(*heard)
            with self._changed:
                self._say(self._meetings.due())
                self._keep_open()

    def _wait(self) -> float:
        with self._changed:
            times = [self._meetings.wakes(), self._alive_at, self._asks_at]
        soonest = min(one for one in times if one is not None)
        return max(0.0, soonest - time.monotonic())

    def _keep_open(self) -> None:
        now = time.monotonic()
        if now >= self._alive_at:
            self._alive_at = now + self._keep
            self._say(self._meetings.alive())
        if now < self._asks_at:
            return
        place = self._directory()
        if place is None:
            self._asks_at = now + self._keep
            return
        nonce, asked = self._asked
        if nonce == NOTHING or asked != place:  # else an answer to it may be on its way
            nonce = secrets.token_bytes(NONCE)
        self._asked = nonce, place
        self._say([(place, Knock(Kind.KNOCK, self._number, DIRECTORY, nonce=nonce))])
        self._asks_left -= 1
        if self._asks_left > 0:
            self._asks_at = now + ASK_AGAIN
        else:
            self._asks_left, self._asks_at = 1, now + self._keep

    def _take(self, source: Place, data: bytes) -> None:
        try:
            knock = unpack(data, self._key)
        except Forged:
            self._counts.forged += 1
            return
        except Malformed:
            self._counts.malformed += 1
            return
        if knock.sender == DIRECTORY:
            self._observed(knock)
            return
        with self._changed:
            self._say(self._meetings.heard(knock, source))
            self._changed.notify_all()

    def _observed(self, knock: Knock) -> None:
        with self._changed:
            nonce, place = self._asked
            fits = knock.kind == Kind.ANSWER and knock.receiver == self._number
            if not fits or knock.seen is None or knock.echo != nonce or nonce == NOTHING:
                self._meetings.counts.stale += 1
                return
            self._asked = NOTHING, place
            self._asks_left, self._asks_at = 1, time.monotonic() + self._keep
            before, self._seen = self._seen, (knock.seen, place)
            self._changed.notify_all()
        if before != self._seen:
            moved = before is not None and before[1] == place
            self._on_seen(knock.seen, moved)

    def _say(self, sends: Sends) -> None:
        for place, knock in sends:
            self._out_of_band.say(place, pack(knock, self._key))
