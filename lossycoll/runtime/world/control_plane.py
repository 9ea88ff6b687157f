"""The control plane of a process: one thread and one set of connections for all of its groups.

The groups of one *world*, the processes that met in one rendezvous, share a plane. What it does is
:class:`WorldProtocol`; here are its thread, its lifetime, and the way in from other threads. A
group is a :class:`Membership`: opening one costs no message, no thread and no descriptor.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final

from lossycoll.runtime.engine.status_record import Record
from lossycoll.runtime.keys.secret import Secret

from .connections import Connections
from .queries import Answers
from .world_protocol import WorldProtocol

if TYPE_CHECKING:
    from lossycoll.runtime.engine.host import Host

LINGER_SECONDS: Final = 0.5
"""Time for messages under way when a plane ends."""
LEAVING_SECONDS: Final = 0.02
"""Between two looks, while what is to be said waits for a coordinator."""

_here: Final[weakref.WeakSet[ControlPlane]] = weakref.WeakSet()
"""The planes of this process, so that a forked child can close its copies of their sockets."""


@dataclass(eq=False)
class ControlPlane:
    """One process's end. ``open``, ``start``, ``meet``; ``hold`` and ``release``, or ``close``."""

    rank: int  # this process's number
    world: int  # among so many, at least 2
    liveness: float  # seconds within which a silent rank is named
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic  # never runs backwards
    secret: Secret | None = None  # seals all connections; None: none is sealed

    def __post_init__(self) -> None:
        self._sockets = Connections(self.rank, self.world, self.clock, self.secret)
        self._met_or_failed = threading.Event()
        self.protocol = WorldProtocol(
            self.rank,
            self.world,
            self.liveness,
            sockets=self._sockets,
            clock=self.clock,
            on_met_or_failed=self._met_or_failed.set,
            on_rekey=self._rekey_hosts,
        )
        """The thread's, apart from plain reads."""
        self.sealed: weakref.WeakSet[Host] = weakref.WeakSet()
        """Users of keys in this process; a rekey gives them new ones."""
        self._lock = threading.RLock()
        self._tasks: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = False
        """Groups can't be made on it any more."""
        self._over = False
        """The thread has ended, or never began and never will."""
        self._holders = 0
        _here.add(self)

    @property
    def is_sound(self) -> bool:
        """True if groups can still be made on it."""
        return self.protocol.ready and not (self.protocol.is_lost or self._stopping)

    def is_here(self, rank: int) -> bool:
        """True if a rank of the world is neither lost nor gone, as far as this one knows."""
        return not self.protocol.states.is_gone(rank)

    def place_of(self, rank: int) -> tuple[str, int]:
        """Where a rank listens: numeric address and port. After ``start``."""
        return self._sockets.places[rank]

    def open(self, address: str, ports: tuple[int, int] = (0, 0)) -> int:
        """See :meth:`Connections.open`."""
        return self._sockets.open(address, ports)

    def start(self, token: str, endpoints: Sequence[tuple[str, int]]) -> None:
        """Starts the thread. ``token``: the world's secret, equal on all ranks; ``endpoints``:
        where each rank listens (host, port)."""
        self._sockets.start(token, endpoints)
        self.protocol.begin()
        self._thread = threading.Thread(target=self._run, name="lossycoll-control", daemon=True)
        self._thread.start()

    def tell_status(self, session: str, read: Callable[[bool], Sequence[Record]]) -> None:
        """Tells whoever asks of the job. ``read``: its records on this machine."""
        self._sockets.answers = Answers(session, self._sockets.places, read)

    @property
    def has_met(self) -> bool:
        """True if the coordinator and every other rank have heard each other."""
        return self.protocol.ready

    @property
    def has_met_or_failed(self) -> bool:
        return self._met_or_failed.is_set()

    def meet(self, timeout: float) -> bool:
        """Waits up to ``timeout`` seconds for :attr:`has_met`. Before, what is told may not reach
        all. False at once when a rank died meanwhile: the memberships have been told."""
        self._met_or_failed.wait(timeout)
        return self.protocol.ready

    def trouble_with(self, rank: int) -> str:
        """Outcome of the last attempt to reach a rank; "": nothing is known to have failed."""
        return self._sockets.trouble.get(rank, "")

    def sources(self) -> dict[int, str]:
        """The ranks that have connected from another address than they gave, and that address."""
        return dict(self._sockets.sources)

    def missing(self) -> list[int]:
        """The ranks that have not been heard yet, as far as this one can know."""
        if self.rank != 0:
            return [0]
        return [rank for rank in range(1, self.world) if rank not in self.protocol.welcomed]

    def hold(self) -> bool:
        """Keeps the plane from its end until ``release``. False: it is ending."""
        with self._lock:
            self._holders += not self._stopping
            return not self._stopping

    def release(self) -> None:
        """Undoes ``hold``; the last one leaves the world and joins the thread."""
        with self._lock:
            self._holders -= 1
            last = self._holders <= 0
            self._stopping = self._stopping or last  # nobody gets hold of it any more
        if last:
            self.close()

    def close(self) -> None:
        """Leaves the world, joins the thread, frees the sockets. Idempotent, also after Ctrl-C."""
        with self._lock:
            if self._thread is None and not self._over:
                self._over = self._stopping = True
                self._sockets.close(0)
                return
            self._stopping = True
            if not self._over:
                self._sockets.wake()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def rekey(self) -> None:
        """Has all processes of the world seal with new keys; returns at once."""
        self.post(self.protocol.rekey)

    def _rekey_hosts(self) -> None:
        for one in list(self.sealed):
            one.rekey()

    def post(self, task: Callable[[], None]) -> None:
        """Has the thread run ``task`` soon; nothing once the plane is at its end."""
        with self._lock:
            if not self._stopping:
                self._tasks.append(task)
                self._sockets.wake()

    def call(self, task: Callable[[], None]) -> None:
        """Has the thread run ``task``, and returns when it has: here where there is none."""
        done = threading.Event()

        def run() -> None:
            try:
                task()
            finally:
                done.set()

        thread = self._thread
        with self._lock:
            elsewhere = not self._over and threading.current_thread() is not thread
            if thread is not None and elsewhere:
                self._tasks.append(run)
                self._sockets.wake()
        while thread is not None and elsewhere and thread.is_alive():
            if done.wait(0.05):
                return
        if not done.is_set():
            task()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # all groups hear of it, or they'd never learn of a death again
            for membership in self.protocol.groups:
                membership.listener.on_broken(error)
            with contextlib.suppress(Exception):
                self._run_tasks()
            raise
        finally:
            with contextlib.suppress(Exception):
                self.protocol.say_goodbye()
            with self._lock:
                self._stopping = self._over = True
            is_heard = self.protocol.welcomed and not self.protocol.is_lost
            self._sockets.close(LINGER_SECONDS if is_heard else 0.0)
            self._met_or_failed.set()

    def _serve(self) -> None:
        until = 0.0
        while not self._stopping or (self.protocol.seeks_coordinator and self.clock() < until):
            if not self._stopping:
                until = self.clock() + LINGER_SECONDS
            # Receive before judging: what has come while this thread had to wait is no silence.
            pause = self.protocol.due - self.clock()
            events = self._sockets.poll(min(pause, LEAVING_SECONDS) if self._stopping else pause)
            self._run_tasks()
            self.protocol.step(events)
        self._run_tasks()

    def _run_tasks(self) -> None:
        while self._tasks:
            self._tasks.popleft()()


def _abandon() -> None:
    for plane in list(_here):
        plane._over = plane._stopping = True
        plane._lock = threading.RLock()  # another thread may have had it
        plane._sockets.abandon()
    _here.clear()


os.register_at_fork(after_in_child=_abandon)
