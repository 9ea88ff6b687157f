"""CURVE keys of a job, derived from its secret, and the roster of keys that its listeners admit.

All processes of a job derive the same two key pairs for each plane: a listener's and a caller's.
Neither public key is ever sent in clear, so only a process that has the secret can begin a
handshake. The roster (ZAP, ZeroMQ's RFC 27) is the second check: it refuses any other caller's key.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lossycoll.runtime.keys.secret import Secret

if TYPE_CHECKING:
    import zmq

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
"""Endpoint that libzmq asks (RFC 27)."""


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair. Both keys are Z85 text."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Keys:
    """Keys of one plane. ``plane``: its name, which is also the domain of its roster. ``listener``:
    of whoever is connected to. ``caller``: of whoever connects."""

    plane: str
    listener: KeyPair
    caller: KeyPair


def keys_of(secret: Secret, plane: str) -> Keys:
    """Keys of a plane. Processes of planes of different names can't connect."""
    return Keys(plane, _pair(secret, plane, "listener"), _pair(secret, plane, "caller"))


def _pair(secret: Secret, plane: str, role: str) -> KeyPair:
    import zmq
    from zmq.utils import z85

    private = z85.encode(secret.derived("curve", plane, role))
    return KeyPair(zmq.curve_public(private), private)


class Roster:
    """ZAP handler of a context: admits callers by their public keys.

    It has no thread, which would wait for the interpreter's lock ten times for each handshake: all
    transports that listen poll ``fd``, and whichever is awake calls :meth:`serve`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        import zmq

        self._admitted: set[tuple[bytes, bytes]] = set()
        """Domain and binary public key."""
        self._lock = threading.Lock()
        self._socket = context.socket(zmq.REP)
        self._socket.bind(ZAP_ENDPOINT)
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def admit(self, keys: Keys) -> None:
        """Admits callers of a plane from now on."""
        from zmq.utils import z85

        self._admitted.add((keys.plane.encode(), z85.decode(keys.caller.public)))

    def serve(self) -> None:
        """Answers what has been asked. By any thread."""
        import zmq

        with self._lock, contextlib.suppress(zmq.Again):
            while True:
                version, number, domain, _, _, mechanism, *key = self._socket.recv_multipart(
                    zmq.DONTWAIT
                )
                known = mechanism == b"CURVE" and (domain, *key) in self._admitted
                code, text = (b"200", b"OK") if known else (b"400", b"not in the roster")
                self._socket.send_multipart([version, number, code, text, b"", b""])

    def close(self) -> None:
        """Before its context ends."""
        self._socket.close(0)
