"""A group's sends and receives: posted to the engine, which carries them, and completed.

docs/messages.md has what is promised, and how messages travel.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from lossycoll.errors import ClosedError, LossyError, PeerLostError
from lossycoll.options.fields import Options
from lossycoll.runtime.core.call import CallOptions, Collective, Operation
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.failures import Code, Where, error_of, type_number
from lossycoll.runtime.world.group_state import Health

from .operations import REAP_FROM


class Transfer(Operation):
    """``peer``: the other rank; None as long as a receive from any rank has none."""

    __slots__ = ("is_send", "peer")

    is_send: bool
    peer: int | None


FLUSH_SECONDS: Final = 5.0
"""Time that a leaving rank waits until the others have what it has sent."""


class Tolerance(NamedTuple):
    """Loss that one end of a message tolerates. Packets are given up only where both ends have
    one."""

    repair: int
    """Rounds of resending before that; the greater one of both ends counts."""
    zero: bool
    """Whether what is missing becomes zero in a receive; else it stays as it was."""


class Messages:
    """One rank's end: ``post``, then ``flush`` and ``close``. ``group_failure``: the
    group's failure as the given call meets it; None if it has none."""

    def __init__(
        self,
        engine: EngineGroup,
        health: Health,
        options: Options,
        group_failure: Callable[[Collective], LossyError | None],
    ) -> None:
        self._engine = engine
        self._health = health
        self._options = options
        self._group_failure = group_failure
        self.note_waiting: Final = health.waiting
        self.wait_ticket: Final = engine.wait
        self._pid = os.getpid()
        self._transfers: dict[int, Transfer] = {}
        """Transfers whose tickets the engine still holds."""

    # ---- sends and receives ----

    def post(
        self,
        call: Collective,
        address: int,
        element_bytes: int,
        peer: int | None,
        tag: int,
        *,
        is_send: bool,
        keep: object,
        timeout: float,
        finish: Callable[[], None] | None = None,
        tolerance: Tolerance | None = None,
    ) -> Transfer:
        """Sends what lies at ``address`` to rank ``peer``, or fills it with the next message of
        ``tag`` from there (None: from any rank).

        Done when the memory may change again, and all has arrived. ``call`` has type and number of
        the elements, ``keep`` owns the memory. ``finish`` runs before a receive counts as done.
        PeerLostError: that rank is known to be gone.
        """
        call_options = CallOptions(self._options, keep=keep, epilogue=finish)
        transfer = Transfer(self, call, call_options, timeout)
        transfer.is_send, transfer.peer = is_send, peer
        # What a rank sent before it left may still be received.
        needed = peer if is_send or peer in self._health.lost else None
        if needed is not None and (gone := self._gone(needed)) is not None:
            raise gone.again(call.numbered)
        if len(self._transfers) >= REAP_FROM:
            self._reap()
        try:
            self._engine.post(
                transfer,
                address,
                timeout,
                elements=call.elements,
                element_bytes=element_bytes,
                type=type_number(str(call.dtype).removeprefix("torch.")),
                tag=tag,
                peer=-1 if peer is None else peer,
                receive=not is_send,
                lossy=tolerance is not None,
                repair=tolerance.repair if tolerance else 0,
                zero=tolerance is not None and tolerance.zero,
            )
        except LossyError as error:
            raise (self._group_failure(call) or error).again(call.numbered) from None
        finally:
            # Calls nothing, so that Ctrl-C can't come between: the engine uses the memory.
            if transfer.ticket:
                self._transfers[transfer.ticket] = transfer
        if not transfer.ticket:
            transfer.complete()
        return transfer

    def _gone(self, rank: int) -> LossyError | None:
        """Why a rank is gone, if it is."""
        health = self._health
        return health.lost_error(rank) if rank in health.lost else health.left(rank)

    def _reap(self) -> None:
        """Completes transfers whose works were dropped without a wait, oldest first."""
        for transfer in list(self._transfers.values()):
            with contextlib.suppress(ClosedError):
                # Looks only: a poll would do the engine's work in place of a later wait.
                if self._engine.outcome(transfer.ticket)[0] == Code.PENDING:
                    return
            transfer.complete()

    # ---- what a transfer asks for (core/call.py's Submitter) ----

    def wait_result(self, operation: Operation, seconds: float) -> int:
        return self.wait_ticket(operation.ticket, seconds)

    def take(self, operation: Operation) -> LossyError | None:
        """A finished transfer's error, if it has one. Notes whom a receive was served by."""
        assert isinstance(operation, Transfer)
        if not operation.ticket:
            return None
        try:
            code = self._engine.outcome(operation.ticket)[0]
            if code >= 0 and operation.peer is None:
                operation.peer = self._engine.source(operation.ticket)
            if code >= 0:
                return None
            failure = self._engine.result(operation.ticket)[1]
        except ClosedError:
            return self._health.failure or ClosedError(
                f"{self.where(operation)}: the group was destroyed before the operation ended"
            )
        # A rank may have left because the group had failed: then that is the reason.
        if (group := self._group_failure(operation.call)) is not None:
            return group
        where, peer = self.where(operation), operation.peer
        if failure.code == Code.PEER:  # of a receive from any: the first of them
            ranks = range(where.world) if peer is None else [peer]
            found = next(filter(None, map(self._gone, ranks)), None)
            return found or PeerLostError(f"{where}: the other rank is gone", peer=peer)
        return error_of(failure, where)

    def release(self, operation: Operation) -> None:
        if operation.ticket and self._transfers.pop(operation.ticket, None) is not None:
            with contextlib.suppress(ClosedError):  # closing frees it as well
                self._engine.release(operation.ticket)

    def where(self, operation: Operation) -> Where:
        """A transfer of this rank, as errors name it."""
        here, call = self._health.where, str(operation.call)
        return Where(here.rank, here.world, call, -1, here.addresses, operation.timeout)

    # ---- the end ----

    def flush(self) -> None:
        """Waits a little until the other ranks have all that was sent: before the goodbye, so that
        they know that nothing else will come."""
        if os.getpid() != self._pid:
            return
        end = time.monotonic() + FLUSH_SECONDS
        with contextlib.suppress(ClosedError):
            while self._health.failure is None and self._engine.unheard():
                if time.monotonic() >= end:
                    break
                time.sleep(0.001)
        self._reap()

    def close(self) -> None:
        """Ends what is pending, after the engine was closed. Idempotent."""
        if os.getpid() == self._pid:
            for transfer in list(self._transfers.values()):
                transfer.complete()
