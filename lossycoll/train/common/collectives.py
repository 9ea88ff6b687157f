"""The collectives of sharded training, over a lossy group or any other.

Elsewhere nothing is ever missing: another backend's collectives are reliable, and a group of one
rank needs none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch.distributed as dist
from torch import Tensor

from lossycoll.backend.process_group import LossyProcessGroup
from lossycoll.errors import PeerLostError
from lossycoll.options.fields import lossy, reliable

from .arguments import own_group
from .staleness import Mask

REMEDY: Final = (
    "A rank that is lost had the only copy of its share of the optimizer's state: restart with the "
    "ranks that are left from the last checkpoint, which loads at any number of ranks"
)


class Work(Protocol):
    """What a collective returns that is under way."""

    def wait(self) -> Any: ...


class Gathering:
    """An all-gather that is under way. ``wait`` returns what arrived: bool (world, blocks)."""

    def __init__(self, work: Work | None, arrived: Callable[[], Mask]) -> None:
        self._work = work
        self._arrived = arrived

    def wait(self) -> Mask:
        if self._work is not None:
            self._work.wait()
        return self._arrived()


class Sending:
    """A reduction that is under way. ``lost``, once it is over: bool (world, blocks), what other
    ranks did without of this rank's contribution."""

    def __init__(self, work: Work, lost: Callable[[], Mask]) -> None:
        self._work = work
        self._lost = lost

    def wait(self) -> None:
        self._work.wait()

    @property
    def lost(self) -> Mask:
        return self._lost()


class Exchange:
    """The group ``group`` (None: the default one) as training uses it.

    ``repair``: rounds of selective resending; more where the block of code or the group says so.
    Raises UnsupportedError where there is no group, and for one that this rank isn't in.
    """

    def __init__(self, group: dist.ProcessGroup | None, repair: int) -> None:
        found = own_group(group)
        self.group: dist.ProcessGroup = found
        self.rank = dist.get_rank(found)
        self.world = dist.get_world_size(found)
        self.lossy = found if isinstance(found, LossyProcessGroup) else None
        self._repair = repair

    def __str__(self) -> str:
        return f"rank {self.rank}/{self.world}"

    def peer(self, rank: int) -> str:
        """A rank as errors write it."""
        return named(self.group, rank)

    def delivery(self) -> contextlib.AbstractContextManager[None]:
        """The block of code in which gradients and parameters are sent."""
        if self.lossy is None:
            return reliable()
        asked = self.lossy.lossy_options()
        if asked.delivery == "reliable":
            return reliable()
        return lossy(lossy_min_bytes=0, repair=max(self._repair, asked.repair))

    @contextlib.contextmanager
    def owners_needed(self) -> Iterator[None]:
        """A block in which a lost rank's PeerLostError says what that means here."""
        try:
            yield
        except PeerLostError as error:
            if REMEDY in str(error):
                raise
            raise PeerLostError(f"{error}. {REMEDY}", peer=error.peer) from error

    def lost_alike(self) -> tuple[int, ...]:
        """Ranks that the group's last collective was made without; the same on all ranks. What
        decides on the next collective goes by this: by what one rank happens to know, that rank
        would raise, and another that had already begun the next one would wait for it."""
        return () if self.lossy is None else self.lossy.lossy_lost_alike()

    def lost_here(self) -> tuple[int, ...]:
        """Ranks that the group goes on without as far as this rank knows, before others may."""
        return () if self.lossy is None else self.lossy.lossy_lost()

    def goes_on_without(self, error: PeerLostError) -> bool:
        """Whether the group outlives the loss that ``error`` is about."""
        return error.peer in self.lost_here()

    def check_owners(self) -> None:
        """Raises PeerLostError, on all ranks alike, if the last collective was made without a rank:
        its chunks have no owner."""
        lost = self.lost_alike()
        if lost:
            who = ", ".join(self.peer(rank) for rank in lost)
            raise PeerLostError(f"{self}: lost {who}. {REMEDY}", peer=lost[0])

    # ---- gradients ----

    def average(self, output: Tensor, source: Tensor) -> Work:
        """Starts the mean over the ranks of ``source`` (world * n,), which may be overwritten;
        ``output`` (n,) is this rank's chunk of it. Lossy and unbiased, unless a block of code or
        the group says reliable.
        """
        op = dist.ReduceOp.AVG
        if self.lossy is None:
            # Others form sums, in which 16-bit types could overflow.
            op = dist.ReduceOp.SUM
            source.div_(self.world)
        with self.delivery():
            return dist.reduce_scatter_single(output, source, op, self.group, async_op=True)  # type: ignore[no-any-return]

    def contribute(self, output: Tensor, source: Tensor) -> Sending:
        """:meth:`average`, in which what is lost of ``source`` counts as zero, and is told."""
        if self.lossy is None or self.lossy.lossy_options().delivery == "reliable":
            work = self.average(output, source)
            return Sending(work, lambda: np.zeros((self.world, 0), np.bool_))
        with self.delivery():
            told = self.lossy.reduce_scatter_blocks(output, source)
        return Sending(told, lambda: told.lost)

    def block_elements(self, flat: Tensor) -> int:
        """Elements of a block."""
        return 1 if self.lossy is None else self.lossy.block_bytes // flat.element_size()

    # ---- parameters ----

    def blocks(self, nbytes: int) -> int:
        """Packets that carry a chunk of ``nbytes``."""
        return 1 if self.lossy is None else self.lossy.blocks(nbytes)

    def gather(self, flat: Tensor, needed: Mask | None) -> Gathering:
        """Starts to send this rank's chunk of ``flat`` (world * n,) to all, in place; a packet that
        is lost leaves what was there. ``needed``: see :class:`.ages.Ages`.
        """
        if self.lossy is None:
            everything = np.ones((self.world, 1), np.bool_)
            return Gathering(self.copy(flat), lambda: everything)
        with self.delivery():
            work = self.lossy.all_gather_blocks(flat, needed)
        return Gathering(work, lambda: work.arrived)

    def copy(self, flat: Tensor) -> Work | None:
        """Starts to send this rank's chunk of ``flat`` to all, in place, and loses nothing."""
        if self.world == 1:
            return None
        own = flat.chunk(self.world)[self.rank].clone()
        with reliable():
            return dist.all_gather_single(flat, own, self.group, async_op=True)  # type: ignore[no-any-return]

    # ---- what steers, and is never lossy ----

    def broadcast(self, flat: Tensor) -> None:
        """``flat`` as rank 0 has it."""
        with reliable():
            dist.broadcast(flat, group=self.group, group_src=0)

    def combine(self, tensor: Tensor, op: Any) -> Work:
        """Starts to reduce ``tensor`` over the ranks, in place."""
        with reliable():
            return dist.all_reduce(tensor, op, self.group, async_op=True)  # type: ignore[no-any-return]

    def tell(self, value: object, to: int) -> list[Any] | None:
        """What each rank has passed, at rank ``to`` of the group; None elsewhere."""
        out: list[Any] | None = [None] * self.world if self.rank == to else None
        with reliable():
            dist.gather_object(value, out, group=self.group, group_dst=to)
        return out


def named(group: dist.ProcessGroup, rank: int) -> str:
    """A rank of ``group`` as errors write it."""
    known = group.lossy_stats().peers if isinstance(group, LossyProcessGroup) else ()
    return f"rank {rank} ({known[rank].address})" if known else f"rank {rank}"


def settle(works: Sequence[Work]) -> None:
    """Waits for all, also after one has failed; raises the first failure."""
    failure: Exception | None = None
    for work in works:
        try:
            work.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
