"""Query of a directory by somebody who isn't a peer: who is in the swarm?"""

from __future__ import annotations

import contextlib
import time
from typing import Final

from lossycoll.runtime.control.schema import Address, Malformed
from lossycoll.runtime.keys.secret import Secret

from . import protocol
from .directory_transport import DirectoryTransport, ZmqDirectoryTransport
from .protocol import MOST_DIRECTORIES, pack, unpack

ANSWER_SECONDS: Final = 2.0
"""For each directory: of one that stands by, the others that it names are asked, too."""


def peers_of(
    place: Address, secret: Secret | None, seconds: float = ANSWER_SECONDS
) -> tuple[Address, tuple[str, ...]] | None:
    """Return the directory in use and the names of all peers; None: no directory answers.
    ``place``: of any directory of the swarm, as peers join it."""
    transport = ZmqDirectoryTransport(secret)
    places = [place]
    try:
        for asked in range(1 + MOST_DIRECTORIES):
            if asked == len(places):
                return None
            answer = _ask(transport, places[asked], seconds)
            if isinstance(answer, tuple):
                return places[asked], answer
            places += [one for one in answer if one not in places]
    finally:
        transport.end()
    return None


def _ask(
    transport: DirectoryTransport, place: Address, seconds: float
) -> tuple[str, ...] | list[Address]:
    """The names of a directory's peers, or a list of directories to ask in its place: empty if it
    names none, or doesn't answer."""
    names: tuple[str, ...] = ()
    end = time.monotonic() + seconds
    try:
        connection = transport.reach(place, "")
    except OSError:
        return []
    with contextlib.closing(connection):
        connection.write(pack(protocol.Who()))
        while (left := end - time.monotonic()) > 0:
            transport.wait(left)
            for body in connection.read():
                try:
                    message = unpack(body)
                except Malformed:
                    return []
                if isinstance(message, protocol.Directories):
                    return list(message.addresses)
                if not isinstance(message, protocol.Peers):
                    return []
                names += message.names
                if not message.more:
                    return names
            if connection.broken:
                return []
    return []
