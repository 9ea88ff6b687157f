"""Gradients on their way: from the backward pass, bucket by bucket, to their owners.

Every rank issues the same collectives in the same order, whatever its model did: each bucket once
for each backward pass, in order, then the status. A bucket starts when all of its gradients and all
buckets before it are there; when the pass ends, whatever hasn't started does. Where several
reducers share the group, all buckets start then (:mod:`.roster`).
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from lossycoll.errors import PeerLostError, TrainingError, UnsupportedError
from lossycoll.train.common.collectives import Exchange, Sending, Work, settle
from lossycoll.train.common.grad_stamp import Mark

from .compression import Compressor
from .error_feedback import Residue
from .reducer_order import roster_of
from .shard import Shard

_NESTED: Final = BackwardCFunction.apply.__code__


class Status:
    """What all ranks know of a backward pass: who had gradients that aren't numbers, and which
    parameters had one at all, by index."""

    def __init__(self, world: int, count: int) -> None:
        self.flags = torch.zeros(world + count, dtype=torch.uint8)
        self._world = world

    def note_used(self, index: int) -> None:
        self.flags[self._world + index] = 1

    def note_bad(self, rank: int) -> None:
        self.flags[rank] = 1

    @property
    def bad(self) -> tuple[int, ...]:
        """The ranks whose own gradients hold NaN or infinity."""
        return tuple(self.flags[: self._world].nonzero().flatten().tolist())

    @property
    def used(self) -> list[bool]:
        """By parameter, whether any rank had a gradient of it."""
        return [bool(flag) for flag in self.flags[self._world :].tolist()]


class Reducer:
    """``shards`` and ``model`` may grow between backward passes (:meth:`watch`).

    ``name``: how errors call a parameter, by index. ``finished`` is called when a pass has been
    reduced. ``feedback``: what is lost (:meth:`keep_lost`) is sent again with the next pass.
    ``compression``: what buckets are sent by instead.
    """

    def __init__(
        self,
        exchange: Exchange,
        name: Callable[[int], str],
        finished: Callable[[Status], None],
        *,
        feedback: bool = False,
        compression: Compressor | None = None,
    ) -> None:
        self._exchange = exchange
        self._compression = compression
        self.feedback = feedback
        self._scale = 1.0
        """That a GradScaler is expected to have in the next pass."""
        self._residues: list[Residue] = []
        self._sendings: list[Sending] = []
        self._name = name
        self._finished = weakref.WeakMethod(finished)  # or it would live until cycles are collected
        self._model: list[Parameter] = []
        self._shards: list[Shard] = []
        self._place: dict[int, tuple[int, int]] = {}
        """By parameter: its bucket, and its place there."""
        self._sync = True
        self._armed: int | None = None
        """The pass (autograd's number of it) that calls back at its end."""
        self._open = False
        self._seen: set[int] = set()
        self._missing: list[int] = []
        self._works: list[Work] = []
        self._status = Status(exchange.world, 0)
        self._left: dict[int, Mark] = {}
        """By parameter, the gradient that was sent, as it was then."""
        self._roster = roster_of(exchange.group)

    def join(self) -> None:
        """Takes its place among the group's reducers. All ranks must call this."""
        self._roster.join(self, self._exchange)

    def watch(self, model: Sequence[Parameter], shards: Sequence[Shard]) -> None:
        """``model``: parameters from the next index on; ``shards``: buckets from the next on."""
        first = len(self._shards)
        # What isn't in the last pass has no gradient there.
        for index in range(len(self._model), len(self._model) + len(model)):
            self._left[index] = Mark(None)
        self._model += model
        self._shards += shards
        if self.feedback:
            self._residues += [Residue(shard.bucket, shard.grads) for shard in shards]
        for number, shard in enumerate(shards, first):
            for position, member in enumerate(shard.bucket.members):
                self._place[member.index] = (number, position)
                hook = _Hook(weakref.ref(self), member.index)
                self._model[member.index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block whose backward passes only add to ``grad``."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # ---- a backward pass ----

    @torch.no_grad()
    def ready(self, index: int) -> None:
        """The gradient of parameter ``index`` is complete; from within the backward pass."""
        bucket, position = self._place[index]
        if not self._sync or not self._shards[bucket].holds(position, self._model[index]):
            return  # another optimizer has it now; step() tells whoever doesn't know
        task = torch._C._current_graph_task_id()
        if self._open and self._armed not in (None, task) and not _is_nested():
            self.finish()  # the pass before this one raised
        if self._compression is not None and not self._open:
            self._compression.begin()
        if self._armed is None:
            self._armed = task
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(_End(weakref.ref(self)))
        if not self._open:
            self._begin()
        if bucket < len(self._works):
            raise TrainingError(
                f"{self._exchange}: {self._name(index)} got its gradient in two parts during one "
                f"backward pass, the second after its bucket had been sent; is it used inside "
                f"and outside of a checkpointed block? use_reentrant=False makes it one part"
            )
        self._copy(index)
        if index not in self._seen:
            self._seen.add(index)
            self._missing[bucket] -= 1
        if not self._roster.is_single:
            return
        with self._exchange.owners_needed():
            while len(self._works) < len(self._shards) and not self._missing[len(self._works)]:
                self._launch()

    def end(self) -> None:
        """The pass that :meth:`ready` was called from is over."""
        if _is_nested():
            self._armed = None  # the pass around it goes on, and calls back for itself
        elif self._open:
            self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Sends the gradients as they are, with zeros for those that there aren't; and those of the
        group's other reducers that the pass has touched."""
        with self._exchange.owners_needed():
            self._roster.finish(self, self._exchange)

    @property
    def is_open(self) -> bool:
        """Whether a pass has begun that isn't over."""
        return self._open

    @property
    def is_used(self) -> bool:
        """Whether not all of its parameters have been given to another optimizer."""
        found = True
        for shard in self._shards:
            for position, member in enumerate(shard.bucket.members):
                if member.begin < member.end:
                    found = shard.holds(position, self._model[member.index])
                    if found:
                        return True
        return found

    def send(self) -> None:
        """Starts whatever hasn't started, and waits."""
        if not self._open:
            self._begin()
        try:
            with self._exchange.owners_needed():
                self._launch_rest()
                if self._compression is not None:
                    settle(self._works)  # before anything else is sent, on all ranks
                    self._compression.end()
                self._combine_status()
        finally:
            self._open, self._armed = False, None
        finished = self._finished()
        if finished is not None:
            finished(self._status)

    def _combine_status(self) -> None:
        work = self._exchange.combine(self._status.flags, dist.ReduceOp.MAX)
        try:
            settle([*self._works, work])
        except PeerLostError as error:
            if not self._exchange.goes_on_without(error):
                raise
            # Others may have all of what the dead one told, and go on: so does this rank, with
            # flags of its own, up to the check that all of them fail.
        self._exchange.check_owners()

    def _launch_rest(self) -> None:
        while len(self._works) < len(self._shards):
            shard = self._shards[len(self._works)]
            for member, view in zip(shard.bucket.members, shard.views, strict=True):
                if member.index in self._seen:
                    continue
                if self._model[member.index].grad is None:
                    self._left[member.index] = Mark(None)
                    view.zero_()
                else:
                    self._copy(member.index)
                    self._seen.add(member.index)
            self._launch()

    def abandon(self) -> None:
        """Ends a pass that raised, so that this rank has issued what the others have."""
        if self._open:
            self.finish()

    def forget(self) -> None:
        """The gradients of the last pass are no longer wanted."""
        self._left = {}
        if self._compression is not None:
            self._compression.forget()

    def changed(self) -> int | None:
        """The first parameter whose ``grad`` isn't what the last pass has sent."""
        for index, mark in sorted(self._left.items()):
            if not mark.fits(self._model[index].grad):
                return index
        return None

    @torch.no_grad()
    def keep_lost(self, scale: float) -> None:
        """A step was taken with the last pass: what it lost is to come with the next. ``scale``:
        what the gradients of the pass have been divided by since."""
        if self._compression is not None:
            self._compression.forget()
        for shard, residue, sending in zip(
            self._shards, self._residues, self._sendings, strict=False
        ):
            present = {i for i, m in enumerate(shard.bucket.members) if m.index in self._seen}
            per_block = self._exchange.block_elements(shard.grads)
            residue.keep(shard.grads, sending.lost, per_block, present, (self._scale, scale))
        self._sendings = []
        self._scale = scale

    def rescale(self, scale: float) -> None:
        """What was lost is sent with this scale from the next pass on."""
        self._scale = scale

    def lost(self) -> list[Tensor]:
        """What is still to be sent again, by bucket, float[size]; none without feedback."""
        return [residue.kept() for residue in self._residues]

    @torch.no_grad()
    def replace_lost(self, lost: Mapping[int, Tensor]) -> None:
        """Another training is gone on with, of which ``lost`` is to be sent again, by index."""
        self._sendings = []
        for residue in self._residues:
            residue.replace(lost)

    def residue(self) -> float:
        """L2 norm of what is still to be sent again."""
        return math.hypot(*(residue.norm() for residue in self._residues))

    def _begin(self) -> None:
        self._sendings = []
        self._open = True
        self._seen = set()
        self._missing = [len(shard.bucket.members) for shard in self._shards]
        self._works = []
        self._left = {}
        self._status = Status(self._exchange.world, len(self._model))

    def _copy(self, index: int) -> None:
        grad = self._model[index].grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise UnsupportedError(
                f"{self._exchange}: the gradient of {self._name(index)} is {grad.layout}, but "
                f"only dense ones can be sharded; make the embedding with sparse=False"
            )
        bucket, position = self._place[index]
        view = self._shards[bucket].views[position]
        view.copy_(grad)
        self._left[index] = Mark(grad)  # what hooks change from here on isn't sent
        if self.feedback:
            self._residues[bucket].add_to(view, position, self._scale)
        self._status.note_used(index)

    def _launch(self) -> None:
        shard = self._shards[len(self._works)]
        if not shard.is_finite():
            self._status.note_bad(self._exchange.rank)
        if self._compression is not None:
            self._works.append(self._compression.start(shard, self._model))
            return
        if not self.feedback:
            self._works.append(self._exchange.average(shard.own_grads, shard.grads))
            return
        self._sendings.append(self._exchange.contribute(shard.own_grads, shard.grads))
        self._works.append(self._sendings[-1])


class _Hook:
    """Doesn't keep the reducer, so that an optimizer that nobody has any more is gone."""

    def __init__(self, reducer: weakref.ref[Reducer], index: int) -> None:
        self._reducer = reducer
        self._index = index

    def __call__(self, _: Tensor) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.ready(self._index)


class _End:
    def __init__(self, reducer: weakref.ref[Reducer]) -> None:
        self._reducer = reducer

    def __call__(self) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.end()


def _is_nested() -> bool:
    """Whether this backward pass runs inside of another's (a reentrant checkpoint)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _NESTED:
            return True
        frame = frame.f_back
    return False
