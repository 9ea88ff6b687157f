"""Sockets that forked children close: an address would else stay taken after its owner's end, for
as long as a child lives."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from typing import Final

_owned: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()


def close_in_children(*sockets: socket.socket) -> None:
    """Has forked children close their copies of these sockets."""
    for one in sockets:
        _owned.add(one)


def _close_copies() -> None:
    for one in list(_owned):
        with contextlib.suppress(OSError):
            one.close()
    _owned.clear()


os.register_at_fork(after_in_child=_close_copies)
