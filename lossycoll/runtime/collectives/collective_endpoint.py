"""What runs the collectives of one rank: the engine's endpoint, or copies in a world of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lossycoll.runtime.core.call import Collective, Operation, Terms
from lossycoll.runtime.engine.binding import DType


class CollectiveEndpoint(Protocol):
    """One method for each collective. Buffers are addresses, and the calls have been issued."""

    def all_reduce(
        self, call: Collective, address: int, elements: int, dtype: DType, terms: Terms
    ) -> Operation:
        """In place: the sum (or mean) of all ranks' ``elements`` at ``address``."""

    def reduce_scatter(
        self,
        call: Collective,
        buffers: tuple[int, int],
        elements: int | tuple[int, ...],
        dtype: DType,
        terms: Terms,
    ) -> Operation:
        """The sum (or mean) of all ranks' chunk number ``rank``; chunks of ``elements`` (each).

        ``buffers``: input (a chunk for each rank) and output (one chunk).
        """

    def reduce_scatter_blocks(
        self,
        call: Collective,
        buffers: tuple[int, int],
        elements: int,
        dtype: DType,
        terms: Terms,
    ) -> Operation:
        """A reduce-scatter of equal chunks after which each rank knows which ``blocks`` (packets)
        of its contributions were lost: they count as zero, for whoever sends them again."""

    def broadcast(
        self, call: Collective, address: int, nbytes: int, root: int, terms: Terms
    ) -> Operation:
        """In place: ``root``'s ``nbytes`` on all ranks."""

    def all_gather(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int | tuple[int, ...],
        terms: Terms,
    ) -> Operation:
        """Every rank's ``nbytes`` (``buffers[0]``), one after another at ``buffers[1]``.

        ``nbytes``: the same for all, or one number per rank.
        """

    def all_gather_blocks(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int,
        needed: NDArray[np.bool_] | None,
        terms: Terms,
    ) -> Operation:
        """An all-gather of equal chunks that knows in the end which ``blocks`` (packets) arrived.

        ``needed``: bool (world, packets), those that are asked for until they come; None: none.
        """

    def all_to_all(
        self, call: Collective, buffers: tuple[int, int], nbytes: int, terms: Terms
    ) -> Operation:
        """``nbytes`` to each rank and from each rank; both buffers in rank order."""

    def exchange(
        self,
        call: Collective,
        buffers: tuple[int, int],
        send: Sequence[int],
        receive: Sequence[int],
        terms: Terms,
    ) -> Operation:
        """``send[r]`` bytes to rank r, ``receive[r]`` from it; whether both agree is unchecked."""

    def gather(
        self, call: Collective, buffers: tuple[int, int], nbytes: int, root: int, terms: Terms
    ) -> Operation:
        """Every rank's ``nbytes`` at ``root``, one after another."""

    def scatter(
        self, call: Collective, buffers: tuple[int, int], nbytes: int, root: int, terms: Terms
    ) -> Operation:
        """``root``'s chunk number r of ``nbytes`` at rank r."""

    def barrier(self, call: Collective, terms: Terms) -> Operation:
        """Done on no rank before all have begun it."""
