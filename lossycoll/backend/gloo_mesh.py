"""The private gloo mesh of a group: torch's own collectives, made interruptible.

Gloo has no abort: who waits for a rank that hangs waits until the timeout. But all that waits ends
at once when its connections are shut down, so the mesh remembers which sockets are its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d

from lossycoll.errors import RendezvousError

Ends = tuple[Any, Any]


class GlooMesh:
    """``group`` is the ProcessGroupGloo; ``cut`` ends all that waits in it, for good.

    Args:
        store: Where gloo exchanges addresses.
        rank: This rank.
        size: The group's ranks.
        timeout: Of gloo's own calls.
        address: This rank's, numeric. GLOO_SOCKET_IFNAME goes before it, as everywhere in torch.

    Raises:
        RendezvousError: The mesh can't be connected.
    """

    def __init__(
        self, store: c10d.Store, rank: int, size: int, *, timeout: timedelta, address: str
    ) -> None:
        before = connections()
        make: Any = c10d.ProcessGroupGloo  # the stub lacks the constructor with options
        options = make._Options()
        options._timeout = timeout
        try:
            # create_default_device would look at the host's name alone.
            names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            if names:
                options._devices = [make.create_device(interface=name) for name in names]
            else:
                options._devices = [make.create_device(hostname=address)]
            self.group: c10d.ProcessGroupGloo = make(store, rank, size, options)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RendezvousError(
                f"rank {rank}/{size}: no gloo connection to the other ranks from {address}: "
                f"{reason}; set LOSSYCOLL_INTERFACE to an interface that reaches them"
            ) from error
        opened = {fd: ends for fd, ends in connections().items() if before.get(fd) != ends}
        # One connection per peer. Anything else opened meanwhile can't be told from gloo's, so
        # then none is touched, and waiting calls end by gloo's own timeout.
        self._sockets = opened if len(opened) == size - 1 else {}

    def cut(self) -> None:
        """Shuts the connections down: every call that waits, here and at the peers, fails now."""
        for fd, ends in self._sockets.items():
            # Gloo may have closed it, and the number may be another's by now: another group's
            # listener, say. What has been borrowed stays what it is, so it is looked at then.
            with contextlib.suppress(OSError), borrow(fd) as end:
                if _ends(end) == ends:
                    end.shutdown(socket.SHUT_RDWR)
        self._sockets = {}


@contextlib.contextmanager
def borrow(fd: int) -> Iterator[socket.socket]:
    """The socket behind a descriptor that somebody else continues to own.

    Raises:
        OSError: It is no socket, or gone.
    """
    copy = os.dup(fd)
    try:
        end = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with end:
        yield end


def _ends(end: socket.socket) -> Ends | None:
    """Both addresses of a connected TCP socket; None for one of another kind, or a listener."""
    if end.family not in (socket.AF_INET, socket.AF_INET6) or end.type != socket.SOCK_STREAM:
        return None
    try:
        return end.getsockname(), end.getpeername()
    except OSError:
        return None


def connections() -> dict[int, Ends]:
    """This process's connected TCP sockets: both ends by file descriptor."""
    out: dict[int, Ends] = {}
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):  # gone
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with borrow(fd) as end:
                    ends = _ends(end)
                if ends is not None:
                    out[fd] = ends
    return out
