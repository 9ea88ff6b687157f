"""Interface to the collectives of one rank: the engine's endpoint, or copies in a world of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lossycoll.runtime.core.call import CallOptions, Collective, Operation
from lossycoll.runtime.engine.binding import DType


class CollectiveEndpoint(Protocol):
    """One method for each collective. Buffers are addresses, and the calls have been issued.

    Whoever calls keeps the buffers alive until the operation is done (``CallOptions.keep``). Each
    method raises ClosedError once the group is over, the group's failure if it has one,
    PeerLostError for what needs the data of a rank that is lost, and what a plan's builder raises
    for sizes that it can't serve.
    """

    def all_reduce(
        self, call: Collective, address: int, elements: int, dtype: DType, call_options: CallOptions
    ) -> Operation:
        """In place: the sum (or mean) of all ranks' ``elements`` at ``address``.

        Args:
            call: The call, which has been issued.
            address: Of the elements, which are replaced by the result.
            elements: How many.
            dtype: Of the elements.
            call_options: How it is to be done.

        Returns:
            The operation, submitted.

        Raises:
            LossyError: As the class says.
        """

    def reduce_scatter(
        self,
        call: Collective,
        buffers: tuple[int, int],
        elements: int | tuple[int, ...],
        dtype: DType,
        call_options: CallOptions,
    ) -> Operation:
        """The sum (or mean) of all ranks' chunk number ``rank``.

        Args:
            call: The call, which has been issued.
            buffers: Addresses of the input (a chunk for each rank, in rank order) and of the output
                (one chunk).
            elements: Of each chunk; the same for all, or one number per rank.
            dtype: Of the elements.
            call_options: How it is to be done.

        Returns:
            The operation, submitted.

        Raises:
            LossyError: As the class says.
        """

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

        Args:
            call: The call, which has been issued.
            buffers: As in :meth:`reduce_scatter`.
            elements: Of each chunk.
            dtype: Of the elements.
            call_options: How it is to be done.

        Returns:
            The operation, submitted.

        Raises:
            LossyError: As the class says.
        """

    def broadcast(
        self, call: Collective, address: int, nbytes: int, root: int, call_options: CallOptions
    ) -> Operation:
        """In place: ``root``'s bytes on all ranks.

        Args:
            call: The call, which has been issued.
            address: Of the bytes.
            nbytes: How many.
            root: The rank that has them.
            call_options: How it is to be done.

        Returns:
            The operation, submitted.

        Raises:
            LossyError: As the class says.
        """

    def all_gather(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int | tuple[int, ...],
        call_options: CallOptions,
    ) -> Operation:
        """Every rank's bytes, one after another.

        Args:
            call: The call, which has been issued.
            buffers: Addresses of this rank's bytes, and of room for those of all.
            nbytes: Of each rank; the same for all, or one number per rank.
            call_options: How it is to be done.

        Returns:
            The operation, submitted.

        Raises:
            LossyError: As the class says.
        """

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
            call: The call, which has been issued.
            buffers: As in :meth:`all_gather`.
            nbytes: Of each chunk.
            needed: bool (world, packets), by owner: those that are asked for until they come. None:
                none.
            call_options: How it is to be done.

        Returns:
            The operation, submitted.

        Raises:
            LossyError: As the class says.
        """

    def all_to_all(
        self, call: Collective, buffers: tuple[int, int], nbytes: int, call_options: CallOptions
    ) -> Operation:
        """The same number of bytes to each rank and from each rank.

        Args:
            call: The call, which has been issued.
            buffers: Addresses of input and output, both in rank order.
            nbytes: To each rank.
            call_options: How it is to be done.

        Returns:
            The operation, submitted.

        Raises:
            LossyError: As the class says.
        """

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
            call: The call, which has been issued.
            buffers: Addresses of input and output, both in rank order.
            send: Bytes to each rank.
            receive: Bytes from each rank.
            call_options: How it is to be done.

        Returns:
            The operation, submitted.

        Raises:
            LossyError: As the class says.
        """

    def gather(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int,
        root: int,
        call_options: CallOptions,
    ) -> Operation:
        """Every rank's bytes at ``root``, one after another.

        Args:
            call: The call, which has been issued.
            buffers: Addresses of this rank's bytes and, at the root, of room for those of all.
            nbytes: Of each rank.
            root: The rank that gets them.
            call_options: How it is to be done.

        Returns:
            The operation, submitted.

        Raises:
            LossyError: As the class says.
        """

    def scatter(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int,
        root: int,
        call_options: CallOptions,
    ) -> Operation:
        """``root``'s chunk number r at rank r.

        Args:
            call: The call, which has been issued.
            buffers: Addresses of the chunks of all ranks, at the root, and of room for one.
            nbytes: Of each chunk.
            root: The rank that has them.
            call_options: How it is to be done.

        Returns:
            The operation, submitted.

        Raises:
            LossyError: As the class says.
        """

    def barrier(self, call: Collective, call_options: CallOptions) -> Operation:
        """Done on no rank before all have begun it.

        Args:
            call: The call, which has been issued.
            call_options: How it is to be done.

        Returns:
            The operation, submitted.

        Raises:
            LossyError: As the class says.
        """
