"""The private gloo mesh of a group: torch's own collectives, made on demand and interruptible.

Most groups never need it, so it is made by the first call that does: all ranks make that call.
Gloo has no abort: who waits for a rank that hangs waits until the timeout. But all that waits ends
at once when its connections are shut down. A connection is the mesh's if one end of it is the
address at which this rank's gloo listens, or a peer's: ranks tell one another theirs first.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Final

from torch._C import _distributed_c10d as c10d

from lossycoll.errors import LossyError, RendezvousError, SealedError
from lossycoll.runtime.net.own_sockets import Address, listeners, shut

from .resource_limits import check_descriptors

POLL_SECONDS: Final = 0.005
"""Between two looks for what the other ranks have written."""
SLICE_SECONDS: Final = 0.2
"""How often whoever waits for the mesh is asked whether to go on."""
CONNECT_SECONDS: Final = 60.0
"""What gloo may take to connect, once all ranks have come."""
CLOSE_SECONDS: Final = 2.0
"""What a mesh that is being made may take to give up, before its connections are shut down."""
QUIET_SECONDS: Final = 10.0
"""How long a moment is sought in which no other socket of this process begins to listen."""

_Gloo: Any = c10d.ProcessGroupGloo  # the stub lacks the constructor with options

_listening = threading.Lock()
"""Held while a device is made, so that no other mesh's listener appears meanwhile."""


class GlooMesh:
    """A ProcessGroupGloo, once somebody has asked for it. Safe among threads.

    Args:
        store: Where gloo exchanges addresses; no other mesh's.
        rank: This rank.
        size: The group's ranks.
        timeout: Of gloo's own calls.
        address: This rank's, numeric. GLOO_SOCKET_IFNAME goes before it, as everywhere in torch.
        sealed: The group's other connections are sealed; then there is no mesh, which can't be.
    """

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        size: int,
        *,
        timeout: timedelta,
        address: str,
        sealed: bool = False,
    ) -> None:
        self._sealed = sealed
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._address = address
        self._lock = threading.RLock()  # a signal's handler may come on top of who has it
        self._works: deque[Any] = deque()
        self._making: Future[Any] | None = None
        self._maker: threading.Thread | None = None
        self._over = threading.Event()
        self._listeners: set[Address] = set()
        self.missing: tuple[int, ...] = tuple(range(size))
        """The ranks that haven't asked for the mesh yet, as this one knows."""

    def group(self, still: Callable[[], None]) -> Any:
        """The mesh, which the first caller makes.

        Args:
            still: Called every so often while the other ranks are awaited. What it raises ends this
                call; the mesh goes on being made, for another.

        Raises:
            RendezvousError: The mesh can't be connected.
            EngineError: This process is out of descriptors.
            SealedError: The group is sealed.
        """
        if self._sealed:
            raise SealedError(
                f"rank {self._rank}/{self._size}: gloo serves this call, and its connections can't "
                f"be sealed; use a group of the backend gloo for it, inside a network that you "
                f"trust"
            )
        with self._lock:
            if self._making is None:
                self._making = Future()
                name = "lossycoll-gloo"
                self._maker = threading.Thread(target=self._make, name=name, daemon=True)
                self._maker.start()
        making = self._making
        while not making.done():
            wait([making], SLICE_SECONDS)
            if not making.done():
                still()
        return making.result()

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of gloo's own calls."""
        self._timeout = timeout
        if (made := self._made()) is not None:
            made._set_default_timeout(timeout)

    def under_way(self, work: Any) -> None:
        """Notes a call of gloo's, which :meth:`close` would end."""
        with self._lock:
            while self._works and self._works[0].is_completed():
                self._works.popleft()
            self._works.append(work)

    def cut(self) -> None:
        """Shuts the connections down: every call that waits, here and at the peers, fails now."""
        self._over.set()
        if self._listeners:
            shut(self._listeners)

    def close(self) -> None:
        """Lets go of the mesh, if there is one, or of its making. Idempotent.

        A call that is under way fails: gloo's threads would wait for its end.
        """
        self._over.set()
        # A thread that is in the store or in gloo when the interpreter ends aborts the process.
        if self._maker is not None:
            self._maker.join(CLOSE_SECONDS)
            if self._maker.is_alive():
                self.cut()
                self._maker.join(CLOSE_SECONDS)
        if any(not work.is_completed() for work in list(self._works)):
            self.cut()
        self._works.clear()
        if (made := self._made()) is not None:
            made.shutdown()

    def _made(self) -> Any:
        making = self._making
        if making is None or not making.done() or making.exception() is not None:
            return None
        return making.result()

    # ---- in a thread of its own, since a store may keep whoever asks it ----

    def _make(self) -> None:
        assert self._making is not None
        try:
            made = self._connect()
        except Exception as error:
            self._making.set_exception(self._explained(error))
            return
        self._making.set_result(made)
        if self._over.is_set():  # cut or closed meanwhile
            self.cut()
            made.shutdown()

    def _connect(self) -> Any:
        check_descriptors(self._rank, self._size)
        devices, mine = _devices(self._address)
        self._listeners = mine | self._exchanged(mine)
        options = _Gloo._Options()
        options._timeout = min(self._timeout, timedelta(seconds=CONNECT_SECONDS))
        options._devices = devices
        made = _Gloo(self._store, self._rank, self._size, options)
        made._set_default_timeout(self._timeout)
        return made

    def _exchanged(self, mine: set[Address]) -> set[Address]:
        """Where the other ranks listen: returns when all have said so."""
        store = self._store
        text = " ".join(f"{port}@{address}" for address, port in sorted(mine))
        store.set(f"listens/{self._rank}", text)
        found: set[Address] = set()
        missing = [rank for rank in range(self._size) if rank != self._rank]
        while missing:
            if self._over.is_set():
                raise RuntimeError("the group has ended")
            if store.check([f"listens/{missing[0]}"]):
                for word in store.get(f"listens/{missing.pop(0)}").decode().split():
                    port, _, address = word.partition("@")
                    found.add((address, int(port)))
            else:
                self.missing = tuple(
                    rank for rank in missing if not store.check([f"listens/{rank}"])
                )
                time.sleep(POLL_SECONDS)
        self.missing = ()
        return found

    def _explained(self, error: Exception) -> LossyError:
        if isinstance(error, LossyError):
            return error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        out = RendezvousError(
            f"rank {self._rank}/{self._size}: no gloo connection to the other ranks from "
            f"{self._address}: {reason}; set LOSSYCOLL_INTERFACE to an interface that reaches them"
        )
        out.__cause__ = error
        return out


def _devices(address: str) -> tuple[list[Any], set[Address]]:
    """Gloo's devices, and the addresses at which they listen.

    Raises:
        RuntimeError: Gloo can't make them.
    """
    # create_default_device would look at the host's name alone.
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    asked = [{"interface": name} for name in names] or [{"hostname": address}]
    with _listening:
        end = time.monotonic() + QUIET_SECONDS
        while time.monotonic() < end:
            before = listeners()
            devices = [_Gloo.create_device(lazy_init=False, **one) for one in asked]
            found = listeners() - before
            if len(found) == len(devices):
                return devices, found
    raise RuntimeError("other sockets of this process begin to listen all the time")
