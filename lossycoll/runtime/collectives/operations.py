"""Operations of one group: numbered, submitted to the engine, waited for, and why they failed."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from lossycoll.errors import ClosedError, LossyError, PeerLostError
from lossycoll.options.fields import Options
from lossycoll.plan import Delivery, signature
from lossycoll.plan.codec import number_of, phases
from lossycoll.plan.tiers import RELIABLE
from lossycoll.runtime.core.call import CallKey, CallOptions, Collective, Operation, text_of
from lossycoll.runtime.core.logfmt import event, log
from lossycoll.runtime.engine.binding import DType, EngineCall, EngineGroup
from lossycoll.runtime.engine.failures import Code, Failure, Where, error_of
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions
from lossycoll.runtime.world.messages import View

from .estimators import BY_COUNT, Means
from .group_context import GroupContext, Members

POLL_SECONDS: Final = 0.005
"""Period at which a caller looks whether the view change is over."""


class InterruptSafeLock(_thread.RLock):  # type: ignore[misc]  # only the stubs call it final
    """A lock that Ctrl-C can't leave held, for a ``with`` statement.

    Until Python 3.13 an RLock is one: nothing comes between taking it and the statement's body.
    From 3.14 on, Ctrl-C may come there. The base class knows its owner, so that only who has it
    gives it back then. Its own ``__exit__`` is in C: nothing interrupts it before it is done.
    """

    def __enter__(self) -> bool:  # type: ignore[override]
        try:
            return self.acquire()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # interrupted as it waited, before it had it
                self.release()
            raise


INTERRUPT_SAFE: Final = _thread.RLock if sys.version_info < (3, 14) else InterruptSafeLock


def on_top() -> RuntimeError:
    """What is raised where the thread that has the lock asks for it once more."""
    return RuntimeError(
        "a signal's handler makes it on top of a call that this thread is submitting; have the "
        "handler set a flag, and make the call in the training loop"
    )


class Sequencer:
    """Numbers the operations: whoever holds ``lock`` may submit operation ``next``.

    ``lock`` is to be used in a ``with`` statement, where Ctrl-C can't leave it held. ``check`` is
    called while callers wait for a view change, and may raise. Other threads may call ``stop`` and
    ``resume``.
    """

    def __init__(self, rank: int, world: int, check: Callable[[], None]) -> None:
        self.next = 0
        self.lock: Final = INTERRUPT_SAFE()
        self._rank = rank
        self._world = world
        self._check = check
        self._stopped = False
        everyone = Members(world, rank, tuple(range(world)))
        self._views: list[tuple[int, Members]] = [(0, everyone)]

    def members(self) -> Members:
        """Members of operation ``next``. The caller holds ``lock``; a view change is waited for."""
        while self._stopped:
            try:
                self.lock.release()  # in here: whatever interrupts the sleep takes it back
                time.sleep(POLL_SECONDS)
            finally:
                self.lock.acquire()
            self._check()
        return self.at(self.next)

    def is_for(self, members: Members) -> bool:
        """True if operation ``next`` is for these, and no view change is under way."""
        first, latest = self._views[-1]
        return latest is members and self.next >= first and not self._stopped

    def at(self, number: int) -> Members:
        views = self._views
        if number >= views[-1][0]:  # nearly always, and this is asked for each operation
            return views[-1][1]
        return next((members for first, members in reversed(views) if number >= first), views[0][1])

    @property
    def latest(self) -> Members:
        return self._views[-1][1]

    def stop(self) -> int:
        """Lets nobody submit until ``resume``; returns the number of the next operation."""
        self._stopped = True  # before the lock, which a thread that submits anew may win each time
        with self.lock:
            return self.next

    def resume(self, views: Sequence[View], *, agreed: bool) -> None:
        """Takes over the views; callers may submit again if the last one is ``agreed``."""
        with self.lock:
            self._views = [
                (view.first, Members(self._world, self._rank, view.members)) for view in views
            ]
            if agreed:
                self._stopped = False


@lru_cache(maxsize=64)
def lossy_delivery(options: Options) -> Delivery:
    code, most_parity, missing = options.recovery
    chooses = options.chooses_rounds
    return Delivery(False, 0 if chooses else options.repair, code, most_parity, chooses, missing)


Key = tuple[EngineCall, CallKey, str, Options, DType, float, float, str, bool, bool]
"""All that tells engine calls without data apart: plan, call, estimator, options, dtype, scale,
timeout in seconds, encoding, notify, waits. Ranks compare the call and the estimator."""


def prepare(
    key: Key, means: Means = BY_COUNT, blocks: Blocks | Contributions | None = None
) -> EngineCall:
    """The plan with all that the engine is told besides. ``means`` and ``blocks`` are those of one
    operation only, where weights or packets are like no other's."""
    planned, call, estimator, options, dtype, scale, timeout, encoding, notify, waits = key
    reliable = options.delivery == "reliable"
    how, text = RELIABLE if reliable else lossy_delivery(options), text_of(call)
    missing = np.float32(how.max_missing).view(np.uint32)  # all of it that engines are told
    return planned.given(
        dtype=dtype,
        scale=scale,
        signature=signature(
            *(text, estimator, planned.plan.signature, how.reliable, how.repair),
            *(how.code.number, how.most_parity, int(missing), how.choose_rounds),
            *map(number_of, phases(encoding)),
        ),
        timeout=timeout,
        delivery=how,
        encoding=encoding,
        notify=notify,
        waits=waits,
        lingers=True,
        deterministic=bool(options.deterministic),
        text=text,
        weights=means.weights,
        divisor=means.divisor,
        selective=blocks is not None and not blocks.feedback,
        feedback=blocks is not None and blocks.feedback,
        needed=b"" if blocks is None else blocks.encoded(),
    )


prepared: Final = lru_cache(maxsize=256)(prepare)
"""Kept for the calls that come again: filling one in takes longer than sending 4 KiB."""


class Steady(NamedTuple):
    """What the engine is told by all calls that are like one."""

    ready: EngineCall
    members: Members
    call_options: CallOptions  # Without the tensors, which each call has for itself
    timeout: float
    group_timeout: float  # The group's, when this was made
    notify: bool
    exact: bool


VERDICT_SECONDS: Final = 5.0
"""Time that a mismatch found by the engine waits for the control plane to name both calls: an
answer takes milliseconds, but on a starved machine two threads must get their turn for it."""
REAP_FROM: Final = 8
"""Unfinished operations from which on submitting looks for some that nobody waits for."""


class Operations:
    """Operations that were submitted and aren't released yet.

    ``timeout``: seconds for ranks that never take part; it may change. ``unfinished``: by ticket,
    those whose tickets the engine still holds. ``first_failed``: number of the first call of which
    one failed; None before that.
    """

    def __init__(self, context: GroupContext, timeout: float) -> None:
        self._health = context.health
        self._engine = context.engine
        self._where = context.health.where
        self.note_waiting: Final = context.health.waiting
        if self._engine is not None:  # in a world of one nothing is waited for
            self.wait_ticket: Callable[[int, float], int] = self._engine.wait
        self._tracing = log.isEnabledFor(logging.DEBUG)
        self.watched = False
        """Whether somebody collects the tickets that the engine names when they are done."""
        self.timeout = timeout
        self.sequencer: Final = Sequencer(self._where.rank, self._where.world, context.check_sound)
        self.unfinished: Final[dict[int, Operation]] = {}
        self.any_ended = False
        self.first_failed: int | None = None

    def submitting(self) -> AbstractContextManager[bool]:
        """To be entered. First finishes operations that nobody waits for: not inside, since their
        futures' callbacks may submit operations."""
        if len(self.unfinished) >= REAP_FROM:
            self._reap()
        if self.sequencer.lock._is_owned():  # type: ignore[attr-defined]  # not in its stubs
            raise on_top()
        return self.sequencer.lock

    def submit(
        self,
        planned: EngineCall,
        call: Collective,
        buffers: tuple[int, int],
        dtype: DType,
        call_options: CallOptions,
        *,
        means: Means | None = None,
        blocks: Blocks | Contributions | None = None,
        steady: bool = False,
    ) -> Operation:
        """Hands the engine operation ``sequencer.next``; in ``submitting()``. ``steady``: calls
        like this one have the same plan, and so the same engine's call."""
        if self._engine is None:
            # In a world of one every result is this rank's own input, and done at once.
            operation = Operation(self, call, call_options, 0.0)
            operation.blocks = blocks
            if buffers[0] != buffers[1] and not call_options.on_device:
                nbytes = planned.plan.out_elements * dtype.itemsize
                ctypes.memmove(buffers[1], buffers[0], nbytes)
            operation.complete()
            return operation
        timeout = self.timeout if call_options.timeout is None else call_options.timeout
        operation = Operation(self, call, call_options, timeout)
        # Not the latest: a rank that is late still submits operations of the view before.
        members = self.sequencer.at(self.sequencer.next)
        operation.members = members.ranks
        reliable = call_options.options.delivery == "reliable"
        operation.exact, operation.blocks = reliable and means is None, blocks
        # Until the watcher runs, nobody would collect the finished ticket.
        operation.notify = call_options.future and self.watched
        estimator = "" if reliable else blocks.meaning if blocks else call_options.options.estimator
        scale = 1.0 if call_options.mean else float(self._where.world)
        try:
            key = (
                planned, call.key, estimator, call_options.options, dtype, scale, timeout,
                call_options.encoding, operation.notify, not call_options.future,
            )  # fmt: skip
            # Weights and packets are like no other's.
            is_fresh = blocks is not None or means not in (None, BY_COUNT)
            ready = prepare(key, means or BY_COUNT, blocks) if is_fresh else prepared(key)
            if steady and not (self._tracing or call_options.is_ones_own):
                kept = call_options._replace(keep=None)
                own = operation.notify, operation.exact
                operation.steady = Steady(ready, members, kept, timeout, self.timeout, *own)
            self._engine.submit(ready, *buffers, operation, call_options.gate, call.seq)
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
            self._trace_begin(operation, buffers)
        return operation

    def submit_again(
        self, steady: Steady, call: Collective, buffers: tuple[int, int], keep: object
    ) -> Operation | None:
        """Issues and submits a call like one before; None: it isn't, and nothing was done."""
        engine, sequencer, future = self._engine, self.sequencer, steady.call_options.future
        assert engine is not None
        if steady.group_timeout != self.timeout or steady.notify != (future and self.watched):
            return None
        self._health.admit(call)  # before the lock, which a forked child may never get
        if len(self.unfinished) >= REAP_FROM:
            self._reap()
        operation = Operation(self, call, steady.call_options, steady.timeout)
        operation.members, operation.exact = steady.members.ranks, steady.exact
        operation.notify, operation.keep = steady.notify, keep
        if sequencer.lock._is_owned():  # type: ignore[attr-defined]  # as in submitting()
            raise on_top()
        try:
            with sequencer.lock:
                if not sequencer.is_for(steady.members):
                    return None
                self._health.issue(call)
                try:
                    engine.submit(steady.ready, *buffers, operation, 0, call.seq)
                finally:
                    if operation.ticket:  # as in submit()
                        call.last_op = sequencer.next
                        sequencer.next = call.last_op + 1
                        call.submitted += 1
                        self.unfinished[operation.ticket] = operation
        except LossyError as error:
            if call.seq < 0:
                raise  # not issued
            self._note_failed(call)
            raise (self._health.failure or error).again(call.numbered) from None
        return operation

    def _reap(self) -> None:
        """Finishes operations whose work was dropped without a wait, oldest first."""
        for operation in list(self.unfinished.values()):
            if not operation.poll():
                return

    # ---- what an operation asks for (core/call.py's Submitter) ----

    def wait_result(self, operation: Operation, seconds: float) -> int:
        assert self._engine is not None
        code = self._engine.wait_result(operation.ticket, seconds)
        if code == Code.OK and operation.blocks is not None:
            operation.blocks.note(self._engine, operation.ticket)
        return code

    def take(self, operation: Operation) -> LossyError | None:
        if self._engine is None:
            return None
        self.any_ended = True
        if operation.code == Code.OK:
            # More is to be known of one that ended well? Only a rank's death leaves out what is
            # exact.
            died = operation.exact and self._health.lost
            if not (died or operation.blocks is not None or operation.observe or self._tracing):
                return None
        try:
            code, kept = self._engine.outcome(operation.ticket)
            if self._tracing:
                self._trace_end(self._engine, operation)
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

    def release(self, operation: Operation) -> None:
        """The engine forgets a finished operation. A second time nothing: a signal's handler may
        have come on top of the first."""
        if self.unfinished.pop(operation.ticket, None) is None or self._engine is None:
            return
        try:  # noqa: SIM105  once for each operation: no object for it
            self._engine.release(operation.ticket)
        except ClosedError:  # closing frees it as well
            pass

    def where(self, operation: Operation) -> Where:
        """An operation of this rank, as errors name it."""
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
            if failure.code == Code.LINK:
                where = replace(where, cut_off=self._health.why_cut_off(failure.peer))
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

    # ---- the log ----

    def _trace_begin(self, operation: Operation, buffers: tuple[int, int]) -> None:
        """Logs that an operation was submitted."""
        event(
            logging.DEBUG,
            self._where,
            "begin",
            seq=operation.call.seq,
            op=operation.call.last_op,
            call=operation.call,
            ranks=len(operation.members),
            in_place=buffers[0] == buffers[1],
        )

    def _trace_end(self, engine: EngineGroup, operation: Operation) -> None:
        """Logs what became of it, and when its streams began and ended."""
        report, failure = engine.result(operation.ticket)
        with contextlib.suppress(ClosedError):
            for stream in engine.streams(operation.ticket):
                event(logging.DEBUG, self._where, "stream", op=report.op, **stream.in_seconds())
        event(
            logging.DEBUG,
            self._where,
            "end",
            seq=operation.call.seq,
            op=report.op,
            call=operation.call,
            code=Code(failure.code).name,
            cause=report.cause.name,
            seconds=report.elapsed,
            sent=report.packets_sent,
            resent=report.packets_resent,
            received=report.packets_received,
            recovered=report.packets_recovered,
            missing=report.packets_missing,
            contributions=report.contributions_mean,
            own_filled=report.own_filled,
        )
