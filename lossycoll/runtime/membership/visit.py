"""The question of a process that is no rank of a cohort (yet): who listens there?"""

from __future__ import annotations

import contextlib
import select
import socket
import time

from lossycoll.runtime.keys.secret import Secret

from .hub_sockets import HELLO_SECONDS, VERSION
from .messages import Hello, Malformed, pack, unpack
from .sealed_framing import framed_with


def answers(
    host: str,
    port: int,
    rank: int,
    token: str,
    world: int,
    seconds: float = HELLO_SECONDS,
    secret: Secret | None = None,
) -> bool:
    """Whether ``rank`` of the cohort with this ``token`` still listens there, not another by now.

    The asker is no rank of that cohort. Blocks for up to ``seconds`` where what listens is silent.
    """
    try:
        body = _answer_to(Hello(VERSION, token, rank, "visit"), host, port, seconds, secret)
        return body is not None and unpack(body, world) == Hello(VERSION, token, rank, "member")
    except (OSError, Malformed):
        return False


def ask_for_new_keys(host: str, port: int, secret: Secret, seconds: float = HELLO_SECONDS) -> bool:
    """Has the cohort of whoever listens there seal with new keys. Returns whether it has heard.

    Raises:
        OSError: Nobody listens there.
    """
    hello = Hello(VERSION, "", 0, "newkeys")
    return _answer_to(hello, host, port, seconds, secret) is not None


def _answer_to(
    hello: Hello, host: str, port: int, seconds: float, secret: Secret | None
) -> bytes | None:
    """The first message that answers ``hello``; None: the connection ended, or time was over."""
    end = time.monotonic() + seconds
    connection = socket.create_connection((host, port), seconds)
    with contextlib.closing(framed_with(secret, connection, connects=True)) as framed:
        framed.write(pack(hello))
        readable = select.poll()
        readable.register(framed.fd, select.POLLIN)
        while not framed.broken and (left := end - time.monotonic()) > 0:
            readable.poll(1000 * left)
            for body in framed.read():
                return body
    return None
