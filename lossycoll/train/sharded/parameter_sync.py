"""Sends parameters from their owners to all replicas.

A lost packet leaves the value that was there, and counts how old it is. What a step sends may still
be under way when the next forward pass begins (:mod:`.module_waits`): a bucket's parameters may be
read once :meth:`ParameterSync.finish` has returned, and written after :meth:`ParameterSync.close`.
Errors wait for :meth:`ParameterSync.settle`, which all ranks call at the same place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Parameter

from lossycoll.errors import LinkError
from lossycoll.train.common.collectives import BlockGather, Collectives, OnHost, wait_all
from lossycoll.train.common.delivery import rounded_to
from lossycoll.train.common.staleness import AUTO, MAX_AGE, Mask, Staleness, histogram

from .parameter_store import Shard
from .refusals import check_owners, owners_needed


@dataclass(frozen=True, slots=True)
class ShardedStats:
    """Counts over all steps at this rank, as :meth:`.ShardedOptimizer.stats` returns them.

    A block is the part of a rank's chunk of a bucket that one packet carries. Only blocks of
    parameters count, not of gradients.
    """

    steps: int = 0
    """Steps that were taken."""
    skipped: int = 0
    """Steps that no rank took because of NaN or infinity, without those that a GradScaler skips."""
    blocks: int = 0
    """Blocks that other ranks sent here."""
    stale: int = 0
    """Of ``blocks``, those that didn't arrive, so that the old values stayed."""
    repaired: int = 0
    """Of ``blocks``, those that were due by ``max_age``, and were resent until they arrived."""


TOO_MANY: Final = 0.02
"""Stale blocks up to this share have no measurable cost in quality, 4% and more do
(docs/quality.md)."""
ENOUGH: Final = 256  # blocks that an owner must have sent before its share is believed
MEMORY: Final = 1024  # blocks after which what came of others counts by 1/e: links change


class UndeliveredShare:
    """Undelivered share at one rank, by owner, of blocks that weren't needed."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._sent = np.zeros(world)
        self._missing = np.zeros(world)
        self._ever = np.zeros(world, np.int64)

    def note(self, needed: Mask | None, arrived: Mask) -> None:
        """Counts one bucket's blocks in one step, both bool (world, blocks)."""
        free = np.ones_like(arrived) if needed is None else ~needed
        free[self._rank] = False
        sent = free.sum(axis=1)
        fade = np.exp(-sent / MEMORY)
        self._sent = self._sent * fade + sent
        self._missing = self._missing * fade + (free & ~arrived).sum(axis=1)
        self._ever += sent

    def owners(self) -> NDArray[np.bool_]:
        """The owners whose share is above TOO_MANY, bool (world,)."""
        return (self._ever >= ENOUGH) & (self._missing > TOO_MANY * self._sent)


MOVE_EVERY: Final = 8
"""Steps. An anchor that is older makes differences larger, and so what rounding takes away; one
that is younger has more steps wait for all blocks."""


class ParameterDifferences:
    """One bucket's parameters in few bits: what travels is how far they are from an anchor.

    All replicas hold the same *anchor*, a copy of the parameters of some steps ago. An owner sends
    the rounded difference to it, and each replica holds the anchor plus what it got, the owner
    included. So a weight is rounded to a small part of what it has moved, and a lost difference
    leaves a stale value, since none builds on another. What rounding takes away is still owed: the
    owner's optimizer steps on the exact parameters. An anchor is moved to what every replica has
    got: each step where all blocks must come, else each MOVE_EVERY.
    """

    def __init__(self, shard: Shard, rank: int, encoding: str, per_block: int) -> None:
        self.encoding = encoding
        self._per_block = per_block
        self._flat = shard.flat
        self._anchor = shard.flat.clone()
        self.values = torch.zeros_like(shard.flat)
        """The differences, float32 (size,): what is sent, and received in place."""
        chunk = slice(rank * shard.bucket.chunk, (rank + 1) * shard.bucket.chunk)
        self._own, self._own_anchor = shard.flat[chunk], self._anchor[chunk]
        self._own_values = self.values[chunk]
        self._owed = torch.zeros_like(self._own)  # owner's parameters minus the replicas'

    def settle_owed(self) -> None:
        self._own.add_(self._owed)
        self._owed.zero_()

    def forget_owed(self) -> None:
        self._owed.zero_()

    def take(self) -> None:
        """The optimizer has stepped: what is sent, and held of it by all, is rounded now."""
        torch.sub(self._own, self._own_anchor, out=self._own_values)
        rounded_to(self._own_values, self._own_values, self.encoding, self._per_block)
        held = self._own_anchor + self._own_values
        torch.sub(self._own, held, out=self._owed)
        self._own.copy_(held)

    def apply(self) -> None:
        torch.add(self._anchor, self.values, out=self._flat)

    def move(self) -> None:
        """All replicas hold the same: that is the anchor from now on."""
        self._anchor.copy_(self._flat)
        self.values.zero_()


@dataclass(frozen=True, eq=False)
class _UnderWay:
    """Part of a bucket that the last step has sent."""

    gather: BlockGather
    needed: Mask | None  # blocks that are asked for until they come; None: none
    due: Mask | None  # blocks of them that are due by ``max_age``
    strict: NDArray[np.bool_] | None  # owners of whom no block may be stale
    moves: bool = False
    """Whether all blocks must come, and differences are to what comes from then on."""
    whole: bool = False  # whether parameters were sent, and no differences


@dataclass(eq=False)
class _BucketCopies:
    shard: Shard
    parameters: list[Parameter]
    staleness: Staleness
    differences: ParameterDifferences | None
    """Differences sent instead of parameters, where these travel in few bits."""
    versions: list[int]  # autograd's of the parameters, as this class has left them
    under_way: _UnderWay | None = None
    asked_for: BlockGather | None = None
    """A gather whose result is here. Others may still ask for this rank's part."""
    moves: bool = False
    """Whether the anchor is to be moved once nobody asks for this rank's part any more."""

    def was_written(self) -> bool:
        return self.versions != _versions(self.parameters)

    def touch(self) -> None:
        """Tells autograd that the parameters have changed."""
        torch.autograd.graph.increment_version(self.parameters)
        self.versions = _versions(self.parameters)


def _versions(parameters: Sequence[Parameter]) -> list[int]:
    return [parameter._version for parameter in parameters]


class ParameterSync:
    """Keeps the replicas of one optimizer's parameters together.

    ``max_age`` is the staleness bound; None: no bound. "auto": MAX_AGE, and 0 for owners with too
    large an undelivered share, which each rank finds for itself: a receiver asks for what it needs.
    """

    def __init__(self, collectives: Collectives, max_age: int | str | None) -> None:
        self._collectives = collectives
        self._undelivered: UndeliveredShare | None = None
        if max_age == AUTO:
            self._undelivered = UndeliveredShare(collectives.rank, collectives.world)
        self._max_age = MAX_AGE if isinstance(max_age, str) else max_age
        self._buckets: list[_BucketCopies] = []
        self._places: dict[Parameter, int] = {}  # the number of each parameter's bucket
        self._failure: Exception | None = None
        """The first error of a collective since the last step."""
        self._dead: LinkError | None = None
        """The first link since the last step of which a block was due and didn't arrive."""
        self._figures = ShardedStats()
        self._steps = 0  # since the anchors of differences were moved
        self._written = False  # whether replicas may hold something else than differences are to

    def add(self, model: Sequence[Parameter], shards: Sequence[Shard]) -> None:
        for shard in shards:
            here, rank, world = self._collectives, self._collectives.rank, self._collectives.world
            encoding, differences = here.difference_encoding(shard.flat), None
            if encoding != "same":
                per_block = here.block_elements(shard.flat, encoding)
                differences = ParameterDifferences(shard, rank, encoding, per_block)
            blocks = here.blocks(shard.bucket.chunk * shard.flat.element_size(), encoding)
            staleness = Staleness(rank, world, blocks, self._max_age)
            parameters = [model[member.index] for member in shard.bucket.members]
            self._places |= dict.fromkeys(parameters, len(self._buckets))
            versions = _versions(parameters)
            self._buckets.append(_BucketCopies(shard, parameters, staleness, differences, versions))

    @property
    def places(self) -> Mapping[Parameter, int]:
        return self._places

    @property
    def stats(self) -> ShardedStats:
        self.finish_all()
        return self._figures

    # ---- a step ----

    def was_written(self) -> bool:
        """True if replicas may hold something else than differences are to: somebody has written to
        parameters since the last step, or what was sent in it didn't arrive.
        """
        self._note_written()
        return self._written

    def _note_written(self) -> None:
        kept = [bucket for bucket in self._buckets if bucket.differences is not None]
        self._written = self._written or any(bucket.was_written() for bucket in kept)

    def settle_owed(self) -> None:
        self._note_written()
        for bucket in self._buckets:
            if bucket.differences is None:
                continue
            if bucket.was_written():
                bucket.differences.forget_owed()
            bucket.differences.settle_owed()

    def begin(self, *, whole: bool = False) -> None:
        """Starts to send every rank's chunk of every bucket to all, the first layers' first.

        With ``whole`` differences go as whole values, reliably: replicas may hold anything.
        """
        strict = None if self._undelivered is None else self._undelivered.owners()
        whole = whole or not self._collectives.rounds_parameters
        moves = not whole and (self._max_age == 0 or self._steps + 1 >= MOVE_EVERY)
        self._steps = 0 if moves or whole else self._steps + 1
        self._written = self._written and not whole
        # Buckets are in the order of the backward pass, and the next forward pass is the other way.
        for bucket in reversed(self._buckets):
            if bucket.differences is not None and whole:
                bucket.under_way = self._send_whole(bucket)
            else:
                bucket.under_way = self._send(bucket, strict, moves=moves)
            bucket.touch()  # the own part has changed
        self._figures = replace(self._figures, steps=self._figures.steps + 1)

    def _send(
        self,
        bucket: _BucketCopies,
        strict: NDArray[np.bool_] | None,
        *,
        moves: bool,
    ) -> _UnderWay:
        flat, encoding, kept = bucket.shard.flat, "same", bucket.differences
        if kept is not None:
            kept.take()
            flat, encoding = kept.values, kept.encoding
        moves = moves and kept is not None
        needed = due = bucket.staleness.needed(strict)
        if moves:
            needed = np.ones_like(bucket.staleness.values, np.bool_)
            needed[self._collectives.rank] = False
        with owners_needed():
            gather = self._collectives.all_gather_blocks(flat, needed, encoding)
        return _UnderWay(gather, needed, due, strict, moves)

    def _send_whole(self, bucket: _BucketCopies) -> _UnderWay:
        everything = np.ones_like(bucket.staleness.values, np.bool_)
        with owners_needed():
            work = self._collectives.all_gather_chunks(bucket.shard.flat)
        return _UnderWay(BlockGather(work, lambda: everything), None, None, None, whole=True)

    def finish(self, number: int) -> None:
        """Waits for what was sent of a bucket. Errors are kept for :meth:`settle`."""
        bucket = self._buckets[number]
        sent = bucket.under_way
        if sent is None:
            return
        try:
            with owners_needed():
                came = sent.gather.wait_result()
        except Exception as error:
            self._failure = self._failure or error
            self._written = self._written or bucket.differences is not None
            bucket.under_way = None
            return
        bucket.under_way, bucket.asked_for = None, sent.gather  # not before: see close()
        if bucket.differences is not None and not sent.whole:
            bucket.differences.apply()
        bucket.moves = sent.moves or sent.whole
        bucket.touch()
        self._count(sent.due, came)
        if self._undelivered is not None and not sent.whole:
            self._undelivered.note(sent.needed, came)
        bucket.staleness.advance(came)
        missing = None if sent.needed is None else sent.needed & ~came
        if missing is not None:
            missing[list(self._collectives.known_lost())] = False  # no link's fault
            if missing.any():
                self._dead = self._dead or self._dead_link(bucket.staleness, missing, sent)
                self._written = self._written or sent.moves  # this anchor is no other's

    def finish_all(self) -> None:
        for number in reversed(range(len(self._buckets))):
            self.finish(number)

    def close(self) -> None:
        """Waits for all buckets, and until nobody asks for this rank's parts any more."""
        self.finish_all()
        for bucket in self._buckets:
            if bucket.asked_for is None:
                continue
            try:
                with owners_needed():
                    bucket.asked_for.wait()
            except Exception as error:
                self._failure = self._failure or error
            bucket.asked_for = None  # not before: a wait may be interrupted, and made again
            if bucket.differences is not None and bucket.moves:
                bucket.differences.move()
                bucket.moves = False

    def settle(self) -> None:
        """Like :meth:`close`, and raise its failure; all ranks call it at the same place."""
        self.close()
        failure, self._failure = self._failure, None
        dead, self._dead = self._dead, None
        if failure is not None:
            raise failure
        check_owners(self._collectives)
        if dead is not None:
            raise dead

    # ---- between steps ----

    def synchronize(self) -> None:
        """Brings all chunks to all ranks, reliably."""
        self.close()
        self.settle_owed()
        self._written, self._steps = False, 0
        with owners_needed():
            # On the host: what comes next may be a checkpoint, which needs them to have come.
            wait_all([
                OnHost(self._collectives.all_gather_chunks(bucket.shard.flat))
                for bucket in self._buckets
            ])  # fmt: skip
        for bucket in self._buckets:
            bucket.touch()
            bucket.staleness.reset()
            if bucket.differences is not None:
                bucket.differences.move()

    def skip(self) -> None:
        self._figures = replace(self._figures, skipped=self._figures.skipped + 1)

    def ages(self) -> tuple[int, ...]:
        self.finish_all()
        return histogram((bucket.staleness for bucket in self._buckets), self._collectives.rank)

    def _count(self, needed: Mask | None, arrived: Mask) -> None:
        repaired = 0 if needed is None else int((needed & arrived).sum())
        self._figures = replace(
            self._figures,
            blocks=self._figures.blocks + arrived.size - arrived.shape[1],
            stale=self._figures.stale + int((~arrived).sum()),
            repaired=self._figures.repaired + repaired,
        )

    def _dead_link(self, staleness: Staleness, missing: Mask, sent: _UnderWay) -> LinkError:
        owner = int(missing.any(axis=1).argmax())
        all_due = sent.moves or (sent.strict is not None and sent.strict[owner])
        wanted = 0 if all_due else self._max_age
        return LinkError(
            f"{self._collectives}: parameters of {self._collectives.peer(owner)} are "
            f"{int(staleness.values[owner][missing[owner]].max())} steps old, wanted at most "
            f"{wanted} (max_age), and didn't arrive though they were asked for again: that "
            f"link is dead, or loses everything; repair it, or restart without that rank from the "
            f"last checkpoint",
            peer=owner,
        )
