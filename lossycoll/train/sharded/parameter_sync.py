"""Sends parameters from their owners to all replicas.

A lost packet leaves the value that was there, and counts how old it is. What a step sends may still
be under way when the next forward pass begins (:mod:`.module_waits`): a bucket's parameters may be
read once :meth:`ParameterSync.finish` has returned, and written after :meth:`ParameterSync.close`.
Errors wait for :meth:`ParameterSync.settle`, which all ranks call at the same place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Parameter

from lossycoll.errors import LinkError
from lossycoll.runtime.engine.packet_masks import existing
from lossycoll.train.common.collectives import BlockGather, check_all_took_part, wait_all
from lossycoll.train.common.delivery import Mask, rounded_to

from .parameter_store import REMEDY, ParameterStore, Shard, owners_needed
from .settings import AUTO


@dataclass(frozen=True, slots=True)
class ShardedStats:
    """Counts over all steps at this rank, as :meth:`.ShardedOptimizer.stats` returns them.

    A block is the part of a rank's chunk of a bucket that a full packet carries. Only blocks of
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


MAX_AGE: Final = 3
"""Of "auto", where a link delivers well. Of blocks, p^3 are repaired in a step: one in 1000 at 10%
loss, one in 16 at 40%. Less repairs so much that little is left of a lossy step, more lets the rare
old value weigh: with p^K shrinking so fast, what is gained from waiting longer soon is nothing."""
PROBE_EVERY: Final = 16
"""Share of an owner's blocks that needn't arrive: one in so many, another each step."""


class Staleness:
    """The ages of one bucket's blocks at one rank; its own have age 0.

    A block's age is the number of steps since it last arrived from its owner: 0 if the last step's
    arrived. With independent loss p the age is k with probability (1 - p) p^k. "Distributed
    Training under Packet Loss" (Weintraub, Banner, Orda, arXiv 2507.07114) keeps a stale value
    however old; the bound is ours.
    """

    def __init__(self, rank: int, blocks: Sequence[int], max_age: int | None) -> None:
        """``blocks``: how many each owner has."""
        self._rank = rank
        self._max_age = max_age
        self._probes = np.arange(max(blocks)) % PROBE_EVERY
        self._steps = 0
        self.of_others: Mask = existing(blocks, 1)
        """The blocks that other ranks send here, bool (world, blocks), by owner."""
        self.of_others[rank] = False
        self.values = np.zeros_like(self.of_others, np.int32)  # steps, by owner

    def needed(self, strict: NDArray[np.bool_] | None = None) -> Mask | None:
        """The blocks, bool (world, blocks), that the next step must bring; None: none.

        Of the owners in ``strict``, bool (world,), these are all blocks but a sample.
        """
        if self._max_age is None:
            return None
        mask: Mask = self.values >= self._max_age
        if strict is not None and strict.any():
            mask |= strict[:, None] & (self._probes != self._steps % PROBE_EVERY)
        mask &= self.of_others
        return mask if mask.any() else None

    def advance(self, arrived: Mask) -> None:
        self._steps += 1
        self.values += 1
        self.values[arrived] = 0
        self.values[self._rank] = 0


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

    def note(self, free: Mask, arrived: Mask) -> None:
        """Counts one bucket's blocks in one step, both bool (world, blocks): those that needn't
        arrive, and those that did."""
        free = free.copy()
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

    def __init__(self, shard: Shard, encoding: str, per_block: int) -> None:
        self.encoding = encoding
        self._per_block = per_block
        self._flat = shard.flat
        self._anchor = shard.flat.clone()
        self.values = torch.zeros_like(shard.flat)
        """The differences, float32 (size,): what is sent, and received in place."""
        chunk = shard.chunk
        self._own, self._own_anchor = shard.flat[chunk], self._anchor[chunk]
        self._own_values = self.values[chunk]
        self._owed = torch.zeros_like(self._own)  # owner's parameters minus the replicas'

    def settle_owed(self, *, forget: bool) -> None:
        if not forget:
            self._own.add_(self._owed)
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


@dataclass(eq=False)
class _Sent:
    """Part of a bucket that the last step has sent, until nobody asks for it any more."""

    gather: BlockGather
    needed: Mask | None = None  # blocks that are asked for until they come; None: none
    due: Mask | None = None  # blocks of them that are due by ``max_age``
    strict: NDArray[np.bool_] | None = None  # owners of whom no block may be stale
    moves: bool = False
    """Whether all blocks must come, and differences are to what comes from then on."""
    whole: bool = False  # whether parameters were sent, and no differences
    is_here: bool = False  # whether the result was taken; others may still ask for this rank's part


@dataclass(eq=False)
class _BucketCopies:
    shard: Shard
    parameters: list[Parameter]
    staleness: Staleness
    differences: ParameterDifferences | None
    """Differences sent instead of parameters, where these travel in few bits."""
    versions: list[int]  # autograd's of the parameters, as this class has left them
    sent: _Sent | None = None

    def was_written(self) -> bool:
        return self.versions != [parameter._version for parameter in self.parameters]

    def touch(self) -> None:
        """Tells autograd that the parameters have changed."""
        torch.autograd.graph.increment_version(self.parameters)
        self.versions = [parameter._version for parameter in self.parameters]


class ParameterSync:
    """Keeps the replicas of a store's parameters together.

    ``max_age`` is the staleness bound; None: no bound. "auto": MAX_AGE, and 0 for owners with too
    large an undelivered share, which each rank finds for itself: a receiver asks for what it needs.
    """

    def __init__(self, store: ParameterStore, max_age: int | str | None) -> None:
        self._collectives = collectives = store.collectives
        self._undelivered: UndeliveredShare | None = None
        if max_age == AUTO:
            self._undelivered = UndeliveredShare(collectives.rank, collectives.world)
        self._max_age = MAX_AGE if isinstance(max_age, str) else max_age
        self._buckets: list[_BucketCopies] = []
        self.places: dict[Parameter, int] = {}  # the number of each parameter's bucket
        self._failure: Exception | None = None
        """The first error of a collective since the last step."""
        self._dead: LinkError | None = None
        """The first link since the last step of which a block was due and didn't arrive."""
        self._counts: Counter[str] = Counter()  # those of ShardedStats, by name
        self._steps = 0  # since the anchors of differences were moved
        self._written = False  # whether replicas may hold something else than differences are to

    def add(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            here, itemsize = self._collectives, shard.flat.element_size()
            encoding, differences = here.difference_encoding(shard.flat), None
            if encoding != "same":
                per_block = here.block_elements(shard.flat, encoding)
                differences = ParameterDifferences(shard, encoding, per_block)
            blocks = [here.blocks(count * itemsize, encoding) for count in shard.bucket.counts]
            staleness = Staleness(here.rank, blocks, self._max_age)
            parameters = [place.parameter for place in shard.places]
            self.places |= dict.fromkeys(parameters, len(self._buckets))
            versions = [parameter._version for parameter in parameters]
            self._buckets.append(_BucketCopies(shard, parameters, staleness, differences, versions))

    @property
    def stats(self) -> ShardedStats:
        self.finish_all()
        return ShardedStats(**self._counts)

    # ---- a step ----

    def was_written(self) -> bool:
        """True if replicas may hold something else than differences are to: somebody has written to
        parameters since the last step, or what was sent in it didn't arrive.
        """
        kept = (bucket for bucket in self._buckets if bucket.differences is not None)
        self._written = self._written or any(bucket.was_written() for bucket in kept)
        return self._written

    def settle_owed(self) -> None:
        self.was_written()
        for bucket in self._buckets:
            if bucket.differences is not None:
                bucket.differences.settle_owed(forget=bucket.was_written())

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
            with owners_needed():
                bucket.sent = self._send(bucket, strict, moves=moves, whole=whole)
            bucket.touch()  # the own part has changed
        self._counts["steps"] += 1

    def _send(
        self, bucket: _BucketCopies, strict: NDArray[np.bool_] | None, *, moves: bool, whole: bool
    ) -> _Sent:
        flat, encoding, kept = bucket.shard.flat, "same", bucket.differences
        if kept is None:
            moves = False
        elif whole:
            everything = np.ones_like(bucket.staleness.values, np.bool_)
            work = self._collectives.all_gather_chunks(flat, bucket.shard.bucket.counts)
            return _Sent(BlockGather(work, lambda: everything), moves=True, whole=True)
        else:
            kept.take()
            flat, encoding = kept.values, kept.encoding
        needed = due = bucket.staleness.needed(strict)
        if moves:
            needed = bucket.staleness.of_others
        counts = bucket.shard.bucket.counts
        gather = self._collectives.all_gather_blocks(flat, needed, encoding, counts)
        return _Sent(gather, needed, due, strict, moves)

    def finish(self, number: int) -> None:
        """Waits for what was sent of a bucket. Errors are kept for :meth:`settle`."""
        bucket = self._buckets[number]
        sent = bucket.sent
        if sent is None or sent.is_here:
            return
        try:
            came = sent.gather.wait_result()
        except Exception as error:
            self._failure = self._failure or error
            self._written = self._written or bucket.differences is not None
            bucket.sent = None
            return
        sent.is_here = True  # not before: a wait may be interrupted, and made again
        if bucket.differences is not None and not sent.whole:
            bucket.differences.apply()
        bucket.touch()
        of_others = bucket.staleness.of_others
        self._counts.update(
            blocks=int(of_others.sum()),
            stale=int((~came).sum()),
            repaired=0 if sent.due is None else int((sent.due & came).sum()),
        )
        if self._undelivered is not None and not sent.whole:
            free = of_others if sent.needed is None else of_others & ~sent.needed
            self._undelivered.note(free, came)
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
            if bucket.sent is None:
                continue
            try:
                bucket.sent.gather.wait()
            except Exception as error:
                self._failure = self._failure or error
            sent, bucket.sent = bucket.sent, None  # as above
            if bucket.differences is not None and sent.moves:
                bucket.differences.move()

    def settle(self) -> None:
        """Like :meth:`close`, and raise its failure; all ranks call it at the same place."""
        self.close()
        failure, self._failure = self._failure, None
        dead, self._dead = self._dead, None
        if failure is not None:
            with owners_needed():
                raise failure
        check_all_took_part(self._collectives, REMEDY)
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
            gathers = [
                self._collectives.all_gather_chunks(b.shard.flat, b.shard.bucket.counts)
                for b in self._buckets
            ]
            wait_all(gathers, on_host=True)
        for bucket in self._buckets:
            bucket.touch()
            bucket.staleness.values[:] = 0
            if bucket.differences is not None:
                bucket.differences.move()

    def skip(self) -> None:
        self._counts["skipped"] += 1

    def ages(self) -> tuple[int, ...]:
        """The numbers of other ranks' blocks of age 0, 1, ..., over all buckets."""
        self.finish_all()
        ages = [b.staleness.values[b.staleness.of_others] for b in self._buckets]
        return tuple(np.bincount(np.concatenate(ages)).tolist()) if ages else ()

    def _dead_link(self, staleness: Staleness, missing: Mask, sent: _Sent) -> LinkError:
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
