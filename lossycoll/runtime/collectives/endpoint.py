"""One rank's endpoint of a group, without torch: its collectives, lost ranks, its end.

Each collective is planned, and submitted as an operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from math import perm
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.errors import ClosedError, LossyError, PeerLostError
from lossycoll.options.fields import Options
from lossycoll.plan import Finish, Missing, owner_count, packet_count
from lossycoll.plan.copies import BARRIER_FANOUT
from lossycoll.plan.reduce_scatter import IN_PLACE
from lossycoll.plan.registry import AUTO, HIERARCHICAL
from lossycoll.plan.validation import check_counts
from lossycoll.runtime.core.call import CallOptions, Collective, Operation
from lossycoll.runtime.core.logfmt import log
from lossycoll.runtime.engine.binding import DType, EngineCall
from lossycoll.runtime.engine.failures import MESSAGES, error_of
from lossycoll.runtime.engine.gates import Wakers
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions
from lossycoll.runtime.world.messages import View

from . import plan_cache
from .estimators import BY_COUNT, Estimators, Means
from .group_context import GroupContext, Members
from .group_stats import GroupStats
from .leaving import Leaving
from .operations import Operations
from .plan_cache import Choice, ElementLayout, layout_of, sum_layout_of
from .watcher import Watcher

SINGLE_PAYLOAD: Final = 1408
"""Bytes that a packet would carry in a world of one, for those who count blocks."""
UNEVEN: Final = "all_to_all_uneven"
MOST_ORDERS: Final = 24
"""Of the ranks of a call: of so many, each comes again soon enough for its plan to be kept."""
STEADY: Final = 256
"""Plans that a group finds again without a look at what they are made by."""


class Endpoint:
    """Endpoint of one rank in a group: its collectives, lost ranks, and the end.

    Each method of a collective returns the submitted operation. It raises the group's failure, or
    ClosedError after the group's end; PeerLostError if it needs the data of a lost rank. Errors of
    a plan's builder about unsupported sizes pass through.

    ``call`` is the issued call, with the options ``call_options``. ``buffers`` are the addresses of
    input and output; ``address`` is the address of a buffer that is both. The caller keeps them
    alive until the operation is done (``CallOptions.keep``). ``elements`` (of a ``dtype``) and
    ``nbytes`` are per rank: the same for all, or one number per rank. ``root`` is the rank that
    sends or collects the data. Buffers with a part per rank are in the order of ranks. ``encoding``
    is a name from plan.codec. Other arguments are a ``rank``, the ``views`` of members (``agreed``:
    the last view is agreed), and the ``error`` with which this rank fails the group.

    Args:
        context: The rank's context of the group.
        timeout: Seconds for ranks that never take part.

    Attributes:
        health: Health of the group, as in ``context``.
        options: Options of the group, as in ``context``.
        topology: Hosts and sites of the group's ranks, as in ``context``.
        operations: Operations that were submitted.
        watcher: Watcher that completes operations for which only a future waits.
        stats: Counters of the group.
        group: The group's number, the same on all ranks.
        block_bytes: Bytes of one packet's data, without an encoding.
    """

    def __init__(self, context: GroupContext, *, timeout: float) -> None:
        where, options, engine = context.health.where, context.options, context.engine
        self.health = context.health
        self.options = options
        self.rank = where.rank
        self.world = where.world
        self.operations: Final = Operations(context, timeout)
        self.stats: Final = GroupStats(context, self.operations)
        self.watcher: Final = Watcher(context, self.operations)
        self._leaving = Leaving(context, self.operations, self.watcher, self.stats)
        self.group: Final = context.number
        self.topology = context.topology
        # Whatever the options say: the ranks of a host have got the same blocks, and so need the
        # same, as long as all calls go by tiers.
        self._block_algorithm = AUTO if self.topology.is_flat else HIERARCHICAL
        self._engine = engine
        self.block_bytes: Final = SINGLE_PAYLOAD if engine is None else engine.link().payload_bytes
        self._estimators = Estimators(where.world, self.stats.peer)
        self._sequencer = self.operations.sequencer
        self._submitting = self.operations.submitting
        self._submit = self.operations.submit
        # Where a rank may be lost, none but the root may forward the data of others.
        self._fanout = where.world if options.continues else 2
        # What barriers add up, all of them; nobody looks at the sum.
        self._one, self._sum = np.ones(1, np.float32), np.zeros(1, np.float32)
        self._barrier_buffers = self._one.ctypes.data, self._sum.ctypes.data
        self._steady: dict[tuple[object, ...], tuple[EngineCall, Members, Options]] = {}

    # ---- reductions ----

    def all_reduce(
        self, call: Collective, address: int, elements: int, dtype: DType, call_options: CallOptions
    ) -> Operation:
        """Sum (or average) all ranks' ``elements`` at ``address``, in place."""
        options = call_options.options
        layout = layout_of(self.block_bytes, dtype, call_options.encoding)
        with self._submitting():
            members = self._sequencer.members()
            choice = self._algorithm("all_reduce", members, options)
            number = self._sequencer.next
            packets = packet_count(elements, layout.per_packet)
            order = self._order(choice, members, options, number, packets)
            means = self._estimators.means(options, members)
            how: dict[str, Any] = {
                "order": order,
                "missing": Missing[options.on_missing.upper()],
                "finish": means.finish or Finish.MEAN,
            }
            planned = self._sum_plan(members, choice, elements, layout, call_options, **how)
            steady = order is None and not self._estimators.weigh(options)
            return self._submit(
                planned, call, (address, address), dtype, call_options, means=means, steady=steady
            )

    def _order(
        self, choice: Choice, members: Members, options: Options, number: int, packets: int
    ) -> tuple[int, ...] | None:
        return plan_cache.order(choice, members, options, self.group, number, packets)

    def reduce_scatter(
        self,
        call: Collective,
        buffers: tuple[int, int],
        elements: int | tuple[int, ...],
        dtype: DType,
        call_options: CallOptions,
    ) -> Operation:
        """Sum (or average) chunk number ``rank`` of all ranks."""
        options = call_options.options
        layout = layout_of(self.block_bytes, dtype, call_options.encoding)
        with self._submitting():
            members = self._sequencer.members()
            means = self._estimators.means(options, members)
            choice = self._algorithm("reduce_scatter", members, options)
            finish = means.finish or plan_cache.finish_of_owned(choice, options)
            planned = self._sum_plan(members, choice, elements, layout, call_options, finish=finish)
            steady = not self._estimators.weigh(options)
            return self._submit(
                planned, call, buffers, dtype, call_options, means=means, steady=steady
            )

    def reduce_scatter_blocks(
        self,
        call: Collective,
        buffers: tuple[int, int],
        elements: int,
        dtype: DType,
        call_options: CallOptions,
    ) -> Operation:
        """Run a reduce-scatter whose ``blocks`` are the packets of this rank's contributions that
        were lost. They count as zero; the caller sends them again."""
        with self._submitting():
            members = self._sequencer.members()
            means, result = BY_COUNT, None
            by, hosts = choice = self._algorithm("reduce_scatter", members)
            finish = plan_cache.finish_of_owned(choice, call_options.options)
            lossy = call_options.options.delivery == "lossy"
            if lossy:
                finish, means = Finish.WEIGHTED, Means(divisor=float(len(members.ranks)))
            encoded_blocks = call_options.encoding != "same"
            if hosts is not None and not hosts.one_host and (lossy or encoded_blocks):
                # Who loses of a host's sum is to send it again: so it must be left with it.
                by, chunk = IN_PLACE, elements * dtype.itemsize
                result = (buffers[0] + self.rank * chunk, buffers[1], chunk)
                buffers = (buffers[0], buffers[0])
            if hosts is not None and encoded_blocks:
                # A site's sum is rounded anew, and no rank could say what of it is its own.
                hosts = hosts.without_sites()
            choice, layout = (by, hosts), layout_of(self.block_bytes, dtype, call_options.encoding)
            planned = self._sum_plan(members, choice, elements, layout, call_options, finish=finish)
            blocks = Contributions(planned.plan, dtype.itemsize, result)
            return self._submit(
                planned, call, buffers, dtype, call_options, means=means, blocks=blocks
            )

    # ---- copies ----

    def copy(
        self,
        collective: str,
        call: Collective,
        buffers: tuple[int, int],
        call_options: CallOptions,
        *nbytes: int | tuple[int, ...],
        **root: int,
    ) -> Operation:
        """Move bytes by a collective that adds nothing up.

        Args:
            collective: Its name, one of ``lossycoll.plan.registry.COLLECTIVES``.
            nbytes: The sizes that its builder takes, in bytes.
            root: The same, by its name, where the builder takes one.
        """
        asked = call_options.options
        with self._submitting():
            members = self._sequencer.members()
            if not members.complete:
                self._need(collective, call, members, call_options, root.get("root"))
            layout = layout_of(self.block_bytes, DType.BYTES, call_options.encoding)
            wire, by = call_options.encoding, root.values()
            key = (id(members), id(asked), collective, nbytes, wire, *by)
            comes_again = collective != UNEVEN
            if (kept := self._steady.get(key)) is not None:
                planned = kept[0]
            else:
                choice = self._algorithm(collective, members, call_options.options)
                sizes = map(layout.elements, nbytes)
                options = root | ({"fanout": self._fanout} if collective == "broadcast" else {})
                planned = self._plan(members, choice, *sizes, layout.per_packet, **options)
                if comes_again:
                    if len(self._steady) >= STEADY:
                        self._steady.clear()
                    # The ids in the key are theirs as long as they are kept here.
                    self._steady[key] = planned, members, asked
            return self._submit(
                planned, call, buffers, layout.dtype, call_options, steady=comes_again
            )

    def all_gather_blocks(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int | tuple[int, ...],
        needed: NDArray[np.bool_] | None,
        call_options: CallOptions,
    ) -> Operation:
        """Run an all-gather of chunks, whose ``blocks`` are what arrived.

        Args:
            nbytes: Bytes of each chunk; one number: of every chunk.
            needed: bool (world, blocks), by owner: blocks that are requested until they arrive.
                None: none is.
        """
        with self._submitting():
            members = self._sequencer.members()
            by, topology = choice = self._algorithm("all_gather", members)
            layout = layout_of(self.block_bytes, DType.BYTES, call_options.encoding)
            counts, size = layout.elements(nbytes), layout.per_packet
            per_packet = size
            if call_options.encoding != "same":
                per_packet = size = self.block_elements(call_options.encoding)
            elif topology is None:
                options = call_options.options
                per_packet = plan_cache.finer(by, counts, self.world, size, options)
            planned = self._plan(members, choice, counts, per_packet)
            chunks = check_counts("counts", counts, self.world)
            blocks = Blocks(planned.plan, chunks, size, needed)
            return self._submit(planned, call, buffers, layout.dtype, call_options, blocks=blocks)

    def barrier(self, call: Collective, call_options: CallOptions) -> Operation:
        """Run a barrier, which ends on no rank before all have begun it."""
        with self._submitting():
            members = self._sequencer.members()
            choice = self._algorithm("barrier", members, call_options.options)
            fanout = max(self._fanout, BARRIER_FANOUT)
            planned = self._plan(members, choice, 1, fanout=fanout)
            return self._submit(planned, call, self._barrier_buffers, DType.F32, call_options)

    # ---- plans ----

    def _algorithm(
        self, collective: str, members: Members, options: Options | None = None
    ) -> Choice:
        """``options``: of a call, except one of blocks."""
        name = self._block_algorithm
        if options is not None:
            name = plan_cache.name_of(options, self.topology)
        return plan_cache.algorithm(collective, members, name, self.topology)

    def _plan(self, members: Members, choice: Choice, *sizes: Any, **options: Any) -> EngineCall:
        by, topology = choice
        if topology is not None:
            options["topology"] = topology
        # Of many orders one rarely comes again, and uneven sizes don't either.
        orders = perm(len(members.ranks), len(options.get("order") or ()))
        is_fresh = orders > MOST_ORDERS or by.collective == UNEVEN
        return (plan_cache.made if is_fresh else plan_cache.kept)(members, by, *sizes, **options)

    def _sum_plan(
        self,
        members: Members,
        choice: Choice,
        elements: int | tuple[int, ...],
        layout: ElementLayout,
        call_options: CallOptions,
        **how: Any,
    ) -> EngineCall:
        """The plan of a reduction. ``how``: what its builder takes besides."""
        per_packet, (by, topology) = layout.per_packet, choice
        if topology is not None:
            per_packet, topology = sum_layout_of(
                layout, self.block_bytes, call_options.encoding, topology
            )
        elif call_options.encoding == "same":
            owners = len(how.get("order") or members.ranks)
            per_packet = plan_cache.finer(by, elements, owners, per_packet, call_options.options)
        return self._plan(members, (by, topology), elements, per_packet, **how)

    def _need(
        self,
        collective: str,
        call: Collective,
        members: Members,
        call_options: CallOptions,
        root: int | None,
    ) -> None:
        """Refuses a call that needs data of lost ranks: its root's, or of every rank; on all ranks
        alike."""
        of_all = collective not in ("broadcast", "scatter") and call_options.among is None
        exact = of_all and call_options.options.delivery == "reliable"
        missed = (root,) if root in members.lost else members.lost if exact else ()
        if missed:
            names = " and ".join(self.health.where.peer(rank) for rank in missed)
            raise PeerLostError(
                f"{self.health.where}: {call.numbered} needs data of {names}, lost before; the "
                f"group continues without: reductions, and broadcasts from a rank that is left, "
                f"still work",
                peer=missed[0],
            )

    # ---- what others ask of it ----

    @property
    def wakers(self) -> Wakers:
        """Wakers for the gates of the endpoint's operations."""
        assert self._engine is not None
        return self._engine.wakers

    def block_elements(self, encoding: str) -> int:
        """Return the number of float32 elements that one block (packet) carries, so encoded."""
        encoding = "same" if self.topology.one_host else encoding
        layout = layout_of(self.block_bytes, DType.F32, encoding)
        return sum_layout_of(layout, self.block_bytes, encoding, self.topology)[0]

    def owner_count(self, nbytes: int, options: Options) -> int:
        """Return how many ranks should own a buffer that always has the same owners.

        Fewer than all where streams to all would be short, and nothing is resent.

        Args:
            nbytes: Bytes of the buffer.
            options: Options of the calls that carry it.
        """
        if not (options.by_parity_alone and self.topology.is_flat):
            return self.world
        packets = packet_count(nbytes, self.block_bytes)
        return owner_count(self.world, packets, options.stream_packets)

    def blocks(self, nbytes: int, encoding: str = "same") -> int:
        """Return the number of blocks for ``nbytes`` bytes, of float32 if they are encoded."""
        if encoding == "same":
            return packet_count(nbytes, self.block_bytes)
        return packet_count(nbytes // DType.F32.itemsize, self.block_elements(encoding))

    # ---- what the control plane says of other ranks, in its thread ----

    def lose(self, rank: int) -> int:
        """Stop submitting until :meth:`go_on`, and give up a rank."""
        assert self._engine is not None
        # First: who waited for the rank could otherwise submit another operation of the old view.
        following = self._sequencer.stop()
        with contextlib.suppress(ClosedError):
            self._engine.peer_dead(rank)
        return following

    def left(self, rank: int) -> None:
        """Note that a rank has left in order: it sends nothing else.

        That rank doesn't need operations that were done here before its last call. If it never took
        part in an operation that is still being sent, the group fails by that.
        """
        if self._engine is not None:
            with contextlib.suppress(ClosedError):
                if self._engine.lingering()[0] and (call := self.health.last_call()) is not None:
                    self.health.waiting(call)
                self._engine.peer_left(rank)

    def go_on(self, views: Sequence[View], agreed: bool) -> None:
        """Adopt views, and submit again if the last one is agreed."""
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
        """Return the lost ranks, as of the last operation submitted here."""
        return self._sequencer.at(self._sequencer.next - 1).lost

    def look(self) -> None:
        """Warn of faults that the figures show, and tell other ranks of a message that ended the
        group, for which no call here may wait. The control plane's thread calls this."""
        self.stats.own()
        if self.health.failure is None and self._engine is not None:
            with contextlib.suppress(ClosedError):
                failure = self._engine.failure()
                if failure.code in MESSAGES:
                    self.health.fail(error_of(failure, self.health.where), tell=True)

    # ---- the end ----

    def fail(self, call: Collective, error: LossyError) -> None:
        """Make an error of this rank the failure of all ranks. Other ranks first get the data of
        calls that were done here, within a second."""
        try:
            self._leaving.finish_delivery(call)
        finally:  # also if Ctrl-C ends the wait
            self.health.fail(error, tell=True)

    def close(self) -> None:
        """Leave the group, like :meth:`Leaving.close`."""
        self._leaving.close()
