"""The collectives of one rank: each is planned, and submitted as an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.errors import PeerLostError
from lossycoll.options.fields import Options
from lossycoll.plan import Finish, Missing, packet_count
from lossycoll.plan.copies import BARRIER_FANOUT
from lossycoll.plan.reduce_scatter import IN_PLACE
from lossycoll.plan.registry import AUTO, HIERARCHICAL
from lossycoll.runtime.core.call import CallOptions, Collective, Operation
from lossycoll.runtime.engine.binding import DType, Encoded
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions

from . import plan_cache
from .estimators import BY_COUNT, Estimators, Means
from .group_context import GroupContext, Members
from .group_stats import GroupStats
from .operations import Operations
from .plan_cache import PLANS, Choice, ElementLayout, layout_of, sum_layout_of

SINGLE_PAYLOAD: Final = 1408
"""Bytes that a packet would carry in a world of one, for those who count blocks."""


STEADY: Final = 256
"""Plans that a group finds again without a look at what they are made by."""


class CollectiveEndpoint:
    """One method for each collective, which returns the operation, submitted.

    ``call`` has been issued; ``call_options`` are its options. ``buffers`` are the addresses of
    input and output, ``address`` is that of a buffer that is both. The caller keeps them alive
    until the operation is done (``CallOptions.keep``). ``elements`` (of a ``dtype``) and ``nbytes``
    are each rank's: the same for all, or one number per rank. ``root`` is the rank that has what is
    sent, or gets what is collected. What has a part of each rank is in the order of ranks.

    Each method raises ClosedError once the group is over, or the group's failure if it has one.
    Calls that need the data of a lost rank raise PeerLostError. Errors of a plan's builder, for
    sizes that it can't serve, pass through.

    Args:
        context: The rank's context of the group.
        timeout: Seconds for ranks that never take part.
    """

    def __init__(self, context: GroupContext, *, timeout: float) -> None:
        where, options, engine = context.health.where, context.options, context.engine
        self.health = context.health
        self.options = options
        self.rank = where.rank
        self.world = where.world
        self.operations: Final = Operations(context, timeout)
        self.stats: Final = GroupStats(context, self.operations)
        self._group = context.number
        self._topology = context.topology
        # Whatever the options say: the ranks of a host have got the same blocks, and so need the
        # same, as long as all calls go by tiers.
        self._block_algorithm = AUTO if self._topology.is_flat else HIERARCHICAL
        self._engine = engine
        self._payload = SINGLE_PAYLOAD if engine is None else engine.link().payload_bytes
        self._estimators = Estimators(where.world, self.stats.peer)
        self._sequencer = self.operations.sequencer
        self._submitting = self.operations.submitting
        self._submit = self.operations.submit
        # Where a rank may be lost, none but the root may forward the data of others.
        self._fanout = where.world if options.continues else 2
        # What barriers add up, all of them; nobody looks at the sum.
        self._one, self._sum = np.ones(1, np.float32), np.zeros(1, np.float32)
        self._barrier_buffers = self._one.ctypes.data, self._sum.ctypes.data
        self._steady: dict[tuple[object, ...], tuple[Encoded, Members, Options]] = {}

    # ---- reductions ----

    def all_reduce(
        self, call: Collective, address: int, elements: int, dtype: DType, call_options: CallOptions
    ) -> Operation:
        """In place: the sum (or mean) of all ranks' ``elements`` at ``address``."""
        options = call_options.options
        with self._submitting():
            members = self._sequencer.members()
            key = (id(members), id(options), "all_reduce", elements, dtype, call_options.encoding)
            buffers = (address, address)
            if (kept := self._steady.get(key)) is not None:
                return self._submit(kept[0], call, buffers, dtype, call_options, means=BY_COUNT)
            choice = self._algorithm("all_reduce", members, call_options)
            number = self._sequencer.next
            packets = packet_count(elements, self._layout(dtype, call_options).per_packet)
            order = self._order(choice, members, options, number, packets)
            means = self._estimators.means(options, members)
            how: dict[str, Any] = {
                "order": order,
                "missing": Missing[options.on_missing.upper()],
                "finish": means.finish or Finish.MEAN,
            }
            encoded = self._sum_plan(members, choice, elements, dtype, call_options, **how)
            if order is None and not self._estimators.weigh(options):
                self._keep(key, encoded, members, options)
            return self._submit(encoded, call, buffers, dtype, call_options, means=means)

    def _keep(
        self, key: tuple[object, ...], encoded: Encoded, members: Members, options: Options
    ) -> None:
        """Keeps the plan of a call all of whose like have the same. ``key`` names members and
        options by their ids, which are theirs as long as they are kept here."""
        if len(self._steady) >= STEADY:
            self._steady.clear()
        self._steady[key] = encoded, members, options

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
        """The sum (or mean) of all ranks' chunk number ``rank``."""
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
        """A reduce-scatter after which each rank knows what of its contributions was lost.

        Lost blocks (packets) count as zero, for whoever sends them again. They are the operation's
        ``blocks``.
        """
        with self._submitting():
            members = self._sequencer.members()
            means, result = BY_COUNT, None
            by, hosts = choice = self._block_choice("reduce_scatter", members)
            finish = _finish_of_owned(choice, call_options)
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
            encoded = self._sum_plan(
                members, (by, hosts), elements, dtype, call_options, finish=finish
            )
            blocks = Contributions(encoded.plan, result)
            return self._submit(
                encoded, call, buffers, dtype, call_options, means=means, blocks=blocks
            )

    # ---- copies ----

    def broadcast(
        self, call: Collective, address: int, nbytes: int, root: int, call_options: CallOptions
    ) -> Operation:
        """In place: ``root``'s bytes on all ranks."""
        return self._copy(
            *("broadcast", call, (address, address), call_options, nbytes),
            root=root,
            fanout=self._fanout,
        )

    def all_gather(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int | tuple[int, ...],
        call_options: CallOptions,
    ) -> Operation:
        """Every rank's bytes, one after another."""
        return self._copy("all_gather", call, buffers, call_options, nbytes, of_all=True)

    def all_gather_blocks(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int,
        needed: NDArray[np.bool_] | None,
        call_options: CallOptions,
    ) -> Operation:
        """An all-gather of equal chunks that knows in the end which blocks (packets) arrived.

        They are the operation's ``blocks``.

        Args:
            needed: bool (world, packets), by owner: those that are asked for until they come. None:
                none.
        """
        with self._submitting():
            members = self._sequencer.members()
            choice = self._block_choice("all_gather", members)
            layout, same = self._layout(DType.BYTES, call_options), call_options.encoding == "same"
            per_packet = layout.per_packet if same else self._block_elements(call_options.encoding)
            encoded = self._plan(members, choice, layout.elements(nbytes), per_packet)
            blocks = Blocks(encoded.plan, needed)
            return self._submit(encoded, call, buffers, layout.dtype, call_options, blocks=blocks)

    def all_to_all(
        self, call: Collective, buffers: tuple[int, int], nbytes: int, call_options: CallOptions
    ) -> Operation:
        """The same number of bytes to each rank and from each rank."""
        return self._copy("all_to_all", call, buffers, call_options, nbytes, of_all=True)

    def exchange(
        self,
        call: Collective,
        buffers: tuple[int, int],
        send: Sequence[int],
        receive: Sequence[int],
        call_options: CallOptions,
    ) -> Operation:
        """Bytes of any number to each rank, and from each rank.

        Whether both ends agree is unchecked.

        Args:
            send: Bytes to each rank.
            receive: Bytes from each rank.
        """
        sizes = tuple(send), tuple(receive)
        return self._copy("all_to_all_uneven", call, buffers, call_options, *sizes, of_all=True)

    def gather(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int,
        root: int,
        call_options: CallOptions,
    ) -> Operation:
        """Every rank's bytes at ``root``, one after another."""
        return self._copy("gather", call, buffers, call_options, nbytes, of_all=True, root=root)

    def scatter(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int,
        root: int,
        call_options: CallOptions,
    ) -> Operation:
        """``root``'s chunk number r at rank r."""
        return self._copy("scatter", call, buffers, call_options, nbytes, root=root)

    def barrier(self, call: Collective, call_options: CallOptions) -> Operation:
        """Done on no rank before all have begun it."""
        with self._submitting():
            members = self._sequencer.members()
            choice = self._algorithm("barrier", members, call_options)
            fanout = max(self._fanout, BARRIER_FANOUT)
            encoded = self._plan(members, choice, 1, fanout=fanout)
            return self._submit(encoded, call, self._barrier_buffers, DType.F32, call_options)

    def _copy(
        self,
        collective: str,
        call: Collective,
        buffers: tuple[int, int],
        call_options: CallOptions,
        *nbytes: int | tuple[int, ...],
        of_all: bool = False,
        **options: int,
    ) -> Operation:
        """Plans and submits what moves bytes. ``of_all``: the result has a part of every rank."""
        asked = call_options.options
        with self._submitting():
            members = self._sequencer.members()
            if not members.complete:
                self._need(call, members, call_options, options.get("root"), of_all)
            layout = self._layout(DType.BYTES, call_options)
            key = (
                id(members),
                id(asked),
                collective,
                nbytes,
                call_options.encoding,
                *options.values(),
            )
            if (kept := self._steady.get(key)) is not None:
                return self._submit(kept[0], call, buffers, layout.dtype, call_options)
            choice = self._algorithm(collective, members, call_options)
            sizes = map(layout.elements, nbytes)
            encoded = self._plan(members, choice, *sizes, layout.per_packet, **options)
            if collective != "all_to_all_uneven":  # whose sizes rarely come again
                self._keep(key, encoded, members, asked)
            return self._submit(encoded, call, buffers, layout.dtype, call_options)

    # ---- plans ----

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
            per_packet, topology = sum_layout_of(
                layout, self._payload, call_options.encoding, topology
            )
        elif call_options.encoding == "same":
            owners = len(how.get("order") or members.ranks)
            per_packet = plan_cache.finer(by, elements, owners, per_packet, call_options.options)
        return self._plan(members, (by, topology), elements, per_packet, **how)

    def _block_elements(self, encoding: str) -> int:
        """The float32 elements of a block: what one packet carries, encoded so."""
        encoding = "same" if self._topology.one_host else encoding
        layout = layout_of(self._payload, DType.F32, encoding)
        return sum_layout_of(layout, self._payload, encoding, self._topology)[0]

    def _layout(self, dtype: DType, call_options: CallOptions) -> ElementLayout:
        return layout_of(self._payload, dtype, call_options.encoding)

    def _need(
        self,
        call: Collective,
        members: Members,
        call_options: CallOptions,
        root: int | None,
        of_all: bool,
    ) -> None:
        """Refuses a call that needs data of lost ranks: its root's, or of every rank; on all ranks
        alike."""
        reduces = call_options.among is not None
        exact = of_all and not reduces and call_options.options.delivery == "reliable"
        missed = (root,) if root in members.lost else members.lost if exact else ()
        if missed:
            names = " and ".join(self.health.where.peer(rank) for rank in missed)
            raise PeerLostError(
                f"{self.health.where}: {call.numbered} needs data of {names}, lost before; the "
                f"group continues without: reductions, and broadcasts from a rank that is left, "
                f"still work",
                peer=missed[0],
            )


def _finish_of_owned(choice: Choice, call_options: CallOptions) -> Finish:
    """The end of a sum whose owner is always the same. Where nothing can be lost both ways give the
    same, and MEAN adds the owner's part in passing."""
    within_host = choice[1] is not None and choice[1].one_host
    exact = call_options.options.delivery == "reliable" or within_host
    return Finish.MEAN if exact else Finish.STRATIFIED
