"""One rank's endpoint of a group, without torch: plans what each rank does in a collective."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.errors import ClosedError, LossyError, PeerLostError
from lossycoll.options.fields import Options
from lossycoll.plan import Finish, Missing, packet_count
from lossycoll.plan.reduce_scatter import IN_PLACE
from lossycoll.plan.registry import AUTO, HIERARCHICAL
from lossycoll.plan.tree import BARRIER_FANOUT
from lossycoll.runtime.core.call import CallOptions, Collective, Operation
from lossycoll.runtime.core.logfmt import log
from lossycoll.runtime.engine.binding import DType, Encoded
from lossycoll.runtime.engine.failures import MESSAGES, error_of
from lossycoll.runtime.engine.gates import Wakers
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions
from lossycoll.runtime.world.view_agreement import View

from . import plan_cache, single_rank
from .collective_endpoint import CollectiveEndpoint
from .element_layout import ElementLayout, layout_of, sum_layout_of
from .estimators import BY_COUNT, Estimators, Means
from .group_context import GroupContext
from .group_stats import GroupStats
from .leaving import Leaving
from .operations import Operations
from .plan_cache import PLANS, Choice
from .sequencer import Members
from .watcher import Watcher


class Endpoint(CollectiveEndpoint):
    """The engine's. What the control plane says of other ranks comes here, too.

    Args:
        context: The rank's context of the group.
        timeout: Seconds for ranks that never take part.

    Attributes:
        health: The group's, as in ``context``.
        options: The group's, as in ``context``.
        operations: What was submitted.
        watcher: Completes what only a future waits for.
        stats: What was counted.
    """

    def __init__(self, context: GroupContext, *, timeout: float) -> None:
        where, options, engine = context.health.where, context.options, context.engine
        self.health = context.health
        self.options = options
        self.rank = where.rank
        self.world = where.world
        self.operations: Final = Operations(context, timeout)
        self.watcher: Final = Watcher(context, self.operations)
        self.stats: Final = GroupStats(context, self.operations)
        self._leaving = Leaving(context, self.operations, self.watcher, self.stats)
        self._group = context.number
        self._topology = context.topology
        # Whatever the options say: the ranks of a host have got the same blocks, and so need the
        # same, as long as all calls go by tiers.
        self._block_algorithm = AUTO if self._topology.is_flat else HIERARCHICAL
        self._engine = engine
        self._payload = engine.link().payload_bytes if engine is not None else single_rank.PAYLOAD
        self._estimators = Estimators(where.world, self.stats.peer)
        self._sequencer = self.operations.sequencer
        self._submitting = self.operations.submitting
        self._submit = self.operations.submit
        # Where a rank may be lost, none but the root may forward the data of others.
        self._fanout = where.world if options.continues else 2
        # What barriers add up, all of them; nobody looks at the sum.
        self._one, self._sum = np.ones(1, np.float32), np.zeros(1, np.float32)
        self._barrier_buffers = self._one.ctypes.data, self._sum.ctypes.data

    @property
    def one_host(self) -> bool:
        """Whether nothing that the ranks send leaves a host."""
        return self._topology.one_host

    @property
    def host_each(self) -> bool:
        """Whether each rank counts as a host of its own."""
        return len(set(self._topology.hosts)) == self.world

    @property
    def group(self) -> int:
        """The group's number, the same on all ranks."""
        return self._group

    @property
    def wakers(self) -> Wakers:
        """What gates of its operations are made with."""
        assert self._engine is not None
        return self._engine.wakers

    @property
    def timeout(self) -> float:
        """Seconds for ranks that never take part."""
        return self.operations.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.operations.timeout = seconds

    # ---- operations (CollectiveEndpoint) ----

    def all_reduce(
        self, call: Collective, address: int, elements: int, dtype: DType, call_options: CallOptions
    ) -> Operation:
        options = call_options.options
        missing = Missing[options.on_missing.upper()]
        with self._submitting():
            members = self._sequencer.members()
            choice = self._algorithm("all_reduce", members, call_options)
            number = self._sequencer.next
            packets = packet_count(elements, self._layout(dtype, call_options).per_packet)
            order = self._order(choice, members, options, number, packets)
            means = self._estimators.means(options, members)
            how: dict[str, Any] = {
                "order": order,
                "missing": missing,
                "finish": means.finish or Finish.MEAN,
            }
            encoded = self._sum_plan(members, choice, elements, dtype, call_options, **how)
            return self._submit(encoded, call, (address, address), dtype, call_options, means=means)

    def _order(
        self, choice: Choice, members: Members, options: Options, number: int, packets: int
    ) -> tuple[int, ...] | None:
        return plan_cache.order(choice, members, options, self._group, number, packets)

    def reduce_scatter(
        self,
        call: Collective,
        buffers: tuple[int, int],
        elements: int | tuple[int, ...],
        dtype: DType,
        call_options: CallOptions,
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            means = self._estimators.means(call_options.options, members)
            choice = self._algorithm("reduce_scatter", members, call_options)
            finish = means.finish or _finish_of_owned(choice, call_options)
            encoded = self._sum_plan(members, choice, elements, dtype, call_options, finish=finish)
            return self._submit(encoded, call, buffers, dtype, call_options, means=means)

    def reduce_scatter_blocks(
        self,
        call: Collective,
        buffers: tuple[int, int],
        elements: int,
        dtype: DType,
        call_options: CallOptions,
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            means, result = BY_COUNT, None
            choice = self._block_choice("reduce_scatter", members)
            finish = _finish_of_owned(choice, call_options)
            lossy = call_options.options.delivery == "lossy"
            if lossy:
                finish, means = Finish.WEIGHTED, Means(divisor=float(len(members.ranks)))
            hosts, encoded_blocks = choice.topology, call_options.encoding != "same"
            if hosts is not None and not hosts.one_host and (lossy or encoded_blocks):
                # Who loses of a host's sum is to send it again: so it must be left with it.
                choice, chunk = choice._replace(by=IN_PLACE), elements * dtype.itemsize
                result = (buffers[0] + self.rank * chunk, buffers[1], chunk)
                buffers = (buffers[0], buffers[0])
            if hosts is not None and encoded_blocks:
                # A site's sum is rounded anew, and no rank could say what of it is its own.
                choice = choice._replace(topology=hosts.without_sites())
            encoded = self._sum_plan(members, choice, elements, dtype, call_options, finish=finish)
            blocks = Contributions(encoded.plan, result)
            return self._submit(
                encoded, call, buffers, dtype, call_options, means=means, blocks=blocks
            )

    def broadcast(
        self, call: Collective, address: int, nbytes: int, root: int, call_options: CallOptions
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            self._need(call, members, (root,))
            choice = self._algorithm("broadcast", members, call_options)
            layout = self._layout(DType.BYTES, call_options)
            count = layout.count(nbytes)
            encoded = self._plan(
                members, choice, count, layout.per_packet, root=root, fanout=self._fanout
            )
            return self._submit(encoded, call, (address, address), layout.dtype, call_options)

    def all_gather(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int | tuple[int, ...],
        call_options: CallOptions,
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            self._need_all(call, members, call_options)
            choice = self._algorithm("all_gather", members, call_options)
            layout = self._layout(DType.BYTES, call_options)
            count = layout.count(nbytes) if isinstance(nbytes, int) else layout.counts(nbytes)
            encoded = self._plan(members, choice, count, layout.per_packet)
            return self._submit(encoded, call, buffers, layout.dtype, call_options)

    @property
    def block_bytes(self) -> int:
        """What one packet carries, as it is."""
        return self._payload

    def block_elements(self, encoding: str) -> int:
        """The float32 elements that one packet carries.

        Args:
            encoding: How, a name of plan.codec's.

        Returns:
            Their number.
        """
        encoding = "same" if self._topology.one_host else encoding
        layout = layout_of(self._payload, DType.F32, encoding)
        return sum_layout_of(layout, self._payload, encoding, self._topology).per_packet

    def blocks(self, nbytes: int, encoding: str = "same") -> int:
        """Counts packets.

        Args:
            nbytes: What they carry, in bytes.
            encoding: How, a name of plan.codec's; of float32, if they are encoded.

        Returns:
            Their number.
        """
        if encoding == "same":
            return packet_count(nbytes, self._payload)
        return packet_count(nbytes // DType.F32.itemsize, self.block_elements(encoding))

    def all_gather_blocks(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int,
        needed: NDArray[np.bool_] | None,
        call_options: CallOptions,
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            choice = self._block_choice("all_gather", members)
            layout, same = self._layout(DType.BYTES, call_options), call_options.encoding == "same"
            per_packet = layout.per_packet if same else self.block_elements(call_options.encoding)
            encoded = self._plan(members, choice, layout.count(nbytes), per_packet)
            return self._submit(
                encoded,
                call,
                buffers,
                layout.dtype,
                call_options,
                blocks=Blocks(encoded.plan, needed),
            )

    def all_to_all(
        self, call: Collective, buffers: tuple[int, int], nbytes: int, call_options: CallOptions
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            self._need_all(call, members, call_options)
            choice = self._algorithm("all_to_all", members, call_options)
            layout = self._layout(DType.BYTES, call_options)
            encoded = self._plan(members, choice, layout.count(nbytes), layout.per_packet)
            return self._submit(encoded, call, buffers, layout.dtype, call_options)

    def exchange(
        self,
        call: Collective,
        buffers: tuple[int, int],
        send: Sequence[int],
        receive: Sequence[int],
        call_options: CallOptions,
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            self._need_all(call, members, call_options)
            choice = self._algorithm("all_to_all_uneven", members, call_options)
            layout = self._layout(DType.BYTES, call_options)
            encoded = self._plan(
                members, choice, layout.counts(send), layout.counts(receive), layout.per_packet
            )
            return self._submit(encoded, call, buffers, layout.dtype, call_options)

    def gather(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int,
        root: int,
        call_options: CallOptions,
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            self._need(call, members, (root,))
            self._need_all(call, members, call_options)
            choice = self._algorithm("gather", members, call_options)
            layout = self._layout(DType.BYTES, call_options)
            count = layout.count(nbytes)
            encoded = self._plan(members, choice, count, layout.per_packet, root=root)
            return self._submit(encoded, call, buffers, layout.dtype, call_options)

    def scatter(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int,
        root: int,
        call_options: CallOptions,
    ) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            self._need(call, members, (root,))
            choice = self._algorithm("scatter", members, call_options)
            layout = self._layout(DType.BYTES, call_options)
            count = layout.count(nbytes)
            encoded = self._plan(members, choice, count, layout.per_packet, root=root)
            return self._submit(encoded, call, buffers, layout.dtype, call_options)

    def barrier(self, call: Collective, call_options: CallOptions) -> Operation:
        with self._submitting():
            members = self._sequencer.members()
            choice = self._algorithm("barrier", members, call_options)
            fanout = max(self._fanout, BARRIER_FANOUT)
            encoded = self._plan(members, choice, 1, fanout=fanout)
            return self._submit(encoded, call, self._barrier_buffers, DType.F32, call_options)

    def _algorithm(self, collective: str, members: Members, call_options: CallOptions) -> Choice:
        name = plan_cache.name_of(call_options.options, self._topology)
        return plan_cache.algorithm(collective, members, name, self._topology)

    def _block_choice(self, collective: str, members: Members) -> Choice:
        return plan_cache.algorithm(collective, members, self._block_algorithm, self._topology)

    def _plan(self, members: Members, choice: Choice, *sizes: Any, **options: Any) -> Encoded:
        by, topology = choice
        if topology is not None:
            options["topology"] = topology
        return PLANS[by.collective](members, by, *sizes, **options)

    def _sum_plan(
        self,
        members: Members,
        choice: Choice,
        elements: int | tuple[int, ...],
        dtype: DType,
        call_options: CallOptions,
        **how: Any,
    ) -> Encoded:
        """The plan of a reduction. ``how``: what its builder takes besides."""
        layout = self._layout(dtype, call_options)
        per_packet, (by, topology) = layout.per_packet, choice
        if topology is not None:
            found = sum_layout_of(layout, self._payload, call_options.encoding, topology)
            per_packet, choice = found.per_packet, Choice(by, found.topology)
        return self._plan(members, choice, elements, per_packet, **how)

    def _layout(self, dtype: DType, call_options: CallOptions) -> ElementLayout:
        return layout_of(self._payload, dtype, call_options.encoding)

    def _need(self, call: Collective, members: Members, ranks: Sequence[int]) -> None:
        """Refuses a call that needs data of lost ranks; on all ranks alike."""
        lost = sorted(set(ranks) - set(members.ranks))
        if lost:
            raise self._missed(call, lost)

    def _need_all(self, call: Collective, members: Members, call_options: CallOptions) -> None:
        """The same for a call whose result has a part of every rank."""
        if (
            not members.complete
            and call_options.among is None
            and call_options.options.delivery == "reliable"
        ):
            raise self._missed(call, members.lost)

    def _missed(self, call: Collective, lost: Sequence[int]) -> PeerLostError:
        names = " and ".join(self.health.where.peer(rank) for rank in lost)
        return PeerLostError(
            f"{self.health.where}: {call.numbered} needs data of {names}, lost before; the group "
            f"continues without: reductions, and broadcasts from a rank that is left, still work",
            peer=lost[0],
        )

    # ---- what the control plane says of other ranks, in its thread ----

    def lose(self, rank: int) -> int:
        """Stops submitting until :meth:`go_on`, and gives a rank up.

        Args:
            rank: The rank that is lost.

        Returns:
            The number of the next operation.
        """
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

        Args:
            rank: The rank.
        """
        if self._engine is not None:
            with contextlib.suppress(ClosedError):
                if self._engine.lingering()[0]:
                    self.health.waiting_for_last()
                self._engine.peer_left(rank)

    def go_on(self, views: Sequence[View], agreed: bool) -> None:
        """Takes views over, and submits again if the last one is agreed.

        Args:
            views: All of the group's, oldest first.
            agreed: Whether the survivors have agreed on the last one.
        """
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
        """Lost ranks, as of the last operation submitted here.

        Returns:
            The ranks. Nothing later changes them, so they are the same on all ranks that have
            submitted as many operations.
        """
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
        """Makes an error of this rank's own the failure of all ranks.

        It doesn't overtake calls that were done here: other ranks get what they need of them
        first, within a second.

        Args:
            call: The call that fails by it.
            error: The failure, unless the group has one.
        """
        try:
            self._leaving.finish_delivery(call)
        finally:  # also if Ctrl-C ends the wait
            self.health.fail(error, tell=True)

    def close(self) -> None:
        """Announces to the other ranks that this one leaves, ends what is pending, joins threads.

        Idempotent; if Ctrl-C interrupts it, the next call does the rest.
        """
        self._leaving.close()


def _finish_of_owned(choice: Choice, call_options: CallOptions) -> Finish:
    """How a sum ends whose owner is always the same. Where nothing can be lost both ways give the
    same, and MEAN adds the owner's part in passing."""
    within_host = choice.topology is not None and choice.topology.one_host
    exact = call_options.options.delivery == "reliable" or within_host
    return Finish.MEAN if exact else Finish.STRATIFIED
