"""A peer's connection to the directory: one thread that keeps it up, and what comes over it.

With each connection a peer comes anew, as one that others may have been told is lost: it is another
for them, with keys of its own.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from lossycoll.errors import LossyError, OperationTimeout, RendezvousError
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.membership.framing import Framed
from lossycoll.runtime.membership.sealed_framing import framed_with

from .protocol import (
    PLACES,
    VERSION,
    Agreed,
    Averages,
    Beat,
    Directories,
    Gone,
    Group,
    Here,
    Join,
    Joined,
    Leave,
    Malformed,
    Message,
    Peers,
    Ready,
    Refused,
    Serves,
    Who,
    pack,
    unpack,
)

CONNECT_SECONDS: Final = 5.0
AGAIN_SECONDS: Final = 0.5
"""Between two tries to reach a directory."""


class DirectoryClient:
    """``connect`` first; the thread is there until ``close``.

    Args:
        directories: (host, port) of each that may be asked, the first that answers is.
        name: The peer's.
        secret: The swarm's; None: all is in clear.
        on_gone: Called by the thread when a peer has gone, with the coming that is over.
    """

    def __init__(
        self,
        directories: Sequence[tuple[str, int]],
        name: str,
        secret: Secret | None,
        on_gone: Callable[[str], None],
    ) -> None:
        self._first = list(directories)
        self._directories = list(directories)
        self._secret = secret
        self._on_gone = on_gone
        self._name = name
        self._broken = threading.Event()
        """The connection is to end, and another to be made."""
        self.joined: Joined | None = None
        self.peers = 0
        self._round = 0
        self._standing: list[Message] = []
        """What each directory is to hear of this peer, in this order."""
        self._ready: tuple[int, Ready] | None = None
        """Which of its rounds this peer is ready for."""
        self._rounds = 0
        self._asks = False
        self._agreed: Agreed | None = None
        self._names: tuple[str, ...] | None = None
        self._group: Group | None = None
        self._failure: LossyError | None = None
        self._changed = threading.Condition()
        self._framed: Framed | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="lossycoll-peer", daemon=True)

    # ---- by callers ----

    def connect(self, timeout: float) -> Joined:
        """Joins the swarm.

        Raises:
            RendezvousError: No directory answers in ``timeout`` seconds, or it refuses this peer.
        """
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self.joined or self._failure, timeout)
            if self._failure is not None:
                raise self._failure
            if self.joined is None:
                raise RendezvousError(
                    f"peer {self._name!r}: no directory answers at {_listed(self._directories)} "
                    f"within {timeout:g} s; is it running, reachable, and of the same secret?"
                )
            return self.joined

    def say(self, message: Here | Serves | Averages) -> None:
        """Tells the directory, and each that takes its place."""
        with self._changed:
            others = [one for one in self._standing if type(one) is not type(message)]
            self._standing = [*others, message]
        self._nudge()

    def averages(self, schema: str, grid: str, timeout: float) -> None:
        """Says what this peer averages.

        Raises:
            RendezvousError: Others average something else, or on another grid.
            OperationTimeout: The directory doesn't answer within ``timeout`` seconds.
        """
        self._agreed = None
        self.say(Averages(schema, grid))
        agreed: Agreed = self._awaited(lambda: self._agreed, timeout)
        if agreed.reason:
            raise RendezvousError(f"peer {self._name!r}: {agreed.reason}")

    def names(self, timeout: float) -> tuple[str, ...]:
        """Of all peers.

        Raises:
            OperationTimeout: The directory doesn't answer within ``timeout`` seconds.
        """
        with self._changed:
            self._names, self._asks = None, True
        self._nudge()
        found: tuple[str, ...] = self._awaited(lambda: self._names, timeout)
        return found

    def next_group(self, weight: float, timeout: float) -> Group:
        """The group of the next round, in which what this peer has counts ``weight``.

        Raises:
            OperationTimeout: There is none within ``timeout`` seconds.
            LossyError: The directory refuses this peer.
        """
        with self._changed:
            self._rounds += 1
            self._group, self._ready = None, (self._rounds, Ready(weight))
        self._nudge()
        try:
            group: Group = self._awaited(lambda: self._group, timeout)
        except OperationTimeout:
            self._broken.set()  # the directory may still take this peer for one that is ready
            self._nudge()
            raise
        finally:
            with self._changed:
                self._ready = None
        self._round = group.round + 1
        return group

    def _awaited(self, found: Callable[[], Any], timeout: float) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: found() is not None or self._failure, timeout)
            if found() is not None:
                return found()
        raise self._failure or OperationTimeout(
            f"peer {self._name!r}: no answer of a directory for {timeout:g} s; tried: "
            f"{_listed(self._directories)}"
        )

    def close(self) -> None:
        """Leaves the swarm. Idempotent."""
        if self._stop:
            return
        self._stop = True
        self._nudge()
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._wake)

    # ---- the thread ----

    def _nudge(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while not self._stop and self._failure is None:
            for place in self._directories:
                if self._stop or self._talk(place):
                    break
            if not self._stop and self._failure is None:
                self._pause()
        if self._framed is not None:
            self._framed.close()

    def _pause(self) -> None:
        readable = select.poll()
        readable.register(self._wake, select.POLLIN)
        readable.poll(1000 * AGAIN_SECONDS)

    def _talk(self, place: tuple[str, int]) -> bool:
        """Until the connection ends. Returns whether there was one."""
        try:
            end = socket.create_connection(place, CONNECT_SECONDS)
        except OSError:
            return False
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        framed = self._framed = framed_with(self._secret, end, connects=True)
        number, session = PLACES, "0" * 16
        if self.joined is not None:
            number, session = self.joined.number, self.joined.session
        coming = secrets.token_hex(16)
        framed.write(pack(Join(VERSION, self._name, coming, number, session, self._round)))
        self._broken.clear()
        said: list[object] = []
        answered, beat_at = False, 0.0
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while not (framed.broken or self._broken.is_set() or self._stop or self._failure):
            poller.register(framed.fd, select.POLLIN | (select.POLLOUT * framed.has_unsent))
            lease = self.joined.lease if self.joined else CONNECT_SECONDS
            for fd, flags in poller.poll(1000 * lease / 3):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif flags & select.POLLOUT:
                    framed.flush()
            for body in framed.read():
                answered |= self._take(body)
            if answered:
                self._say(framed, said)
                if time.monotonic() - beat_at > lease / 3:
                    beat_at = time.monotonic()
                    framed.write(pack(Beat(self.peers)))
        if self._stop and not framed.broken:
            framed.write(pack(Leave()))
            framed.finish()
        framed.close()
        self._framed = None
        return True

    def _say(self, framed: Framed, said: list[object]) -> None:
        """What callers want said, if it hasn't been over this connection."""
        with self._changed:
            standing, ready, asks = list(self._standing), self._ready, self._asks
            self._asks = False
        for message in standing:
            if message not in said:
                framed.write(pack(message))
        if asks:
            framed.write(pack(Who()))
        if ready is not None and ready not in said:
            framed.write(pack(ready[1]))
        said[:] = [*standing, ready]

    def _take(self, body: bytes) -> bool:
        """Returns whether this peer is in the swarm now."""
        try:
            message: Message = unpack(body)
        except Malformed:
            return False
        with self._changed:
            if isinstance(message, Joined):
                self.joined = self.joined or message
            elif isinstance(message, Refused):
                self._failure = RendezvousError(f"peer {self._name!r}: {message.reason}")
            elif isinstance(message, Group):
                self._group, self._ready = message, None
            elif isinstance(message, Beat):
                self.peers = message.peers
            elif isinstance(message, Agreed):
                self._agreed = message
            elif isinstance(message, Peers):
                self._names = message.names
            elif isinstance(message, Directories):
                known = list(message.places)
                self._directories = known + [one for one in self._first if one not in known]
            self._changed.notify_all()
        if isinstance(message, Gone):
            self._on_gone(message.coming)
        return isinstance(message, Joined)


def _listed(places: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{host}:{port}" for host, port in places)
