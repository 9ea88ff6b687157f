"""Processes of one machine hand one another descriptors: of the memory that each lets them read,
and of the pipe by which it is woken (docs/rendezvous.md).

Each listens at an abstract Unix socket, under a name that it draws and tells in the rendezvous.
Nobody waits for an answer: a connection that was made, and what was sent over it, is in the
listener's queue. What is taken must be memory that can't shrink under its readers, and a pipe that
can be opened once more, as the engine does: its owner could make a write to the one it sent block.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import json
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

PREFIX: Final = "lossycoll-"
CREDENTIALS: Final = struct.Struct("3i")
"""struct ucred: process, user, group."""
LARGEST: Final = 4096
FULL: Final = frozenset({errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS})
"""Too much is under way: until others have taken theirs. A user's descriptors in messages are as
many as one process's limit on descriptors at most."""
FULL_SECONDS: Final = 2.0
PAUSE_SECONDS: Final = 0.001
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
F_SEAL_FUTURE_WRITE: Final = 0x10
"""fcntl has no name for it."""


class DescriptorExchange:
    """This process's end, which listens from the start; ``close`` also closes what was taken."""

    def __init__(self, most: int) -> None:
        self.name = PREFIX + secrets.token_hex(16)
        self.taken: dict[int, tuple[int, int]] = {}
        """Memory and pipe of each process that has sent them, by its number."""
        self.refused: dict[int, str] = {}
        """Why what came from a process couldn't be used, by its number; -1: nobody's."""
        self._most = most
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.setblocking(False)
            self._listener.bind(f"\0{self.name}")
            self._listener.listen(most)
        except OSError:
            self._listener.close()
            raise
        self._waiting: list[socket.socket] = []

    def send(
        self, process: int, token: str, names: Mapping[int, str], descriptors: tuple[int, int]
    ) -> dict[int, str]:
        """Sends this process's descriptors to others. Returns with which it failed, and why."""
        message = json.dumps({"process": process, "token": token}).encode()
        end = time.monotonic() + FULL_SECONDS
        failed = {}
        for other, name in names.items():
            while True:
                try:
                    _send_one(name, message, descriptors)
                except OSError as error:
                    if error.errno in FULL and time.monotonic() < end:
                        self.take(token, names)  # the others may wait for the same
                        time.sleep(PAUSE_SECONDS)
                        continue
                    failed[other] = f"sending it memory failed: {error.strerror or error}"
                break
        return failed

    def take(self, token: str, expected: Iterable[int]) -> None:
        """Takes what has been sent here by now, without waiting."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # nobody waits, or who waited has gone
                break
            if peer_user(connection) != os.geteuid():
                self.refused[-1] = "another user's process connected"
                connection.close()
                continue
            connection.setblocking(False)
            self._waiting.append(connection)
            # Those that have met send as soon as they have connected: the first to have said
            # nothing is the least likely to be one of them.
            if len(self._waiting) > 2 * self._most:
                self._read(self._waiting.pop(0), token, frozenset(expected), last=True)
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            self._read(connection, token, frozenset(expected))

    def close(self) -> None:
        """Stops listening, and closes the descriptors that were taken. Idempotent."""
        self._listener.close()
        for connection in self._waiting:
            connection.close()
        for pair in self.taken.values():
            _close(pair)
        self._waiting, self.taken = [], {}

    def _read(
        self, connection: socket.socket, token: str, expected: frozenset[int], last: bool = False
    ) -> None:
        """``last``: who hasn't sent yet is not waited for."""
        try:
            message, descriptors = _receive(connection)
        except BlockingIOError:  # it has connected, and not yet sent
            if last:
                connection.close()
            else:
                self._waiting.append(connection)
            return
        except OSError as error:
            self.refused[-1] = f"receiving failed: {error.strerror}"
            connection.close()
            return
        connection.close()
        process, reason = _sender(message, token, expected)
        if process in self.taken:
            process, reason = -1, f"process {process} sent twice"
        reason = reason or _unusable(descriptors)
        if reason:
            _close(descriptors)
            self.refused[process] = reason
        else:
            self.taken[process] = (descriptors[0], descriptors[1])


def _send_one(name: str, message: bytes, descriptors: tuple[int, int]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.setblocking(False)
        end.connect(f"\0{name}")
        if peer_user(end) != os.geteuid():
            raise PermissionError(errno.EACCES, "another user listens there")
        socket.send_fds(end, [message], descriptors)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A message, and the descriptors that came with it. socket.recv_fds of Python 3.11 ignores the
    flag by which children don't inherit them."""
    room = socket.CMSG_SPACE(2 * struct.calcsize("i"))
    message, controls, _, _ = connection.recvmsg(LARGEST, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in controls:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, list(descriptors)


def peer_user(end: socket.socket) -> int:
    """The user of the process that listens, or has connected, at the other end."""
    found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(found)[1])


def _sender(message: bytes, token: str, expected: frozenset[int]) -> tuple[int, str]:
    """(number, "") of the process that has sent ``message``; (-1, reason): of none that has met."""
    try:
        said: Any = json.loads(message)
        theirs, process = said["token"].encode(), said["process"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return -1, "a process sent what isn't a message"
    if not secrets.compare_digest(theirs, token.encode()):
        return -1, "a process sent another token"
    if not isinstance(process, int) or process not in expected:
        return -1, f"a process calls itself number {process!r}"
    return process, ""


def _unusable(descriptors: list[int]) -> str:
    """Why memory and pipe can't be used; empty if they can."""
    if len(descriptors) != 2:
        return (
            f"{len(descriptors)} descriptors came, not 2: is this process short of them (ulimit "
            f"-n)?"
        )
    memory, wake = descriptors
    anew = f"/proc/self/fd/{wake}"
    try:
        if not os.readlink(anew).startswith("pipe:["):
            return "it sent no pipe"
        os.close(os.open(anew, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return f"its pipe can't be opened once more (is /proc mounted?): {error.strerror}"
    try:
        seals = fcntl.fcntl(memory, fcntl.F_GET_SEALS)
    except OSError:
        return "it sent no memory that could be sealed"
    if seals & SEALS != SEALS or not seals & (F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_WRITE):
        return f"its memory isn't sealed (seals {seals:#x})"
    try:
        mmap.mmap(memory, 0, prot=mmap.PROT_READ).close()
    except (OSError, ValueError) as error:
        return f"its memory can't be mapped: {error}"
    return ""


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
