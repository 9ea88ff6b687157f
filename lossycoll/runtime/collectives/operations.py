"""Operations of one group: submitted to the engine, waited for, ended, explained if they fail."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Final

from lossycoll.errors import ClosedError, LossyError, PeerLostError
from lossycoll.runtime.core.call import CallOptions, Collective, Operation
from lossycoll.runtime.engine.binding import DType, Encoded
from lossycoll.runtime.engine.failures import Code, Failure, Where, error_of
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions

from . import engine_call, trace
from .estimators import BY_COUNT, Means
from .group_context import GroupContext
from .sequencer import Sequencer

VERDICT_SECONDS: Final = 5.0
"""How long a mismatch that the engine found waits for the control plane to name both calls: an
answer takes milliseconds, but on a starved machine two threads must get their turn for it."""
REAP_FROM: Final = 8
"""Unfinished operations from which on submitting looks for some that nobody waits for."""


class Operations:
    """Operations that were submitted and aren't released yet.

    Args:
        context: The rank's context of the group. Without an engine nothing can be submitted.
        timeout: Seconds for ranks that never take part.

    Attributes:
        timeout: The same; it may change.
        sequencer: Who may submit, and for which ranks.
        unfinished: By ticket, those whose tickets the engine still holds.
        any_ended: Whether one has ended here.
        first_failed: Number of the first call of which one failed; None before that.
    """

    def __init__(self, context: GroupContext, timeout: float) -> None:
        self._health = context.health
        self._engine = context.engine
        self._where = context.health.where
        self._tracing = trace.wanted()
        self._watched = False
        self.timeout = timeout
        self.sequencer: Final = Sequencer(self._where.rank, self._where.world, context.check_sound)
        self.unfinished: Final[dict[int, Operation]] = {}
        self.any_ended = False
        self.first_failed: int | None = None

    def submitting(self) -> threading.Lock:
        """To be entered. First finishes operations that nobody waits for: not inside, since their
        futures' callbacks may submit operations."""
        if len(self.unfinished) >= REAP_FROM:
            self._reap()
        return self.sequencer.lock

    def submit(
        self,
        encoded: Encoded,
        call: Collective,
        buffers: tuple[int, int],
        dtype: DType,
        call_options: CallOptions,
        *,
        means: Means | None = None,
        blocks: Blocks | Contributions | None = None,
    ) -> Operation:
        """Hands the engine operation ``sequencer.next``; in ``submitting()``.

        Args:
            encoded: This rank's plan.
            call: The call that it serves.
            buffers: Addresses of input and output.
            dtype: The elements' type.
            call_options: How it is to be done.
            means: How contributions are averaged; reductions only. Those of a rank that dies
                meanwhile then count as lost, instead of failing it.
            blocks: What becomes of single packets, for calls that are to know.

        Raises:
            LossyError: The group has failed, or the engine refused the operation.
        """
        assert self._engine is not None
        timeout = self.timeout if call_options.timeout is None else call_options.timeout
        reliable = call_options.options.delivery == "reliable"
        operation = Operation(self, call, call_options, timeout)
        operation.members = self.sequencer.at(self.sequencer.next).ranks
        operation.exact, operation.blocks = reliable and means is None, blocks
        # Until the watcher runs, nobody would collect the finished ticket.
        operation.notify = call_options.future and self._watched
        estimator = "" if reliable else blocks.meaning if blocks else call_options.options.estimator
        scale = 1.0 if call_options.mean else float(self._where.world)
        try:
            key = engine_call.CacheKey(
                encoded, call.key, estimator, call_options.options, dtype, scale, timeout,
                call_options.encoding, notify=operation.notify, waits=not call_options.future,
            )  # fmt: skip
            if blocks is None and (means is None or means is BY_COUNT):
                ready = engine_call.ready(key)
                self._engine.submit_ready(ready, *buffers, operation, call_options.gate, call.seq)
            else:
                once = engine_call.with_data(key, buffers, means or BY_COUNT, blocks)
                self._engine.submit(encoded, once, operation, call_options.gate, call.seq)
        except LossyError as error:
            self._note_failed(call)
            raise (self._health.failure or error).again(call.numbered) from None
        finally:
            # Calls nothing, so that Ctrl-C can't come between: the engine writes to the buffers.
            if operation.ticket:
                call.last_op = self.sequencer.next
                self.sequencer.next = call.last_op + 1
                call.submitted += 1
                self.unfinished[operation.ticket] = operation
        if self._tracing:
            trace.begin(self._where, operation, call.last_op, buffers)
        return operation

    def _reap(self) -> None:
        """Finishes operations whose work was dropped without a wait, oldest first."""
        for operation in list(self.unfinished.values()):
            if not operation.poll():
                return

    def notify_futures(self) -> None:
        """From now on somebody collects the tickets that the engine names when they are done."""
        self._watched = True

    def await_noted(self, ticket: int) -> Operation:
        """By its ticket; it may be done before the thread that submits it has noted it."""
        while (found := self.unfinished.get(ticket)) is None:
            time.sleep(0.0001)
        return found

    # ---- what an operation asks for (core/call.py's Submitter) ----

    def wait_ticket(self, ticket: int, seconds: float) -> int:
        assert self._engine is not None
        return self._engine.wait(ticket, seconds)

    def wait_result(self, operation: Operation, seconds: float) -> int:
        assert self._engine is not None
        code = self._engine.wait_result(operation.ticket, seconds)
        if code == Code.OK and operation.blocks is not None:
            operation.blocks.note(self._engine, operation.ticket)
        return code

    def take(self, operation: Operation) -> LossyError | None:
        """A finished operation's error, if it has one."""
        assert self._engine is not None
        self.any_ended = True
        if operation.code == Code.OK and not self._needs_report(operation):
            return None
        try:
            code, kept = self._engine.outcome(operation.ticket)
            if self._tracing:
                trace.end(
                    self._where, self._engine, operation, *self._engine.result(operation.ticket)
                )
            if operation.observe is not None:
                report, _ = self._engine.result(operation.ticket)
                operation.observe(report, self._engine.streams(operation.ticket))
            if code >= 0:
                if operation.blocks is not None:
                    if not operation.shown:
                        operation.blocks.note(self._engine, operation.ticket)
                    return None  # they say what is missing
                return self._died_midway(operation) if operation.exact and kept else None
            failure = self._engine.result(operation.ticket)[1]
        except ClosedError as error:
            return self._health.failure or error
        self._note_failed(operation.call)
        return self._explain(operation.call, operation.timeout, failure)

    def _needs_report(self, operation: Operation) -> bool:
        """Whether more is to be known of one that ended well. Only a rank's death leaves out what
        is exact."""
        died = operation.exact and bool(self._health.lost)
        seen = self._tracing or operation.observe is not None
        return died or operation.blocks is not None or seen

    def release(self, operation: Operation) -> None:
        """The engine forgets a finished operation. A second time nothing: a signal's handler may
        have come on top of the first."""
        assert self._engine is not None
        if self.unfinished.pop(operation.ticket, None) is None:
            return
        with contextlib.suppress(ClosedError):  # closing frees it as well
            self._engine.release(operation.ticket)

    def note_waiting(self, call: Collective) -> None:
        self._health.waiting(call)

    def where(self, operation: Operation | None = None) -> Where:
        """What errors say about this rank, or about one of its operations."""
        if operation is None:
            return self._where
        return self._where_of(operation.call, operation.timeout)

    def _where_of(self, call: Collective, timeout: float) -> Where:
        here = self._where
        return Where(here.rank, here.world, str(call), call.seq, here.addresses, timeout)

    # ---- failures ----

    def _note_failed(self, call: Collective) -> None:
        if self.first_failed is None or call.seq < self.first_failed:
            self.first_failed = call.seq

    def _died_midway(self, operation: Operation) -> PeerLostError:
        """A rank died during an exact operation; only this operation fails."""
        lost = sorted(self._health.lost.keys() & set(operation.members))
        names = " and ".join(self._where.peer(rank) for rank in lost)
        return PeerLostError(
            f"{self.where(operation)}: {names} died before all of its data came; other ranks may "
            f"have it all. The group continues without; the contents of the result are undefined",
            peer=lost[0] if lost else None,
        )

    def _explain(self, call: Collective, timeout: float, failure: Failure) -> LossyError:
        """The typed error of a failed operation of ``call``; it becomes the group's and goes to all
        ranks. A failure ends all operations, so it may be another one's."""
        error = self._health.failure
        numbered = failure.code in (Code.MISMATCH, Code.TIMEOUT, Code.LINK)
        if error is None and numbered and not failure.of_message:
            call = self._health.call_of(failure.op) or call
        if error is None and failure.code == Code.MISMATCH:
            self._health.waiting(call)
            error = self._health.await_failure(VERDICT_SECONDS)
        if error is None:
            # A collective that meets a message's failure is not what failed.
            others = failure.of_message and call.seq >= 0
            where = self._where if others else self._where_of(call, timeout)
            error = error_of(failure, where)
            self._health.fail(error, tell=True)
        return error

    def group_failure(self, call: Collective) -> LossyError | None:
        """The group's failure, met by ``call``. Only the engine may know of it until now: nobody
        need have waited for the operation that failed, and its own call may have ended well."""
        if self._health.failure is None and self._engine is not None:
            with contextlib.suppress(ClosedError):
                failure = self._engine.failure()
                if failure.code < 0:
                    return self._explain(call, self.timeout, failure)
        return self._health.failure

    def abort(self, error: LossyError) -> None:
        """Ends all operations because of the group's failure ``error``."""
        if self._engine is not None:
            with contextlib.suppress(ClosedError):
                self._engine.abort(Code.ABORTED, -1 if error.peer is None else error.peer)
