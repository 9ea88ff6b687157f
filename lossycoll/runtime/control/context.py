"""ZeroMQ's context of this process, and the CURVE keys that connections are sealed with.

All transports of the process share the context, and its one I/O thread, while there are any.

All processes of a job derive the same two key pairs for each plane: a listener's and a caller's.
Neither public key is ever sent in clear, so only a process that has the secret can begin a
handshake. The roster (ZAP, ZeroMQ's RFC 27) is the second check: it refuses any other caller's key.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lossycoll.runtime.keys.secret import Secret

if TYPE_CHECKING:
    import zmq

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
"""Endpoint that libzmq asks (RFC 27)."""
DESCRIPTORS: Final = 12
"""Descriptors of a context and its first transport."""


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair. Both keys are Z85 text."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Keys:
    """Keys of one plane."""

    plane: str  # its name, which is also the domain of its roster
    listener: KeyPair  # of whoever is connected to
    caller: KeyPair  # of whoever connects


def keys_of(secret: Secret, plane: str) -> Keys:
    """Keys of a plane. Processes of planes of different names can't connect."""
    import zmq
    from zmq.utils import z85

    pairs = []
    for role in ("listener", "caller"):
        private = z85.encode(secret.derived("curve", plane, role))
        pairs.append(KeyPair(zmq.curve_public(private), private))
    return Keys(plane, *pairs)


class Roster:
    """ZAP handler of a context: admits callers by their public keys.

    It has no thread, which would wait for the interpreter's lock ten times for each handshake: all
    transports that listen poll ``fd``, and whichever is awake calls :meth:`serve`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        import zmq

        self.admitted: set[tuple[bytes, bytes]] = set()
        """Domain and binary public key."""
        self._lock = threading.Lock()
        self.socket = context.socket(zmq.REP)
        self.socket.bind(ZAP_ENDPOINT)
        self.fd = int(self.socket.getsockopt(zmq.FD))

    def serve(self) -> None:
        """Answers what has been asked. By any thread."""
        import zmq

        with self._lock, contextlib.suppress(zmq.Again):
            while True:
                version, number, domain, _, _, mechanism, *key = self.socket.recv_multipart(
                    zmq.DONTWAIT
                )
                known = mechanism == b"CURVE" and (domain, *key) in self.admitted
                code, text = (b"200", b"OK") if known else (b"400", b"not in the roster")
                self.socket.send_multipart([version, number, code, text, b"", b""])


class SharedContext:
    """Counts its users: the first one makes the context, and the last one ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._roster: Roster | None = None

    def acquire(self, keys: Keys | None) -> tuple[zmq.Context[zmq.Socket[bytes]], Roster | None]:
        """Returns the context, and with keys its roster, which then admits their callers. OSError:
        the process is short of descriptors."""
        import zmq

        with self._lock:
            if self._context is None:
                _try_descriptors()
                self._context = zmq.Context(io_threads=1)
            try:
                if keys is not None:
                    from zmq.utils import z85

                    if self._roster is None:
                        self._roster = Roster(self._context)
                    caller = z85.decode(keys.caller.public)
                    self._roster.admitted.add((keys.plane.encode(), caller))
            except zmq.ZMQError:
                if not self._users:
                    self._end()
                raise
            self._users += 1
            return self._context, None if keys is None else self._roster

    def release(self) -> None:
        """Undoes ``acquire``. The last one returns when threads and descriptors are gone."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._end()

    def forget(self) -> None:
        """In a forked child: the context is the parent's."""
        # Kept, since the end of a context waits for threads that a child doesn't have.
        _of_parents.append((self._context, self._roster))
        self._lock = threading.Lock()
        self._users, self._context, self._roster = 0, None, None

    def _end(self) -> None:
        context, roster = self._context, self._roster
        self._context = self._roster = None
        if roster is not None:
            roster.socket.close(0)
        if context is not None:
            context.term()


_of_parents: Final[list[object]] = []
SHARED: Final = SharedContext()


def _try_descriptors() -> None:
    """libzmq aborts the process where it can't have descriptors for a context."""
    with contextlib.ExitStack() as taken:
        for _ in range(DESCRIPTORS):
            taken.callback(os.close, os.eventfd(0, os.EFD_CLOEXEC))
