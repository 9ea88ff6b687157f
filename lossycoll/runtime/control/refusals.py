"""Why a connection of libzmq failed, which it doesn't say: a plain connection asks the kernel."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from .events import Peer
from .schema import Address

if TYPE_CHECKING:
    import zmq


class Refusals:
    """Plain connections under way, by their descriptors, which ``poller`` waits for."""

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._asked: dict[int, tuple[socket.socket, Peer]] = {}

    def __contains__(self, fd: object) -> bool:
        return fd in self._asked

    def ask(self, peer: Peer, address: Address) -> int | None:
        """Connects to where ``peer`` was to be. Returns the error if it is known at once."""
        import zmq

        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            code = made.connect_ex(address)
        except OSError as error:  # short of descriptors
            return error.errno or errno.EMFILE
        self._asked[made.fileno()] = made, peer
        self._poller.register(made.fileno(), zmq.POLLOUT)
        return None if code == errno.EINPROGRESS else code

    def answer(self, fd: int) -> tuple[Peer, int]:
        """The kernel's answer: whose it is, and the error; 0: somebody listens there."""
        made, peer = self._asked[fd]
        return peer, made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

    def forget(self, peer: Peer) -> None:
        """Nobody waits for the answer any more."""
        for fd, (made, asking) in list(self._asked.items()):
            if asking == peer:
                self._poller.unregister(fd)
                del self._asked[fd]
                made.close()
