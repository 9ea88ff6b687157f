"""Extensions of torch's interface by a lossy group: stats, options, collectives of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lossycoll.errors import UnsupportedError
from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.runtime.engine.reports import Report, Stats

from . import checks
from .collectives import ALL_GATHER_BLOCKS, REDUCE_SCATTER_BLOCKS, BlockWork, ContributionWork
from .description import Description
from .dispatch import Dispatcher
from .overloads import c10d, opaque
from .reconfiguration import Reconfigurable
from .reduction import AVG
from .tensors import DTYPES, nbytes


@opaque
class Extensions(Reconfigurable):
    """A base of LossyProcessGroup, which sets the attributes."""

    _dispatcher: Dispatcher
    _name: str
    _description: str

    # ---- figures and options ----

    def lossy_stats(self) -> Stats:
        """Return this rank's figures since the group was made (``lossycoll.stats``)."""
        found = self._endpoint.stats.stats()
        return replace(
            found,
            nan_groups=found.nan_groups + self._dispatcher.device_wire.nan_groups(),
            group=self._name,
            description=self._description,
        )

    def lossy_has_left(self, rank: int) -> bool:
        """Return whether a rank has left in order; its process may live.

        Args:
            rank: Rank in this group.

        Returns:
            True if it left in order.
        """
        return self._endpoint.health.left(rank) is not None

    def lossy_topology(self) -> Topology:
        """Return the ranks' hosts and sites (``lossycoll.topology``)."""
        return self._group.topology

    def lossy_rekey(self) -> None:
        """Change the keys of all traffic from now on (``lossycoll.rekey``)."""
        self._group.rekey()

    def lossy_options(self) -> Options:
        """Return the options for a call made now, as changed by the scope around it."""
        return self._dispatcher.effective()

    def lossy_resend(self, rounds: int) -> Callable[[], None]:
        """Make ``repair`` at least ``rounds`` from now on, unless the group was given a value.

        All ranks must call this, and its result, between the same calls.

        Args:
            rounds: Rounds of resending, 0 to 255.

        Returns:
            A function that undoes the change.
        """
        return self.lossy_recover(repair=rounds)

    def lossy_recover(
        self, *, repair: int | None = None, max_missing: float | None = None
    ) -> Callable[[], None]:
        """Recover more of the lost packets from now on.

        Options set for the group take precedence: ``repair`` over the argument ``repair``, and
        ``max_missing``, ``repair`` or ``fec`` over the argument ``max_missing``. All ranks must
        call this, and its result, between the same calls.

        Args:
            repair: Minimum rounds of resending, 0 to 255; None: unchanged.
            max_missing: Maximum share of missing packets, 0 to 1; None: unchanged.

        Returns:
            A function that undoes the change.
        """
        self.lossy_made_up_for()
        return self._dispatcher.recover(repair, max_missing)

    def lossy_made_up_for(self) -> None:
        """Suppress warnings of missing packets in this group, since a method makes up for them."""
        self._endpoint.stats.made_up_for = True

    def lossy_lost(self) -> tuple[int, ...]:
        """Return the lost ranks, as soon as this rank knows of them."""
        return tuple(sorted(self._endpoint.health.lost))

    def lossy_lost_alike(self) -> tuple[int, ...]:
        """Return the lost ranks that took no part in the last collective.

        The result is the same on all ranks at the same place among their collectives, so their next
        call may depend on it. A rank that was lost since appears after the next collective.

        Returns:
            The ranks, in ascending order.
        """
        return self._endpoint.lost_alike()

    def lossy_last_report(self) -> Report | None:
        """Return the report of the engine's last finished operation here; None before the first."""
        return self._endpoint.stats.last_report()

    def lossy_group_stats(self) -> Mapping[int, Mapping[str, Any]]:
        """Ask every rank for its counters, and return them by rank (``lossycoll.group_stats``)."""
        return self._endpoint.stats.of_all_ranks()

    # ---- a collective as data ----

    def run(self, description: Description, opts: Any = None) -> dist.Work:
        """Run any collective that is described as data, including one that torch lacks.

        All ranks must run the same collectives in the same order.

        Args:
            description: The call: its buffers and its kind of collective.
            opts: torch's options of the call, for ``timeout`` and ``asyncOp``.

        Returns:
            The work; its result is ``description.writes``.

        Raises:
            UnsupportedError: A tensor or root can't be served.
        """
        return self._dispatcher.run(description, c10d.BarrierOptions() if opts is None else opts)

    # ---- collectives that say what became of each block ----

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: what a full packet carries."""
        return self._endpoint.block_bytes

    def block_elements(self, encoding: str) -> int:
        """Return the number of float32 elements of a block: what a full packet carries.

        Args:
            encoding: Encoding of packets, as in ``all_gather_blocks``.

        Returns:
            Their number.
        """
        return self._endpoint.block_elements(encoding)

    def blocks(self, nbytes: int, encoding: str = "same") -> int:
        """Return the number of blocks of a chunk in :meth:`all_gather_blocks`.

        Args:
            nbytes: The chunk's bytes.
            encoding: Encoding of packets.

        Returns:
            Their number.
        """
        return self._endpoint.blocks(nbytes, encoding)

    def lossy_owners(self, nbytes: int) -> int:
        """Return how many ranks should own parts of a buffer that always has the same owners.

        Without resending, streams of few packets lose more than parity can restore. Then fewer
        ranks should own a short buffer (option ``stream_packets``).

        Args:
            nbytes: Bytes of the buffer.

        Returns:
            Number of owners, 1 to world, by the options in force.
        """
        return self._endpoint.owner_count(nbytes, self._dispatcher.effective())

    def all_gather_blocks(
        self,
        output: Tensor,
        needed: NDArray[np.bool_] | None = None,
        encoding: str = "same",
        counts: Sequence[int] | None = None,
    ) -> BlockWork:
        """Gather rank r's chunk of ``output`` on all ranks, in place, block by block.

        In lossy delivery (the group's, or a scope's), the old values stay where a packet doesn't
        arrive. Packets may be smaller than blocks; a block has arrived when all of it has.

        Args:
            output: Shape (sum of ``counts``,), contiguous: the ranks' chunks in a row.
            needed: bool (world, blocks), by owner: blocks that are requested until they arrive. The
                own row is ignored. None: no block is.
            encoding: Encoding of float32 in packets, as ``lossycoll.plan.codec.named`` returns it.
                The own chunk stays as it is.
            counts: Elements of each rank's chunk, the same on all ranks. None: all chunks have as
                many.

        Returns:
            A work. Its ``arrived`` waits for the work and is bool (world, blocks), with as many
            blocks as the longest chunk has, True in the own row and beyond a chunk's end. A
            needed block is False only if nothing arrived over its link for ``deadline_max``
            seconds, or if its owner is lost.

        Raises:
            UnsupportedError: A tensor or an array has another form.
        """
        where, name, tensors = self._dispatcher.where, ALL_GATHER_BLOCKS.name, [output]
        checks.check_whole(where, name, output, encoding, counts)
        longest = output.numel() // where.world if counts is None else max(counts)
        shape = where.world, self.blocks(longest * output.element_size(), encoding)
        if needed is not None and (needed.shape != shape or needed.dtype != np.bool_):
            raise UnsupportedError(
                f"{where}: {name} got needed blocks as {needed.dtype}{needed.shape}, wanted "
                f"bool{shape}"
            )
        description = Description(
            *(ALL_GATHER_BLOCKS, tensors, tensors, nbytes(output)),
            compared=output,
            sizes=None if counts is None else tuple(counts),
            argument=needed,
            encoding=encoding,
        )
        work = self._dispatcher.run(description, c10d.AllgatherOptions())
        assert isinstance(work, BlockWork)
        return work

    def reduce_scatter_blocks(
        self, output: Tensor, input: Tensor, encoding: str = "same"
    ) -> ContributionWork:
        """Average chunk number ``rank`` of all ranks' ``input`` in ``output``, as far as packets
        arrived.

        In lossy delivery a lost block counts as zero: callers add it to their next contribution.
        The sum is divided by the world size.

        Args:
            output: Shape (n,), contiguous; it may be this rank's chunk of ``input``.
            input: Shape (world * n,), contiguous, floating-point. Where ranks share a host or a
                site, one of them sends the sum of all to an owner elsewhere; its ``input`` then
                holds that sum.
            encoding: As in :meth:`all_gather_blocks`.

        Returns:
            A work. Its ``lost`` waits for the work and is bool (world, blocks), by owner: the lost
            blocks (packets of the work's ``block_bytes``) of ``input``, as ``input`` is afterwards.
            It lacks the losses of a link that was silent for ``deadline_max``, which are unknown.
            ``sent`` is bool (world,): the owners whose chunk of ``input`` this rank has sent,
            encoded.

        Raises:
            UnsupportedError: A tensor has another form.
        """
        where, name = self._dispatcher.where, REDUCE_SCATTER_BLOCKS.name
        checks.check_whole(where, name, input, encoding)
        checks.check_chunks(where, name, output, input)
        if not output.is_contiguous():
            raise checks.refusal(where, name, f"an output of stride {output.stride()} in")
        if input.dtype not in DTYPES:
            raise checks.refusal(where, name, f"{input.dtype} in")
        description = Description(
            *(REDUCE_SCATTER_BLOCKS, [input], [output], nbytes(input)),
            compared=input,
            op=SimpleNamespace(op=AVG, factor=None),
            encoding=encoding,
        )
        work = self._dispatcher.run(description, c10d.ReduceScatterOptions())
        assert isinstance(work, ContributionWork)
        return work
