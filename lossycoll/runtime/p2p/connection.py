"""Frames over one TCP connection: headers of fixed size, some of them followed by bytes.

Nothing here blocks. What is read goes to where its reader wants it, what is written comes from
where it lies: large payloads are copied by the kernel alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

_HEADER: Final = struct.Struct("<4sB3x16sqQQQ")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = b"LCm1"
EAGER_BYTES: Final = 1 << 16
"""The largest message that is sent before it is wanted."""
_INBOX_BYTES: Final = EAGER_BYTES + 4096
_READS: Final = 32
"""At most so many in a row, so that one busy connection doesn't keep out the others."""


class Kind(IntEnum):
    """docs/messages.md says what each means."""

    HELLO = 1
    EAGER = 2
    ANNOUNCE = 3
    DATA = 4
    GRANT = 5
    CREDIT = 6


class Malformed(Exception):
    """What came is not of this protocol, or not from a rank of this group."""


class Frame(NamedTuple):
    """A header. ``number``: of the message among those from one rank to another."""

    kind: int
    tag: int = 0
    number: int = 0
    elements: int = 0
    nbytes: int = 0
    dtype: str = ""

    def pack(self) -> bytes:
        name = self.dtype.encode()
        return _HEADER.pack(
            _MAGIC, self.kind, name, self.tag, self.number, self.elements, self.nbytes
        )

    @staticmethod
    def unpack(buffer: bytearray, offset: int) -> Frame:
        """Raises Malformed."""
        magic, kind, name, tag, number, elements, size = _HEADER.unpack_from(buffer, offset)
        name = name.rstrip(b"\0")
        if magic != _MAGIC or not name.isascii():
            raise Malformed
        return Frame(kind, tag, number, elements, size, name.decode())


class Reader(Protocol):
    """Whom a stream tells. Either may raise Malformed."""

    def on_frame(self, stream: Stream, frame: Frame) -> memoryview | None:
        """Where the bytes go that follow; None if none do."""

    def on_filled(self, stream: Stream) -> None:
        """The bytes have come."""


_Done = Callable[[], None]
_Piece = tuple[memoryview, _Done | None]


class Stream:
    """One connection. ``peer``: the rank at the other end, -1 while it hasn't said.

    ``outbound``: made here, for messages from here; only grants and credit come back on it.
    OSError, EOFError and Malformed out of any method mean that it is of no use any more.
    """

    def __init__(self, sock: socket.socket, *, peer: int = -1, outbound: bool = False) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.peer = peer
        self.outbound = outbound
        self.connected = not outbound
        self._queue: deque[_Piece] = deque()
        self._inbox = bytearray(_INBOX_BYTES)
        self._room = memoryview(self._inbox)
        self._begin = self._end = 0
        self._sink: memoryview | None = None

    @property
    def unsent(self) -> bool:
        return bool(self._queue)

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self._queue.clear()
        self._sink = None
        self._begin = self._end = 0
        # A forked child may hold the socket as well: closing alone would tell the peer nothing.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    # ---- writing ----

    def write(
        self, frame: Frame, data: memoryview | None = None, done: _Done | None = None
    ) -> None:
        """Sends what can be sent now; ``flush`` sends the rest, in order.

        ``done`` is called when the kernel has it all. Without one ``data`` may change right after
        the call: what is left of it is copied.
        """
        pieces = [memoryview(frame.pack())]
        if data is not None:
            pieces.append(data)
        if not self._queue and self.connected:
            pieces = self._send(pieces)
        if pieces and done is None:
            pieces = [memoryview(b"".join(pieces))]
        self._queue.extend((piece, None) for piece in pieces[:-1])
        if pieces:
            self._queue.append((pieces[-1], done))
        elif done is not None:
            done()

    def flush(self) -> None:
        """Sends what is left, as far as the kernel takes it."""
        while self._queue:
            taken = [piece for piece, _ in list(self._queue)[:8]]
            left = self._send(taken)
            for _ in range(len(taken) - len(left)):
                done = self._queue.popleft()[1]
                if done is not None:
                    done()
            if left:
                self._queue[0] = (left[0], self._queue[0][1])
                return

    def _send(self, pieces: list[memoryview]) -> list[memoryview]:
        """What of ``pieces`` the kernel didn't take."""
        try:
            sent = self.socket.sendmsg(pieces, (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return pieces
        for number, piece in enumerate(pieces):
            if sent < len(piece):
                return [piece[sent:], *pieces[number + 1 :]]
            sent -= len(piece)
        return []

    def finish_connecting(self) -> None:
        """To be called when the socket is writable for the first time."""
        error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "connecting failed")
        self.connected = True

    def unconfirmed(self) -> bool:
        """Whether the peer's kernel may lack something that was written here."""
        waiting = fcntl.ioctl(self.socket, termios.TIOCOUTQ, b"\0\0\0\0")
        return self.unsent or waiting != b"\0\0\0\0"

    def end(self) -> None:
        """Nothing more will be written."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    # ---- reading ----

    def read(self, reader: Reader) -> None:
        """Takes in what has come."""
        for _ in range(_READS):
            # What follows a header in the inbox has been copied: the rest needs no detour.
            room = self._room[self._end :] if self._sink is None else self._sink
            try:
                count = self.socket.recv_into(room)
            except BlockingIOError:
                return
            if count == 0:
                raise EOFError
            if self._sink is None:
                self._end += count
                self._parse(reader)
            else:
                self._fill(self._sink, count, reader)
            if count < len(room):
                return

    def _fill(self, sink: memoryview, count: int, reader: Reader) -> None:
        """``count`` bytes more are in ``sink``."""
        self._sink = sink[count:] if count < len(sink) else None
        if self._sink is None:
            reader.on_filled(self)

    def _parse(self, reader: Reader) -> None:
        """Makes frames of the inbox."""
        while self._end - self._begin >= HEADER_BYTES:
            frame = Frame.unpack(self._inbox, self._begin)
            self._begin += HEADER_BYTES
            sink = reader.on_frame(self, frame)
            if sink is not None:
                count = min(len(sink), self._end - self._begin)
                sink[:count] = self._room[self._begin : self._begin + count]
                self._begin += count
                self._fill(sink, count, reader)
        rest = self._end - self._begin
        self._inbox[:rest] = self._inbox[self._begin : self._end]
        self._begin, self._end = 0, rest
