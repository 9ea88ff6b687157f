"""Ports of a directory: one in TCP, for peers, and the same in UDP, for connectivity checks."""

from __future__ import annotations

import logging
import resource
import socket
from dataclasses import dataclass
from typing import Final

from lossycoll.errors import RendezvousError

TRIES: Final = 16
"""To find a port that is free in TCP and UDP, where any will do."""
log: Final = logging.getLogger("lossycoll")


@dataclass(frozen=True, slots=True)
class Ports:
    """Sockets that have the address, and don't block. ``tcp`` doesn't listen yet: who connects is
    refused."""

    tcp: socket.socket
    udp: socket.socket

    @property
    def port(self) -> int:
        """The number of both."""
        return int(self.tcp.getsockname()[1])

    def close(self) -> None:
        """Idempotent."""
        self.tcp.close()
        self.udp.close()


def bound_to(host: str, port: int) -> Ports:
    """Takes a port, for as long as its sockets aren't closed. ``host``: a numeric address of this
    machine. ``port``: 0: any that is free in TCP and UDP. RendezvousError: the port is taken, or
    the address isn't this machine's."""
    for turn in range(TRIES):
        try:
            tcp = _bound(host, port, socket.SOCK_STREAM)
        except OSError as error:
            raise RendezvousError(f"no directory at {host}:{port}: {error.strerror}") from error
        number = tcp.getsockname()[1]
        try:
            return Ports(tcp, _bound(host, number, socket.SOCK_DGRAM))
        except OSError as error:
            tcp.close()
            if port or turn == TRIES - 1:
                raise RendezvousError(
                    f"no directory at {host}:{number}: its UDP port: {error.strerror}; peers ask "
                    f"there for their reflexive addresses, so it needs the port in TCP and UDP"
                ) from error
    raise AssertionError


def _bound(host: str, port: int, kind: socket.SocketKind) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind)
    try:
        # Where any will do, two might be given the same, as long as none listens.
        if port and kind == socket.SOCK_STREAM:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    made.setblocking(False)
    return made


def more_descriptors() -> bool:
    """This process has none left: it takes as many as it may have. Not before, since whatever else
    runs in it may not expect descriptors beyond 1,023. Returns whether there are more now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return False
    log.info("directory: up to %d descriptors, in place of %d", hard, soft)
    return True
