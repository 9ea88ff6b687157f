"""Extensions of torch's interface by a lossy group: stats, options, collectives of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.engine.reports import Report, Stats

from . import block_collectives
from .block_collectives import BlockWork, ContributionWork
from .description import Description
from .dispatch import Dispatcher, Recovered
from .overloads import opaque
from .tensors import nbytes

_c10d: Any = c10d  # its stub has overloads that aren't served


@opaque
class Extensions:
    """A base of LossyProcessGroup, which sets the attributes."""

    _endpoint: Endpoint
    _dispatcher: Dispatcher
    _topology: Topology
    _name: str
    _description: str
    _rekey: Callable[[], None]

    # ---- figures and options ----

    def lossy_stats(self) -> Stats:
        """This rank's figures since the group was made (``lossycoll.stats``)."""
        found = self._endpoint.stats.stats()
        return replace(
            found,
            nan_groups=found.nan_groups + self._dispatcher.device_wire.nan_groups(),
            group=self._name,
            description=self._description,
        )

    def lossy_has_left(self, rank: int) -> bool:
        """True if a rank has said goodbye: its process may live.

        Args:
            rank: Rank in this group.

        Returns:
            Whether it left in order.
        """
        return self._endpoint.health.left(rank) is not None

    def lossy_topology(self) -> Topology:
        """The ranks' hosts and sites (``lossycoll.topology``)."""
        return self._topology

    def lossy_rekey(self) -> None:
        """New keys for all that is sent from now on (``lossycoll.rekey``)."""
        self._rekey()

    def lossy_options(self) -> Options:
        """The options for a call made now: the group's, as the scope around changes them."""
        return self._dispatcher.effective()

    def lossy_resend(self, rounds: int) -> Callable[[], None]:
        """Makes ``repair`` at least ``rounds`` from now on, unless the group was given a value.

        All ranks must call this, and what it returns, between the same calls.

        Args:
            rounds: Rounds of resending, 0 to 255.

        Returns:
            A function that takes it back.
        """
        return self.lossy_recover(repair=rounds)

    def lossy_recover(
        self, *, repair: int | None = None, max_missing: float | None = None
    ) -> Callable[[], None]:
        """Has more brought back of what is lost from now on.

        The group's own options take precedence: ``repair`` counts unless that was set,
        ``max_missing`` unless that, ``repair`` or ``fec`` was. All ranks must call this, and its
        result, between the same calls.

        Args:
            repair: At least so many rounds of resending, 0 to 255; None: as they are.
            max_missing: At most this share may be missing, 0 to 1; None: as it is.

        Returns:
            A function that takes it back.
        """
        self.lossy_made_up_for()
        return self._dispatcher.recover(Recovered(repair, max_missing))

    def lossy_made_up_for(self) -> None:
        """A method looks after what is missing in this group, which needn't be warned of."""
        self._endpoint.stats.made_up_for = True

    def lossy_lost(self) -> tuple[int, ...]:
        """The ranks that the group continues without, as soon as this rank knows of them."""
        return tuple(sorted(self._endpoint.health.lost))

    def lossy_lost_alike(self) -> tuple[int, ...]:
        """The ranks that the last collective was made without.

        This is the same on all ranks at the same place among their collectives, so what they do
        next may depend on it. It doesn't include a rank that was lost since; the next collective's
        will.

        Returns:
            The ranks, in rising order.
        """
        return self._endpoint.lost_alike()

    def lossy_last_report(self) -> Report | None:
        """Report of the engine's last finished operation here; None before the first."""
        return self._endpoint.stats.last_report()

    def lossy_group_stats(self) -> Mapping[int, Mapping[str, Any]]:
        """Every rank's counters, by rank, which are asked now (``lossycoll.group_stats``)."""
        return self._endpoint.stats.of_all_ranks()

    # ---- a collective as data ----

    def run(self, description: Description, opts: Any = None) -> dist.Work:
        """Runs any collective that is described as data, also one that isn't in torch.

        All ranks must run the same ones in the same order.

        Args:
            description: The call: its buffers and its kind of collective.
            opts: torch's options of the call, for ``timeout`` and ``asyncOp``.

        Returns:
            The work; its result is ``description.writes``.

        Raises:
            UnsupportedError: A tensor or root that can't be served.
        """
        return self._dispatcher.run(description, _c10d.BarrierOptions() if opts is None else opts)

    # ---- collectives that say what became of each block ----

    @property
    def block_bytes(self) -> int:
        """The bytes that one block (packet) carries."""
        return self._endpoint.block_bytes

    def block_elements(self, encoding: str) -> int:
        """The float32 elements that one block (packet) carries.

        Args:
            encoding: Encoding of packets, as the calls below take it.

        Returns:
            Their number.
        """
        return self._endpoint.block_elements(encoding)

    def blocks(self, nbytes: int, encoding: str = "same") -> int:
        """Counts the blocks (packets) of a chunk in :meth:`all_gather_blocks`.

        Args:
            nbytes: The chunk's bytes.
            encoding: Encoding of packets.

        Returns:
            Their number.
        """
        return self._endpoint.blocks(nbytes, encoding)

    def all_gather_blocks(
        self, output: Tensor, needed: NDArray[np.bool_] | None = None, encoding: str = "same"
    ) -> BlockWork:
        """Gathers rank r's chunk of ``output`` on all ranks, in place, block by block.

        In lossy delivery (the group's, or a scope's) a block that doesn't arrive leaves what was
        there.

        Args:
            output: Shape (world * n,), contiguous; chunk r is ``output[r * n : (r + 1) * n]``.
            needed: bool (world, blocks), those that are asked for until they come, by owner; the
                own row is ignored. None: none is.
            encoding: Encoding of float32 in packets, as ``lossycoll.plan.codec.named`` returns it.
                The own chunk stays as it is.

        Returns:
            A work whose ``arrived`` waits for it and is bool (world, blocks), own row True. A
            needed block is missing in it only if nothing came over that link for ``deadline_max``
            seconds, or if its owner is lost.

        Raises:
            UnsupportedError: A tensor or an array of another form.
        """
        blocks = self.blocks(nbytes(output) // self._dispatcher.where.world, encoding)
        description = block_collectives.all_gather_blocks(
            self._dispatcher.where, output, needed, blocks, encoding
        )
        work = self._dispatcher.run(description, _c10d.AllgatherOptions())
        assert isinstance(work, BlockWork)
        return work

    def reduce_scatter_blocks(
        self, output: Tensor, input: Tensor, encoding: str = "same"
    ) -> ContributionWork:
        """Averages all ranks' chunks number ``rank`` of ``input`` in ``output``, of what arrived.

        In lossy delivery what is lost counts as zero: for callers that add it to their next
        contribution. The sum is divided by the world.

        Args:
            output: Shape (n,), contiguous; it may be this rank's chunk of ``input``.
            input: Shape (world * n,), contiguous, floating. Where ranks share a host or a site, one
                of them sends the sum of all for an owner elsewhere, and finds it here afterwards.
            encoding: As in :meth:`all_gather_blocks`.

        Returns:
            A work whose ``lost`` waits for it and is bool (world, blocks), by owner: the blocks
            (packets) of ``input``, as it is then, that were lost. Losses of a link that was silent
            for ``deadline_max`` are unknown, and not in it. ``sent`` is bool (world,): the owners
            whose chunk of ``input`` this rank has sent, encoded.

        Raises:
            UnsupportedError: Tensors of another form.
        """
        description = block_collectives.reduce_scatter_blocks(
            self._dispatcher.where, output, input, encoding
        )
        work = self._dispatcher.run(description, _c10d.ReduceScatterOptions())
        assert isinstance(work, ContributionWork)
        return work
