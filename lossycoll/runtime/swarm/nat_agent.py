"""NAT agent of a peer: learns its reflexive address and keeps its routes open. A thread sends
connectivity checks and keepalives by the engine's socket. It asks the directory for the socket's
reflexive address and drives the ICE agent (ice_agent.py)."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lossycoll.errors import ClosedError
from lossycoll.runtime.control.schema import Address, Malformed
from lossycoll.runtime.engine.host import OutOfBand

from .ice_agent import (
    DIRECTORY,
    NONCE,
    NOTHING,
    ConnectivityMessage,
    Forged,
    IceAgent,
    Kind,
    Route,
    Sends,
    pack,
    unpack,
)
from .protocol import Member

KEEPALIVE_SECONDS: Final = 15.0
"""Between two keepalives to the directory and to each peer, so that NAT mappings stay. Many are
kept for 30 s, and should be for two minutes (RFC 4787, section 4.3)."""
ROUTE_SECONDS: Final = 2.5  # for which a route to a peer is looked for
REFLEXIVE_SECONDS: Final = 1.0  # for which the directory's first answer is waited for
ASK_AGAIN: Final = 0.1
ASKS: Final = 8  # times that it is asked at such intervals, until the next sign of life


@dataclass(eq=False)
class NatAgent:
    """NAT agent of one peer, until ``close``. Any thread may call. ``out_of_band``: of its engine,
    which has been started. ``directory``: address of the present directory; None: none knows
    reflexive addresses. ``on_reflexive``: called by the thread with a new reflexive address, and
    whether the same directory saw another one before. ``keepalive``: seconds between two signs of
    life."""

    out_of_band: OutOfBand
    number: int
    key: bytes
    directory: Callable[[], Address | None]
    on_reflexive: Callable[[Address, bool], None]
    keepalive: float

    def __post_init__(self) -> None:
        self._ice = IceAgent(self.number, time.monotonic, self.keepalive)
        self._asked: tuple[bytes, Address] = NOTHING, ("", 0)
        """The latest question to a directory: nonce, and which."""
        self._asks_left = ASKS
        self._asks_at = 0.0
        self._keepalive_at = time.monotonic() + self.keepalive
        self._reflexive: tuple[Address, Address] | None = None
        """Reflexive address of the socket, and the directory that has seen it."""
        self._changed = threading.Condition()
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="lossycoll-nat-agent", daemon=True)
        self._thread.start()

    def reflexive_address(self, timeout: float = REFLEXIVE_SECONDS) -> Address | None:
        """Return the reflexive address of the socket; None: no directory has told it within
        ``timeout`` seconds."""
        if self.directory() is None:
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._reflexive is not None, timeout)
            return None if self._reflexive is None else self._reflexive[0]

    def find_routes(
        self, members: Sequence[Member], own: str, timeout: float = ROUTE_SECONDS
    ) -> dict[int, Route]:
        """Finds routes to peers, which look for one to this peer at the same time. Returns the
        route to each peer that has one, by its number. ClosedError: this peer has left the swarm.
        """
        ice, found = self._ice, dict[int, Route]()
        with self._changed:
            for one in members:
                self._say(ice.begin(one, own))
            self._nudge()
            self._changed.wait_for(
                lambda: self._closed or not any(map(ice.is_trying, members)), timeout
            )
            if self._closed:
                raise ClosedError(f"peer {self.number} has left the swarm")
            for one in members:
                ice.give_up(one.incarnation)
                if (route := ice.route(one, own)) is not None:
                    found[one.number] = route
        return found

    def give_up(self, incarnation: str) -> None:
        with self._changed:
            self._ice.give_up(incarnation)
            self._changed.notify_all()

    def forget(self, number: int) -> None:
        with self._changed:
            self._ice.forget(number)

    def ask(self) -> None:
        with self._changed:
            self._asks_left, self._asks_at = ASKS, 0.0
            self._nudge()

    @property
    def counts(self) -> Counter[str]:
        """Datagrams that changed nothing, by why: those of :class:`IceAgent`; forged: nobody of
        this swarm has made it; malformed: no message; dropped: too long, or more than was taken."""
        with self._changed:
            return self._ice.counts + Counter(dropped=self.out_of_band.dropped)

    def close(self) -> None:
        """End the thread; callers that look for routes get ClosedError. Idempotent."""
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
        for descriptor in (self._wake, self.out_of_band.descriptor):
            poller.register(descriptor, select.POLLIN)
        while not self._closed:
            for descriptor, _ in poller.poll(1000 * self._wait()):
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(descriptor)
            while not self._closed and (heard := self.out_of_band.heard()) is not None:
                self._take(*heard)
            with self._changed:
                self._say(self._ice.due())
                self._send_keepalives()

    def _wait(self) -> float:
        with self._changed:
            times = [self._ice.wakes(), self._keepalive_at, self._asks_at]
        soonest = min(one for one in times if one is not None)
        return max(0.0, soonest - time.monotonic())

    def _send_keepalives(self) -> None:
        now = time.monotonic()
        if now >= self._keepalive_at:
            self._keepalive_at = now + self.keepalive
            self._say(self._ice.keepalives())
        if now < self._asks_at:
            return
        place = self.directory()
        if place is None:
            self._asks_at = now + self.keepalive
            return
        nonce, asked = self._asked
        if nonce == NOTHING or asked != place:  # else an answer to it may be on its way
            nonce = secrets.token_bytes(NONCE)
        self._asked = nonce, place
        self._say([(place, ConnectivityMessage(Kind.CHECK, self.number, DIRECTORY, nonce=nonce))])
        self._asks_left -= 1
        self._asks_at = now + (ASK_AGAIN if self._asks_left else self.keepalive)
        self._asks_left = max(1, self._asks_left)

    def _take(self, source: Address, data: bytes) -> None:
        try:
            message = unpack(data, self.key)
        except Malformed as error:
            self._ice.counts["forged" if isinstance(error, Forged) else "malformed"] += 1
            return
        if message.sender == DIRECTORY:
            self._reflexive_received(message)
            return
        with self._changed:
            self._say(self._ice.heard(message, source))
            self._changed.notify_all()

    def _reflexive_received(self, message: ConnectivityMessage) -> None:
        with self._changed:
            nonce, place = self._asked
            fits = message.kind == Kind.ANSWER and message.receiver == self.number
            if not fits or message.reflexive is None or message.echo != nonce or nonce == NOTHING:
                self._ice.counts["stale"] += 1
                return
            self._asked = NOTHING, place
            self._asks_left, self._asks_at = 1, time.monotonic() + self.keepalive
            before, self._reflexive = self._reflexive, (message.reflexive, place)
            self._changed.notify_all()
        if before != self._reflexive:
            moved = before is not None and before[1] == place
            self.on_reflexive(message.reflexive, moved)

    def _say(self, sends: Sends) -> None:
        for place, message in sends:
            self.out_of_band.say(place, pack(message, self.key))
