"""One rank's endpoint of a group, without torch: chooses plans, submits, completes, reports.

Long because submitting, completing, failing and closing share one lock and the same tables of
unfinished operations.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.errors import ClosedError, EngineError, LossyError, PeerLostError
from lossycoll.options.fields import Options
from lossycoll.plan import Finish, Missing, default_algorithm, packet_count
from lossycoll.runtime.core.call import NUDGE_SECONDS, Collective, Operation, Terms
from lossycoll.runtime.core.logfmt import event
from lossycoll.runtime.engine.binding import DType, Encoded, EngineGroup
from lossycoll.runtime.engine.failures import MESSAGES, Code, Failure, Where, error_of
from lossycoll.runtime.engine.link_events import LinkLog
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions
from lossycoll.runtime.engine.reports import PeerStats, Report, Stats
from lossycoll.runtime.membership.group_state import Health
from lossycoll.runtime.membership.membership import Membership
from lossycoll.runtime.membership.view_agreement import View

from . import engine_call, plan_cache, single_rank
from .collective_endpoint import CollectiveEndpoint
from .estimators import BY_COUNT, Estimators, Means
from .plan_cache import PLANS
from .sequencer import Members, Sequencer
from .units import Units, units_of

log: Final = logging.getLogger("lossycoll")


def _own_error() -> str:
    """The exception by which this rank leaves: in flight, or what has ended its script."""
    uncaught = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    error = sys.exc_info()[1] or uncaught
    if not isinstance(error, Exception):
        return ""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


VERDICT_SECONDS: Final = 5.0
"""How long a mismatch that the engine found waits for the control plane to name both calls: an
answer takes milliseconds, but on a starved machine two threads must get their turn for it."""
LINGER_SECONDS: Final = 1.0
"""How long a rank that leaves waits for the others to leave, too."""
REAP_FROM: Final = 8
"""Unfinished operations from which on submitting looks for some that nobody waits for."""
FIGURES: Final = (
    "operations",
    "packets_sent",
    "packets_resent",
    "packets_received",
    "packets_recovered",
    "packets_missing",
    "packets_injected",
    "socket_overflow",
    "bytes_sent",
    "deadline_hits",
    "operation_ns",
)
"""What a rank tells others that ask for its counters."""


class Endpoint(CollectiveEndpoint):
    """The engine's. With ``health``, also the control plane's :class:`Listener`.

    ``engine`` and ``control`` are None in a world of one, where :class:`SingleRank` runs the
    collectives. ``group`` is the group's number, ``timeout`` its seconds for ranks that never take
    part.
    """

    def __init__(
        self,
        health: Health,
        *,
        options: Options,
        group: int,
        timeout: float,
        engine: EngineGroup | None,
        control: Membership | None,
    ) -> None:
        self.health = health
        self.options = options
        self.rank = health.where.rank
        self.world = health.where.world
        self.timeout = timeout
        self._group = group
        self._engine = engine
        self._control = control
        self._payload = engine.link().payload_bytes if engine is not None else single_rank.PAYLOAD
        self._estimators = Estimators(self.world, self._peer_stats)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._tracing = log.isEnabledFor(logging.DEBUG)
        self._sequencer = Sequencer(self.rank, self.world, self._check_sound)
        # Where a rank may be lost, none but the root may forward the data of others.
        self._fanout = self.world if options.continues else 2
        self._ended = False
        self._closing = threading.Lock()
        self._closed = self._announced_leave = self._awaited_delivery = False
        self._overflow_warned = False
        self._link_log = LinkLog()
        self._first_failed: int | None = None
        self._operations: dict[int, Operation] = {}
        """Those whose tickets the engine still holds."""
        self._watched: dict[int, Callable[[float], None]] = {}
        self._unnotified: deque[Operation] = deque()
        self._watcher: threading.Thread | None = None

    # ---- operations (CollectiveEndpoint) ----

    def all_reduce(
        self, call: Collective, address: int, elements: int, dtype: DType, terms: Terms
    ) -> Operation:
        options = terms.options
        missing = Missing[options.on_missing.upper()]
        per_packet = self._units(dtype, terms).per_packet
        with self._submitting():
            members = self._sequencer.members()
            by = plan_cache.algorithm("all_reduce", members, options.algorithm)
            order = plan_cache.order(by, members, options, self._group, self._sequencer.next)
            means = self._estimators.means(options, members)
            finish = means.finish or Finish.MEAN
            encoded = PLANS["all_reduce"](
                members, by, elements, per_packet, order=order, missing=missing, finish=finish
            )
            return self._submit(encoded, call, (address, address), dtype, terms, means=means)

    def reduce_scatter(
        self,
        call: Collective,
        buffers: tuple[int, int],
        elements: int | tuple[int, ...],
        dtype: DType,
        terms: Terms,
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            means = self._estimators.means(terms.options, members)
            finish = means.finish or Finish.STRATIFIED
            by = plan_cache.algorithm("reduce_scatter", members, terms.options.algorithm)
            per_packet = self._units(dtype, terms).per_packet
            encoded = PLANS["reduce_scatter"](members, by, elements, per_packet, finish=finish)
            return self._submit(encoded, call, buffers, dtype, terms, means=means)

    def reduce_scatter_blocks(
        self,
        call: Collective,
        buffers: tuple[int, int],
        elements: int,
        dtype: DType,
        terms: Terms,
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            per_packet = self._payload // dtype.itemsize
            finish = Finish.STRATIFIED
            means = BY_COUNT
            if terms.options.delivery == "lossy":
                finish, means = Finish.WEIGHTED, Means(divisor=float(len(members.ranks)))
            # Blocks are counted in the streams of this plan.
            by = default_algorithm("reduce_scatter")
            encoded = PLANS["reduce_scatter"](members, by, elements, per_packet, finish=finish)
            blocks = Contributions(encoded.plan)
            return self._submit(encoded, call, buffers, dtype, terms, means=means, blocks=blocks)

    def broadcast(
        self, call: Collective, address: int, nbytes: int, root: int, terms: Terms
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            self._need(call, members, (root,))
            by = plan_cache.algorithm("broadcast", members, terms.options.algorithm)
            units = self._units(DType.BYTES, terms)
            count = units.count(nbytes)
            encoded = PLANS["broadcast"](
                members, by, count, units.per_packet, root=root, fanout=self._fanout
            )
            return self._submit(encoded, call, (address, address), units.dtype, terms)

    def all_gather(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int | tuple[int, ...],
        terms: Terms,
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            self._need_all(call, members, terms)
            by = plan_cache.algorithm("all_gather", members, terms.options.algorithm)
            units = self._units(DType.BYTES, terms)
            count = units.count(nbytes) if isinstance(nbytes, int) else units.counts(nbytes)
            encoded = PLANS["all_gather"](members, by, count, units.per_packet)
            return self._submit(encoded, call, buffers, units.dtype, terms)

    @property
    def block_bytes(self) -> int:
        """What one packet carries."""
        return self._payload

    def blocks(self, nbytes: int) -> int:
        """Packets that carry ``nbytes``."""
        return packet_count(nbytes, self._payload)

    def all_gather_blocks(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int,
        needed: NDArray[np.bool_] | None,
        terms: Terms,
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            encoded = PLANS["all_gather"](
                members, default_algorithm("all_gather"), nbytes, self._payload
            )
            return self._submit(
                encoded, call, buffers, DType.BYTES, terms, blocks=Blocks(encoded.plan, needed)
            )

    def all_to_all(
        self, call: Collective, buffers: tuple[int, int], nbytes: int, terms: Terms
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            self._need_all(call, members, terms)
            by = plan_cache.algorithm("all_to_all", members, terms.options.algorithm)
            units = self._units(DType.BYTES, terms)
            encoded = PLANS["all_to_all"](members, by, units.count(nbytes), units.per_packet)
            return self._submit(encoded, call, buffers, units.dtype, terms)

    def exchange(
        self,
        call: Collective,
        buffers: tuple[int, int],
        send: Sequence[int],
        receive: Sequence[int],
        terms: Terms,
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            self._need_all(call, members, terms)
            by = plan_cache.algorithm("all_to_all_uneven", members, terms.options.algorithm)
            units = self._units(DType.BYTES, terms)
            encoded = PLANS["all_to_all_uneven"](
                members, by, units.counts(send), units.counts(receive), units.per_packet
            )
            return self._submit(encoded, call, buffers, units.dtype, terms)

    def gather(
        self, call: Collective, buffers: tuple[int, int], nbytes: int, root: int, terms: Terms
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            self._need(call, members, (root,))
            self._need_all(call, members, terms)
            by = plan_cache.algorithm("gather", members, terms.options.algorithm)
            units = self._units(DType.BYTES, terms)
            count = units.count(nbytes)
            encoded = PLANS["gather"](members, by, count, units.per_packet, root=root)
            return self._submit(encoded, call, buffers, units.dtype, terms)

    def scatter(
        self, call: Collective, buffers: tuple[int, int], nbytes: int, root: int, terms: Terms
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            self._need(call, members, (root,))
            by = plan_cache.algorithm("scatter", members, terms.options.algorithm)
            units = self._units(DType.BYTES, terms)
            count = units.count(nbytes)
            encoded = PLANS["scatter"](members, by, count, units.per_packet, root=root)
            return self._submit(encoded, call, buffers, units.dtype, terms)

    def barrier(self, call: Collective, address: int, terms: Terms) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            by = plan_cache.algorithm("barrier", members, terms.options.algorithm)
            encoded = PLANS["barrier"](members, by, 1, fanout=self._fanout)
            return self._submit(encoded, call, (address, address), DType.F32, terms)

    def _units(self, dtype: DType, terms: Terms) -> Units:
        return units_of(self._payload, dtype, terms.encoding)

    def _submitting(self) -> threading.Lock:
        """To be entered. First finishes operations that nobody waits for: not inside, since their
        futures' callbacks may submit operations."""
        if len(self._operations) >= REAP_FROM:
            self._reap()
        return self._sequencer.lock

    def _need(self, call: Collective, members: Members, ranks: Sequence[int]) -> None:
        """Refuses a call that needs data of lost ranks; on all ranks alike."""
        lost = sorted(set(ranks) - set(members.ranks))
        if lost:
            raise self._missed(call, lost)

    def _need_all(self, call: Collective, members: Members, terms: Terms) -> None:
        """The same for a call whose result has a part of every rank."""
        if not members.complete and terms.among is None and terms.options.delivery == "reliable":
            raise self._missed(call, members.lost)

    def _missed(self, call: Collective, lost: Sequence[int]) -> PeerLostError:
        names = " and ".join(self.health.where.peer(rank) for rank in lost)
        return PeerLostError(
            f"{self.health.where}: {call.numbered} needs data of {names}, lost before; the group "
            f"continues without: reductions, and broadcasts from a rank that is left, still work",
            peer=lost[0],
        )

    def _submit(
        self,
        encoded: Encoded,
        call: Collective,
        buffers: tuple[int, int],
        dtype: DType,
        terms: Terms,
        *,
        means: Means | None = None,
        blocks: Blocks | Contributions | None = None,
    ) -> Operation:
        """``means``: how contributions are averaged; reductions only. If a rank dies during the
        operation, its contributions then count as lost instead of failing it."""
        assert self._engine is not None
        timeout = self.timeout if terms.timeout is None else terms.timeout
        options = terms.options
        reliable = options.delivery == "reliable"
        operation = Operation(self, call, terms, timeout)
        operation.members = self._sequencer.at(self._sequencer.next).ranks
        operation.exact = reliable and means is None
        operation.blocks = blocks
        # Until the watcher runs, nobody would collect the finished ticket.
        operation.notify = terms.future and self._watcher is not None
        estimator = "" if reliable else blocks.meaning if blocks else options.estimator
        scale = 1.0 if terms.mean else float(self.world)
        try:
            key = engine_call.CacheKey(
                encoded, call.key, estimator, options, dtype, scale, timeout, terms.encoding,
                notify=operation.notify, waits=not terms.future,
            )  # fmt: skip
            if blocks is None and (means is None or means is BY_COUNT):
                self._engine.submit_ready(engine_call.ready(key), *buffers, operation)
            else:
                once = engine_call.call_of(key)
                once = engine_call.with_data(once, buffers, means or BY_COUNT, blocks)
                self._engine.submit(encoded, once, operation)
        except LossyError as error:
            self._note_failed(call)
            raise (self.health.failure or error).again(call.numbered) from None
        finally:
            # Calls nothing, so that Ctrl-C can't come between: the engine writes to the buffers.
            if operation.ticket:
                call.last_op = self._sequencer.next
                self._sequencer.next = call.last_op + 1
                call.submitted += 1
                self._operations[operation.ticket] = operation
        if self._tracing:
            self._trace_begin(operation, call.last_op, buffers)
        return operation

    def _reap(self) -> None:
        """Finishes operations whose work was dropped without a wait, oldest first."""
        for operation in list(self._operations.values()):
            if not operation.poll():
                return

    # ---- what an operation asks for (core/call.py's Submitter) ----

    def wait_ticket(self, ticket: int, seconds: float) -> int:
        assert self._engine is not None
        return self._engine.wait(ticket, seconds)

    def take(self, operation: Operation) -> LossyError | None:
        """A finished operation's error, if it has one."""
        assert self._engine is not None
        self._ended = True
        try:
            code, kept = self._engine.outcome(operation.ticket)
            if self._tracing:
                self._trace_end(operation, *self._engine.result(operation.ticket))
            if code >= 0:
                if operation.blocks is not None:
                    operation.blocks.note(self._engine, operation.ticket)
                    return None  # they say what is missing
                return self._died_midway(operation) if operation.exact and kept else None
            failure = self._engine.result(operation.ticket)[1]
        except ClosedError as error:
            return self.health.failure or error
        self._note_failed(operation.call)
        return self._explain(operation.call, operation.timeout, failure)

    def _note_failed(self, call: Collective) -> None:
        if self._first_failed is None or call.seq < self._first_failed:
            self._first_failed = call.seq

    def release(self, operation: Operation) -> None:
        """The engine forgets a finished operation."""
        assert self._engine is not None
        del self._operations[operation.ticket]
        with contextlib.suppress(ClosedError):  # closing frees it as well
            self._engine.release(operation.ticket)

    def _trace_begin(self, operation: Operation, number: int, buffers: tuple[int, int]) -> None:
        event(
            logging.DEBUG,
            self.health.where,
            "begin",
            seq=operation.call.seq,
            op=number,
            call=operation.call,
            ranks=len(operation.members),
            in_place=buffers[0] == buffers[1],
        )

    def _trace_end(self, operation: Operation, report: Report, failure: Failure) -> None:
        assert self._engine is not None
        with contextlib.suppress(ClosedError):
            for stream in self._engine.streams(operation.ticket):
                fields = stream.in_seconds()
                event(logging.DEBUG, self.health.where, "stream", op=report.op, **fields)
        event(
            logging.DEBUG,
            self.health.where,
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

    def _died_midway(self, operation: Operation) -> PeerLostError:
        """A rank died during an exact operation; only this operation fails."""
        lost = sorted(self.health.without.keys() & set(operation.members))
        names = " and ".join(self.health.where.peer(rank) for rank in lost)
        return PeerLostError(
            f"{self.where(operation)}: {names} died before all of its data came; other ranks may "
            f"have it all. The group continues without; the contents of the result are undefined",
            peer=lost[0] if lost else None,
        )

    def _explain(self, call: Collective, timeout: float, failure: Failure) -> LossyError:
        """The typed error of a failed operation of ``call``; it becomes the group's and goes to all
        ranks. A failure ends all operations, so it may be another one's."""
        error = self.health.failure
        if error is None and failure.code in (Code.MISMATCH, Code.TIMEOUT, Code.LINK):
            call = self.health.call_of(failure.op) or call
        if error is None and failure.code == Code.MISMATCH:
            self.health.waiting(call)
            error = self.health.await_failure(VERDICT_SECONDS)
        if error is None:
            error = error_of(failure, self._where(call, timeout))
            self.health.fail(error, tell=True)
        return error

    def group_failure(self, call: Collective) -> LossyError | None:
        """The group's failure, met by ``call``. Only the engine may know of it until now: nobody
        need have waited for the operation that failed, and its own call may have ended well."""
        if self.health.failure is None and self._engine is not None:
            with contextlib.suppress(ClosedError):
                failure = self._engine.failure()
                if failure.code < 0:
                    return self._explain(call, self.timeout, failure)
        return self.health.failure

    def note_waiting(self, call: Collective) -> None:
        self.health.waiting(call)

    def where(self, operation: Operation | None = None) -> Where:
        """What errors say about this rank, or about one of its operations."""
        if operation is None:
            return self.health.where
        return self._where(operation.call, operation.timeout)

    def _where(self, call: Collective, timeout: float) -> Where:
        addresses = self.health.where.addresses
        return Where(self.rank, self.world, str(call), call.seq, addresses, timeout)

    # ---- the watcher: completes operations that only a future waits for ----

    def watch(self, call: Collective, nudge: Callable[[float], None]) -> None:
        """Calls ``nudge(time.monotonic())`` now and then until ``unwatch(call)``."""
        self._watched[call.seq] = nudge
        self._start_watcher()

    def unwatch(self, call: Collective) -> None:
        self._watched.pop(call.seq, None)

    def complete_by_itself(self, operation: Operation) -> None:
        """Has the watcher complete ``operation``, whether anybody waits or not."""
        if not operation.notify:
            self._unnotified.append(operation)
        self._start_watcher()

    def _start_watcher(self) -> None:
        with self._lock:
            if self._watcher is None and self._engine is not None and not self.health.closed:
                self._watcher = threading.Thread(
                    target=self._watch, name="lossycoll-complete", daemon=True
                )
                self._watcher.start()

    def _watch(self) -> None:
        try:
            self._complete_all()
        except Exception as error:  # else whoever waits for a future would wait for ever
            text = f"{self.health.where}: the thread that completes futures failed: {error!r}"
            self.health.fail(EngineError(text), tell=True)
            raise

    def _complete_all(self) -> None:
        assert self._engine is not None
        slow: list[Operation] = []
        while True:
            # The engine hands to next() only what was submitted with notify.
            while self._unnotified:
                slow.append(self._unnotified.popleft())
            slow = [operation for operation in slow if not operation.poll(0.001)]
            ticket = self._engine.next(0.001 if slow else 0.1)
            if ticket < 0:
                return
            if ticket == 0:
                self._nudge_all(time.monotonic())
            else:
                self._operation(ticket).handed_over()

    def _operation(self, ticket: int) -> Operation:
        """By its ticket; it may be done before the thread that submits it has noted it."""
        while (found := self._operations.get(ticket)) is None:
            time.sleep(0.0001)
        return found

    def _nudge_all(self, now: float) -> None:
        for operation in list(self._operations.values()):
            operation.nudge(now)
        for nudge in list(self._watched.values()):
            nudge(now)

    # ---- figures ----

    def stats(self) -> Stats:
        around: dict[str, Any] = {
            "rank": self.rank,
            "world": self.world,
            "calls": self.health.seq + 1,
        }
        if self._engine is None or self._control is None:
            return Stats(**around)
        sums = self._engine.stats()
        return Stats(
            **{name: getattr(sums, name) for name in sums.__dataclass_fields__},
            **around,
            control_foreign=self._control.foreign,
            lost=self._sequencer.latest.lost,
            peers=tuple(self._peer_stats(rank) for rank in range(self.world)),
        )

    def _peer_stats(self, rank: int) -> PeerStats:
        assert self._engine is not None
        return self._engine.peer_stats(rank)

    def last_report(self) -> Report | None:
        """Of the last operation that the engine ended here; None before the first."""
        if self._engine is None or not self._ended:
            return None
        return self._with_lost(self._engine.last_report())

    def _with_lost(self, report: Report) -> Report:
        members = self._sequencer.at(report.op)
        return report if members.complete else replace(report, lost=members.lost)

    def group_stats(self) -> Mapping[int, Mapping[str, Any]]:
        """The counters of every rank, by rank, asked now; of one that is silent, its last."""
        others = self._control.group_figures() if self._control is not None else {}
        return dict(sorted({**others, self.rank: self.figures()}.items()))

    def figures(self) -> dict[str, Any]:
        """This rank's counters for the other ranks; also called by the control plane's thread."""
        out: dict[str, Any] = {"calls": self.health.seq + 1}
        if self._engine is not None:
            try:
                sums = self._engine.stats()
                self._link_log.tell(self._engine.event, self.health.where)
            except ClosedError:
                return out
            self._warn_of_overflow(sums.socket_overflow)
            out |= {name: getattr(sums, name) for name in FIGURES}
        return out

    def look(self) -> None:
        """Now and then, from the control plane's thread: warns of what the figures show, and tells
        the other ranks of a message that ended the group, which nobody here may wait for."""
        self.figures()
        if self.health.failure is None and self._engine is not None:
            with contextlib.suppress(ClosedError):
                failure = self._engine.failure()
                if failure.code in MESSAGES:
                    self.health.fail(error_of(failure, self.health.where), tell=True)

    def _warn_of_overflow(self, packets: int) -> None:
        """Once per group: loss that nobody asked for, and that a larger buffer would prevent."""
        if packets > 0 and not self._overflow_warned:
            self._overflow_warned = True
            log.warning(
                "%s: the kernel dropped %d packets so far since this rank's receive buffer was "
                "full; raise it (sysctl net.core.rmem_max, and LOSSYCOLL_SOCKET_BUFFER if that is "
                "set) or lower LOSSYCOLL_MTU",
                self.health.where,
                packets,
            )

    # ---- view changes (on_peer_loss="continue"); from the control plane's thread ----

    def lose(self, rank: int) -> int:
        """Stops submitting until :meth:`go_on`, and gives ``rank`` up.

        Returns the number of the next operation.
        """
        assert self._engine is not None
        # First: who waited for the rank could otherwise submit another operation of the old view.
        following = self._sequencer.stop()
        with contextlib.suppress(ClosedError):
            self._engine.peer_dead(rank)
        return following

    def left(self, rank: int) -> None:
        """``rank`` has left in order: nothing else comes from it.

        Nor does it need what was done here before its last call. If it never took part in something
        that is still sent, the group fails by that.
        """
        if self._engine is not None:
            with contextlib.suppress(ClosedError):
                if self._engine.lingering()[0]:
                    self.health.waiting_for_last()
                self._engine.peer_left(rank)

    def go_on(self, views: Sequence[View], agreed: bool) -> None:
        """Takes over the ``views``; submits again if the last one is ``agreed``."""
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
        """Lost ranks, as of the last operation submitted here. Nothing later changes them, so they
        are the same on all ranks that have submitted as many."""
        return self._sequencer.at(self._sequencer.next - 1).lost

    def _check_sound(self) -> None:
        """Raises if the group has failed or was destroyed."""
        if self.health.failure is not None:
            raise self.health.failure.again()
        if self.health.closed:
            raise ClosedError(f"{self.health.where}: the group was destroyed")

    # ---- the end ----

    def end_pending(self, error: LossyError) -> None:
        """Ends all operations because of the group's failure ``error``."""
        if self._engine is not None:
            try:
                self._engine.abort(Code.ABORTED, -1 if error.peer is None else error.peer)
            except ClosedError:
                return

    def _await_delivery(self) -> None:
        """Waits until the other ranks have what they need of calls that were done here before.

        The calls' own timeouts bound that; after an error of this rank's own, a second does. Once:
        who interrupts it doesn't have to do so again at exit.
        """
        if self._engine is None or self._awaited_delivery:
            return
        self._awaited_delivery = True
        begin = nudged = time.monotonic()
        pause, lingered, sound = 0.0002, False, self.health.failure is None
        while self._engine.lingering()[0] and self.health.failure is None:
            lingered = True
            now = time.monotonic()
            if now - begin > LINGER_SECONDS and _own_error():
                break
            if now - nudged >= NUDGE_SECONDS[0]:
                nudged = now
                self.health.waiting_for_last()
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        failure = self.group_failure(Collective("call")) if sound else None
        if failure is not None or (lingered and self._engine.lingering()[0]):
            log.warning(
                "%s: leaves, and other ranks may lack data of calls that were done here: %s",
                self.health.where,
                failure or "they have not taken part in them",
            )

    def _last_finished(self) -> int:
        """Number of the last call in which no other rank needs this one any more.

        Pending operations get a little time to end: nobody here waits for them, but others may.
        """
        end = time.monotonic() + LINGER_SECONDS
        for operation in list(self._operations.values()):
            while not operation.poll(end - time.monotonic()):
                if self.health.failure is not None or time.monotonic() >= end:
                    return operation.call.seq - 1
        last, failed = self.health.seq, self._first_failed
        if failed is not None:
            last = min(failed - 1, last)
        return min(self._lingers_from() - 1, last)

    def _lingers_from(self) -> int:
        """Number of the first call that is done here and not everywhere; else the next call's."""
        lingering, oldest = self._engine.lingering() if self._engine is not None else (0, 0)
        call = self.health.call_of(oldest) if lingering else None
        return self.health.seq + 1 if call is None else call.seq

    def close(self) -> None:
        """Announces to the other ranks that this one leaves, ends what is pending, joins threads.

        Idempotent; if Ctrl-C interrupts it, the next call does the rest.
        """
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
        with self._lock:
            self.health.closed = True
        if self._control is not None and not self._announced_leave:
            last = self._last_finished()
            self._announced_leave = True
            self._control.leave(last, _own_error())
            self.health.await_others(LINGER_SECONDS)
        self.figures()
        if self._engine is not None and self._watcher is not None:
            self._engine.stop_next()
            if threading.current_thread() is not self._watcher:
                self._watcher.join()
        if self._control is not None:
            self._control.close()
        if self.options.inject:
            # Otherwise a run in which nothing was dropped would look like one that loss can't harm.
            found = self.stats()
            counts = {name: getattr(found, name) for name in ("packets_sent", "packets_injected")}
            event(logging.INFO, self.health.where, "left", **counts)
        if self._engine is not None:
            self._engine.close()
        for operation in list(self._operations.values()):
            operation.complete()
        self.health.detach()
