"""One rank's endpoint of a group, without torch: its collectives, lost ranks, its end.

A rank leaves a group (``Leaving``) not before the others have what they need of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

from lossycoll.errors import ClosedError, LossyError
from lossycoll.plan import packet_count
from lossycoll.runtime.core.call import Collective
from lossycoll.runtime.core.logfmt import event, log
from lossycoll.runtime.engine.binding import DType
from lossycoll.runtime.engine.failures import MESSAGES, error_of
from lossycoll.runtime.engine.gates import Wakers
from lossycoll.runtime.world.messages import View

from .collective_endpoint import CollectiveEndpoint
from .group_context import GroupContext
from .group_stats import GroupStats
from .operations import Operations
from .watcher import Watcher

LINGER_SECONDS: Final = 1.0
"""Time that a leaving rank waits for the others to leave, too."""
INTERRUPTED_SECONDS: Final = 0.1
"""The same, where a signal's handler leaves on top of a call that waits: that call would have to
end first, and the others can't leave before it does."""


class Leaving:
    """End of one group at this rank."""

    def __init__(
        self, context: GroupContext, operations: Operations, watcher: Watcher, stats: GroupStats
    ) -> None:
        self._health = context.health
        self._where = context.health.where
        self._options = context.options
        self._engine = context.engine
        self._control = context.control
        self._operations = operations
        self._watcher = watcher
        self._stats = stats
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = self._announced = self._awaited_delivery = False

    def close(self) -> None:
        """Announces to the other ranks that this one leaves, ends what is pending, joins threads.
        Idempotent; if Ctrl-C interrupts it, the next call does the rest."""
        if os.getpid() != self._pid or not self._closing.acquire(blocking=False):
            return
        try:
            if not self._closed:
                self._leave()
                self._closed = True
        finally:
            self._closing.release()

    def _leave(self) -> None:
        self._await_delivery()
        self._health.closed = True
        if self._control is not None and not self._announced:
            interrupted = self._engine is not None and self._engine.is_interrupted()
            patience = INTERRUPTED_SECONDS if interrupted else LINGER_SECONDS
            last = self._last_finished(patience)
            self._announced = True
            self._control.leave(last, _own_error())
            self._health.await_others(patience)
        self._stats.tell_missing()
        self._stats.own()
        self._watcher.join()
        if self._control is not None:
            self._control.close()
        if self._options.inject:
            # Otherwise a run in which nothing was dropped would look like one that loss can't harm.
            found = self._stats.stats()
            counts = {name: getattr(found, name) for name in ("packets_sent", "packets_injected")}
            event(logging.INFO, self._where, "left", **counts)
        if self._engine is not None:
            self._engine.close()
        for operation in list(self._operations.unfinished.values()):
            operation.complete()
        self._health.detach()

    def _await_delivery(self) -> None:
        """Waits until the other ranks have what they need of calls that were done here before.

        The calls' own timeouts bound that; after an error of this rank's own, a second does. Once:
        who interrupts it doesn't have to do so again at exit.
        """
        if self._engine is None or self._awaited_delivery:
            return
        self._awaited_delivery = True
        begin = time.monotonic()
        last = self._health.last_call()
        wait = None if last is None else self._health.long_wait(last, begin)
        pause, lingered, sound = 0.0002, False, self._health.failure is None
        while self._engine.lingering()[0] and self._health.failure is None:
            lingered = True
            now = time.monotonic()
            if now - begin > LINGER_SECONDS and _own_error():
                break
            if wait is not None:
                wait.ask_if_due(now)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        failure = self._operations.group_failure(Collective("call")) if sound else None
        if failure is not None or (lingered and self._engine.lingering()[0]):
            log.warning(
                "%s: leaves, and other ranks may lack data of calls that were done here: %s",
                self._where,
                failure or "they have not taken part in them",
            )

    def finish_delivery(self, call: Collective) -> None:
        """Waits, a second at most, until the other ranks have what they need of the calls before
        ``call``, which were done here: its error would overtake that, and fail those calls."""
        end = time.monotonic() + LINGER_SECONDS
        while (
            self._engine is not None
            and self._health.failure is None
            and self._owes_before(call)
            and time.monotonic() < end
        ):
            time.sleep(0.0005)

    def _owes_before(self, call: Collective) -> bool:
        assert self._engine is not None
        lingering, oldest = self._engine.lingering()
        if not lingering:
            return False
        of = self._health.call_of(oldest)
        return of is None or call.seq < 0 or of.seq < call.seq

    def _last_finished(self, patience: float) -> int:
        """Number of the last call in which no other rank needs this one any more. Pending
        operations get ``patience`` seconds to end: others may wait for them."""
        end = time.monotonic() + patience
        for operation in list(self._operations.unfinished.values()):
            while not operation.poll(end - time.monotonic()):
                if self._health.failure is not None or time.monotonic() >= end:
                    return operation.call.seq - 1
        last, failed = self._health.seq, self._operations.first_failed
        if failed is not None:
            last = min(failed - 1, last)
        return min(self._lingers_from() - 1, last)

    def _lingers_from(self) -> int:
        """Number of the first call that is done here and not everywhere; else the next call's."""
        lingering, oldest = self._engine.lingering() if self._engine is not None else (0, 0)
        call = self._health.call_of(oldest) if lingering else None
        return self._health.seq + 1 if call is None else call.seq


def _own_error() -> str:
    """The exception by which this rank leaves: in flight, or what has ended its script."""
    uncaught = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    error = sys.exc_info()[1] or uncaught
    if not isinstance(error, Exception):
        return ""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


class Endpoint(CollectiveEndpoint):
    """The endpoint that a group has. What the control plane says of other ranks comes here, too.

    Attributes:
        health: The group's, as in ``context``.
        options: The group's, as in ``context``.
        operations: Operations that were submitted.
        watcher: Completes what only a future waits for.
        stats: Counters of the group.
    """

    def __init__(self, context: GroupContext, *, timeout: float) -> None:
        super().__init__(context, timeout=timeout)
        self.watcher: Final = Watcher(context, self.operations)
        self._leaving = Leaving(context, self.operations, self.watcher, self.stats)

    @property
    def one_host(self) -> bool:
        """True if nothing that the ranks send leaves a host."""
        return self._topology.one_host

    @property
    def host_each(self) -> bool:
        """True if each rank counts as a host of its own."""
        return len(set(self._topology.hosts)) == self.world

    @property
    def group(self) -> int:
        """The group's number, the same on all ranks."""
        return self._group

    @property
    def wakers(self) -> Wakers:
        """Wakers for the gates of its operations."""
        assert self._engine is not None
        return self._engine.wakers

    @property
    def timeout(self) -> float:
        """Seconds for ranks that never take part."""
        return self.operations.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.operations.timeout = seconds

    @property
    def block_bytes(self) -> int:
        """Bytes of one packet's data, without an encoding."""
        return self._payload

    def block_elements(self, encoding: str) -> int:
        """The float32 elements that one packet carries. ``encoding``: a name of plan.codec's."""
        return self._block_elements(encoding)

    def blocks(self, nbytes: int, encoding: str = "same") -> int:
        """The number of packets that carry so many bytes, of float32 if they are encoded."""
        if encoding == "same":
            return packet_count(nbytes, self._payload)
        return packet_count(nbytes // DType.F32.itemsize, self.block_elements(encoding))

    # ---- what the control plane says of other ranks, in its thread ----

    def lose(self, rank: int) -> int:
        """Stops submitting until :meth:`go_on`, and gives a rank up."""
        assert self._engine is not None
        # First: who waited for the rank could otherwise submit another operation of the old view.
        following = self._sequencer.stop()
        with contextlib.suppress(ClosedError):
            self._engine.peer_dead(rank)
        return following

    def left(self, rank: int) -> None:
        """A rank has left in order: nothing else comes from it.

        Nor does it need what was done here before its last call. If it never took part in something
        that is still sent, the group fails by that.
        """
        if self._engine is not None:
            with contextlib.suppress(ClosedError):
                if self._engine.lingering()[0]:
                    self.health.waiting_for_last()
                self._engine.peer_left(rank)

    def go_on(self, views: Sequence[View], agreed: bool) -> None:
        """Takes views over, and submits again if the last one is agreed."""
        before = self._sequencer.latest
        self._sequencer.resume(views, agreed=agreed)
        after = self._sequencer.latest
        for rank in sorted(set(after.lost) - set(before.lost)):
            log.warning(
                "%s: lost %s; going on with ranks %s from operation %d on, means are over those",
                self.health.where,
                self.health.where.peer(rank),
                ", ".join(str(rank) for rank in after.ranks),
                views[-1].first,
            )

    def lost_alike(self) -> tuple[int, ...]:
        """Lost ranks, as of the last operation submitted here."""
        return self._sequencer.at(self._sequencer.next - 1).lost

    def look(self) -> None:
        """Now and then, from the control plane's thread: warns of what the figures show, and tells
        the other ranks of a message that ended the group, which nobody here may wait for."""
        self.stats.own()
        if self.health.failure is None and self._engine is not None:
            with contextlib.suppress(ClosedError):
                failure = self._engine.failure()
                if failure.code in MESSAGES:
                    self.health.fail(error_of(failure, self.health.where), tell=True)

    # ---- the end ----

    def fail(self, call: Collective, error: LossyError) -> None:
        """Makes an error of this rank's own the failure of all ranks. It doesn't overtake calls
        that were done here: other ranks get what they need of them first, within a second."""
        try:
            self._leaving.finish_delivery(call)
        finally:  # also if Ctrl-C ends the wait
            self.health.fail(error, tell=True)

    def close(self) -> None:
        """Announces to the other ranks that this one leaves, ends what is pending, joins threads.
        Idempotent; if Ctrl-C interrupts it, the next call does the rest."""
        self._leaving.close()
