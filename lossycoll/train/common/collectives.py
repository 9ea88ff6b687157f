"""Collectives as ``train/`` asks for them: over a lossy group, one of another backend, or no group.

No other module of ``train/`` sends or receives anything, except where torch itself does (the
collectives of DDP). Only a lossy group ever loses a packet: another backend's collectives are
reliable, and a group of one rank needs none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.backend.process_group import LossyProcessGroup
from lossycoll.backend.work import LossyWork
from lossycoll.errors import PeerLostError, UnsupportedError
from lossycoll.options.scopes import lossy, reliable
from lossycoll.plan import codec

from .delivery import (
    FP16,
    NOT_ASKED,
    NOTHING_ASKED,
    Mask,
    Recovery,
    Wire,
    as_elements,
    missed_by_rounding,
)

ATTEMPTS: Final = 8


class Work(Protocol):
    """A collective that may be under way."""

    def wait(self) -> Any: ...


def extremes(number: int, shard: Any) -> tuple[int, int]:
    """Least and greatest of the numbers of all ranks that have a shard of a DTensor's."""
    found = torch.tensor([-number, number], device=shard.device)
    for group in shard.device_mesh.get_all_groups():
        with reliable():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    least, greatest = found.tolist()
    return -least, greatest


@dataclass(frozen=True, eq=False)
class BlockGather:
    """An all-gather that may lose blocks. :meth:`wait` returns which ones arrived."""

    _work: Work
    _arrived: Callable[[], Mask]

    def wait(self) -> Mask:
        """bool (world, blocks): True where the block that the owner sent is in the result."""
        self._work.wait()
        return self._arrived()

    def wait_result(self) -> Mask:
        """Wait as :meth:`wait` does, but only until the result can be read. This rank's chunk may
        still be asked for, so no chunk may be written until :meth:`wait` has returned.
        """
        if isinstance(self._work, LossyWork):
            self._work.wait_result()
        else:
            self._work.wait()
        return self._arrived()


@dataclass(frozen=True, eq=False)
class ReportedMean:
    """A mean whose senders learn what of their contributions isn't in it."""

    _work: Work
    _missed: Callable[[], Tensor | None]

    def wait(self) -> None:
        self._work.wait()

    @property
    def missed(self) -> Tensor | None:
        """What of this rank's contribution (world * n,) was lost or rounded off; None: nothing."""
        self.wait()
        return self._missed()


class Complete:
    def wait(self) -> None: ...


def wait_all(works: Sequence[Work], *, on_host: bool = False) -> None:
    """Waits for all, also after one has failed; raises the first failure. ``on_host``: on the host,
    wherever their tensors lie."""
    failure: Exception | None = None
    for work in works:
        try:
            if on_host and isinstance(work, LossyWork):
                work.wait_on_host()
            else:
                work.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def check_all_took_part(collectives: Collectives, remedy: str) -> None:
    """Raises PeerLostError, on all ranks alike, if one took no part in the last collective."""
    if lost := collectives.agreed_lost():
        who = ", ".join(map(collectives.peer, lost))
        raise PeerLostError(f"{collectives}: lost {who}. {remedy}", peer=lost[0])


def own_group(group: object) -> dist.ProcessGroup:
    """The group to work in; None is the default group. UnsupportedError: this rank isn't in it."""
    found = dist.group.WORLD if group is None else group
    if isinstance(found, dist.ProcessGroup):
        return found
    if not dist.is_initialized():
        raise UnsupportedError(
            "there is no process group; call torch.distributed.init_process_group first"
        )
    here = f"rank {dist.get_rank()}/{dist.get_world_size()}"
    if found == dist.GroupMember.NON_GROUP_MEMBER:
        raise UnsupportedError(
            f"{here}: this rank isn't in the group that was passed (new_group has given it "
            f"GroupMember.NON_GROUP_MEMBER); call this on the ranks of that group only"
        )
    raise UnsupportedError(f"{here}: group is {found!r}, wanted a ProcessGroup or None")


class Collectives:
    """The collectives of one process group, as the methods of training use them.

    A method that returns a :class:`Work` only starts its collective; any other is complete when it
    returns. Sums of gradients, reductions to owners and gathers of blocks may lose packets, all
    others are reliable. With ``optional`` a process without a process group works as a single rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        recovery: Recovery = NOTHING_ASKED,
        optional: bool = False,
        wire: Wire = NOT_ASKED,
    ) -> None:
        exists = group is not None or (dist.is_available() and dist.is_initialized())
        found = own_group(group) if exists or not optional else None
        self._group = found
        self.rank = 0 if found is None else dist.get_rank(found)
        self.world = 1 if found is None else dist.get_world_size(found)
        self.lossy = found if isinstance(found, LossyProcessGroup) else None
        self._recovery = recovery
        self._wire = wire

    def __str__(self) -> str:
        return f"rank {self.rank}/{self.world}"

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Raises UnsupportedError where there is none."""
        return own_group(None) if self._group is None else self._group

    def peer(self, rank: int) -> str:
        """A rank of the group as errors write it: its number, and its address if known."""
        known = self.lossy.lossy_stats().peers if self.lossy is not None else ()
        return f"rank {rank} ({known[rank].address})" if known else f"rank {rank}"

    # ---- lost ranks ----

    def agreed_lost(self) -> tuple[int, ...]:
        """Ranks that took no part in the group's last collective, the same on all ranks.

        A decision about the next collective goes by this. By what one rank happens to know, that
        rank would raise, and another that has already begun the next collective would wait for it.
        """
        return () if self.lossy is None else self.lossy.lossy_lost_alike()

    def known_lost(self) -> tuple[int, ...]:
        """Ranks that this rank knows to be lost, maybe before others do."""
        return () if self.lossy is None else self.lossy.lossy_lost()

    @property
    def survivors(self) -> int:
        """The number of ranks that took part in the last collective, the same on all ranks."""
        return self.world - len(self.agreed_lost())

    def continues_after(self, error: PeerLostError) -> bool:
        """True if the group continues with the survivors of a loss; False: the error is its end."""
        return error.peer in self.known_lost()

    # ---- what may lose packets ----

    @property
    def may_lose(self) -> bool:
        """True if a collective that starts now may lose packets; the same on all ranks."""
        found = self.lossy
        return found is not None and self.world > 1 and not self._reliable_now(found)

    def delivery(self, gradient: Tensor | None = None) -> contextlib.AbstractContextManager[None]:
        """The scope in which parameters, and gradients such as ``gradient``, are sent."""
        asked = self._wire.asked_of_gradients
        is_asked = asked is not None and gradient is not None and gradient.dtype is torch.float32
        wire = {"wire": asked} if is_asked else {}
        if self.lossy is None:
            return contextlib.nullcontext()
        if self._reliable_now(self.lossy):
            # Not reliable() without wire, in which nothing is encoded.
            return reliable(lossy_min_bytes=0, **wire) if wire else contextlib.nullcontext()
        changes = self._recovery.changes(self.lossy.lossy_options())
        return lossy(lossy_min_bytes=0, **changes, **wire)

    @property
    def resends_nothing(self) -> bool:
        """True if a bounded share of what a lossy call sends is missing, and nothing is resent."""
        if self.lossy is None:
            return False
        with self.delivery():
            return self.lossy.lossy_options().by_parity_alone

    def owners(self, nbytes: int) -> int:
        """Number of ranks that should own a buffer of so many bytes, whose owners never change."""
        if self.lossy is None or self.world == 1:
            return self.world
        with self.delivery():
            return self.lossy.lossy_owners(nbytes)

    def reduce_scatter_mean(
        self, output: Tensor, source: Tensor, counts: Sequence[int] | None = None
    ) -> Work:
        """Starts the mean over the ranks, unbiased under loss, of which each rank gets its chunk.

        ``output`` is this rank's chunk, float (n,); ``source`` has those of all ranks in a row, and
        may be overwritten. ``counts``: elements of each rank's chunk; None: all have as many.
        """
        op = dist.ReduceOp.AVG
        if self.lossy is None:
            # Other backends form sums, in which 16-bit types could overflow.
            op = dist.ReduceOp.SUM
            source.div_(self.world)
        with self.delivery(source):
            if (sizes := _differing(counts)) is not None:
                parts = list(torch.split(source, sizes))
                return dist.reduce_scatter(output, parts, op, self.group, async_op=True)  # type: ignore[no-any-return]
            return dist.reduce_scatter_single(output, source, op, self.group, async_op=True)  # type: ignore[no-any-return]

    def reduce_scatter_reported(self, output: Tensor, source: Tensor) -> ReportedMean:
        """Like :meth:`reduce_scatter_mean`, but lost packets count as zero and are reported.

        The work knows what was lost or rounded off of ``source``, as it is then.
        """
        encoding = self.gradient_encoding(source)
        group = self.lossy
        if group is None or (encoding == "same" and self._reliable_now(group)):
            return ReportedMean(self.reduce_scatter_mean(output, source), lambda: None)
        with self.delivery():
            reported = group.reduce_scatter_blocks(output, source, encoding)

        def missed() -> Tensor | None:
            lost, per_block = reported.lost, reported.block_bytes // source.element_size()
            if encoding != "same":
                return missed_by_rounding(source, lost, reported.sent, per_block, encoding)
            if not lost.any():
                return None
            mask = as_elements(lost, per_block, len(output), source.device)
            return torch.where(mask, source, source.new_zeros(()))

        return ReportedMean(reported, missed)

    def all_reduce_gradients(self, flat: Tensor) -> Work:
        """Starts to sum (n,) gradients over the ranks, in place, with the delivery in force."""
        if self._group is None:
            return Complete()
        return dist.all_reduce(flat, group=self._group, async_op=True)  # type: ignore[no-any-return]

    def all_gather_blocks(
        self,
        flat: Tensor,
        needed: Mask | None = None,
        encoding: str = "same",
        counts: Sequence[int] | None = None,
    ) -> BlockGather:
        """Starts to send this rank's chunk of ``flat`` to all; what is lost stays as it was.

        ``needed``, bool (world, blocks), are resent until they arrive. The work knows which blocks
        arrived as a whole. ``counts``: elements of each rank's chunk; None: all have as many.
        """
        if self.lossy is None:
            everything = np.ones((self.world, 1), np.bool_)
            return BlockGather(self.all_gather_chunks(flat), lambda: everything)
        with self.delivery():
            work = self.lossy.all_gather_blocks(flat, needed, encoding, _differing(counts))
        return BlockGather(work, lambda: work.arrived_result)

    def blocks(self, nbytes: int, encoding: str = "same") -> int:
        return 1 if self.lossy is None else self.lossy.blocks(nbytes, encoding)

    def block_elements(self, flat: Tensor, encoding: str = "same") -> int:
        if self.lossy is None:
            return 1
        if encoding != "same":
            return self.lossy.block_elements(encoding)
        return self.lossy.block_bytes // flat.element_size()

    # ---- how it travels ----

    def gradient_encoding(self, flat: Tensor) -> str:
        """The codec's name for a gradient of which the rank knows what is rounded off.

        "same" for what isn't float32, or doesn't leave the host.
        """
        asked = self._wire.asked_of_gradients
        if asked is None and self.lossy is not None:
            asked, _, _ = self.lossy.lossy_options().wire.partition("/")
        return self._encoding(flat, asked or "same")

    @property
    def rounds_parameters(self) -> bool:
        """True if parameters may travel encoded now: not in a scope such as ``reliable()``."""
        return self._wire.asked_of_parameters != "same"

    def difference_encoding(self, flat: Tensor) -> str:
        """Like :meth:`parameter_encoding`, whatever the scope around."""
        return self._encoding(flat, self._wire.parameters)

    def parameter_encoding(self, flat: Tensor) -> str:
        """The codec's name for parameters; "same" for what isn't float32, or doesn't leave the
        host."""
        return self._encoding(flat, self._wire.asked_of_parameters)

    def _encoding(self, flat: Tensor, asked: str) -> str:
        group, can = self.lossy, flat.dtype is torch.float32
        if group is None or self.world == 1 or asked in ("same", FP16) or not can:
            return "same"
        if group.lossy_topology().one_host:
            return "same"
        # Rounded to the nearest, so that the sender knows what arrives.
        options = group.lossy_options()
        return codec.named(asked, options.wire_group, options.wire_spikes)

    # ---- what is reliable ----

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Work:
        if self.world == 1:
            return Complete()
        with reliable():
            return dist.all_reduce(tensor, op, self.group, async_op=True)  # type: ignore[no-any-return]

    def all_gather_chunks(self, flat: Tensor, counts: Sequence[int] | None = None) -> Work:
        """Starts to send this rank's chunk of ``flat`` to all, in place; reliable.

        ``counts``: elements of each rank's chunk; None: all have as many.
        """
        if self.world == 1:
            return Complete()
        if (sizes := _differing(counts)) is not None:
            parts = list(torch.split(flat, sizes))
            with reliable():
                return dist.all_gather(parts, parts[self.rank].clone(), self.group, async_op=True)  # type: ignore[no-any-return]
        own = flat.chunk(self.world)[self.rank].clone()
        with reliable():
            return dist.all_gather_single(flat, own, self.group, async_op=True)  # type: ignore[no-any-return]

    def all_gather(self, row: Tensor) -> Tensor:
        if self._group is None:
            return row.clone().view(1, -1)
        out = row.new_empty(self.world * len(row))
        with reliable():
            dist.all_gather_single(out, row, self._group)
        return out.view(self.world, -1)

    def all_gather_parameters(self, row: Tensor) -> Tensor:
        """Like :meth:`all_gather`, but encoded; equal bits need a row that was rounded before."""
        if self.parameter_encoding(row) == "same":
            return self.all_gather(row)
        out = row.new_empty(self.world * len(row))
        with reliable(wire=self._wire.parameters, wire_rounding="nearest", lossy_min_bytes=0):
            dist.all_gather_single(out, row, self.group)
        return out.view(self.world, -1)

    def summed(self, tensor: Tensor) -> Tensor:
        self.all_reduce(tensor).wait()
        return tensor

    def broadcast(self, flat: Tensor) -> None:
        with reliable():
            dist.broadcast(flat, group=self.group, group_src=0)

    def gather_objects(self, value: object, to: int) -> list[Any] | None:
        out: list[Any] | None = [None] * self.world if self.rank == to else None
        with reliable():
            dist.gather_object(value, out, group=self.group, group_dst=to)
        return out

    def _reliable_now(self, group: LossyProcessGroup) -> bool:
        return group.lossy_options().delivery == "reliable"


def _differing(counts: Sequence[int] | None) -> list[int] | None:
    """``counts`` if they differ, None if all chunks have as many elements."""
    return list(counts) if counts is not None and len(set(counts)) > 1 else None


def formed_alike(
    groups: Sequence[Collectives],
    device: torch.device,
    form: Callable[[], Tensor],
    what: str,
    first: tuple[Tensor, Sequence[int]] | None = None,
) -> Tensor:
    """What ``form`` returns, the same on all ranks of the groups.

    It is formed again, by all ranks, where one was lost meanwhile: some may have been with it and
    others without. ``first``: what was formed already, and each group's survivors before that.
    ``what`` ends the PeerLostError of ranks that were lost each time.
    """
    lossy = [each.lossy for each in groups if each.lossy is not None and each.world > 1]
    if not any(group.lossy_options().continues for group in lossy):
        return form() if first is None else first[0]

    def survivors() -> list[int]:
        # A rank may be one call ahead of another that has heard of a loss, but not two.
        for each in groups:
            for _ in range(2):
                each.summed(torch.ones(1, device=device))
        return [each.survivors for each in groups]

    before = survivors() if first is None else first[1]
    for attempt in range(ATTEMPTS):
        found = form() if attempt or first is None else first[0]
        after = survivors()
        if after == before:
            return found
        before = after
    raise PeerLostError(f"{groups[0]}: ranks were lost during each of {ATTEMPTS} attempts {what}")


def sum_of(tensor: Tensor, group: dist.ProcessGroup | None) -> torch.futures.Future[Tensor]:
    """Starts to sum a tensor over the ranks; returns what a communication hook of DDP returns."""
    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
    out: torch.futures.Future[Tensor] = work.get_future().then(lambda f: f.value()[0])
    return out
