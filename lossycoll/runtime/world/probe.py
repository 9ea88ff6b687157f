"""Questions of a process that is no rank of a world (yet) to whoever listens at a place."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from typing import Final

from lossycoll.runtime.control.curve import keys_of
from lossycoll.runtime.control.events import Closed, Received, Refused
from lossycoll.runtime.control.schema import Malformed
from lossycoll.runtime.control.transport import Transport
from lossycoll.runtime.keys.secret import Secret

from .connections import PLANE
from .messages import VERSION, Hello, pack, unpack

ANSWER_SECONDS: Final = 5.0


def answers(
    host: str,
    port: int,
    rank: int,
    token: str,
    world: int,
    seconds: float = ANSWER_SECONDS,
    secret: Secret | None = None,
) -> bool:
    """True if ``rank`` of the world with this ``token`` still listens there, not another by now.

    The asker is no rank of that world. Blocks for up to ``seconds`` where what listens is silent.
    """
    try:
        body = _answer_to(Hello(VERSION, token, rank, "probe"), host, port, seconds, secret)
        return body is not None and unpack(body, world) == Hello(VERSION, token, rank, "member")
    except (OSError, Malformed):
        return False


def ask_for_rekey(host: str, port: int, secret: Secret, seconds: float = ANSWER_SECONDS) -> bool:
    """Has the world of whoever listens there seal with new keys. Returns whether it has heard.
    OSError: nobody listens there."""
    hello = Hello(VERSION, "", 0, "rekey")
    return _answer_to(hello, host, port, seconds, secret) is not None


def _answer_to(
    hello: Hello, host: str, port: int, seconds: float, secret: Secret | None
) -> bytes | None:
    """The first message that answers ``hello``; None: the connection ended, or time was over."""
    end = time.monotonic() + seconds
    place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    keys = None if secret is None else keys_of(secret, PLANE)
    with contextlib.closing(Transport(keys)) as transport:
        transport.send(transport.connect((str(place[0]), int(place[1]))), pack(hello))
        while (left := end - time.monotonic()) > 0:
            for event in transport.poll(left):
                if isinstance(event, Received):
                    return event.body
                if isinstance(event, Refused):
                    raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
                if isinstance(event, Closed):
                    return None
    return None
