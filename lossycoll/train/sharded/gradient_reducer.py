"""Sends gradients to their owners, bucket by bucket, while the backward pass goes on.

Every rank submits the same collectives in the same order, whatever its model did: each bucket once
for each backward pass, in order. A bucket starts when all of its gradients and all buckets before
it are there. When the pass ends, the rest start. If several reducers share the group, all buckets
start then (ReducerOrder). The status starts just before the last bucket, when all that it says is
known: it takes longer to come, and doesn't wait for the bucket to be sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lossycoll.errors import OptionError, PeerLostError, TrainingError, UnsupportedError
from lossycoll.train.common.collectives import (
    Collectives,
    ReportedMean,
    Work,
    check_all_took_part,
    wait_all,
)
from lossycoll.train.common.models import is_finite, weakly
from lossycoll.train.compress.arc_topk import ARCTopKState

from .backward_pass import (
    GradStamp,
    PassStatus,
    ReducerOrder,
    is_nested,
    orders,
)
from .parameter_store import REMEDY, ParameterStore, Place, Shard, owners_needed
from .parameter_sync import ParameterSync


class Compressor:
    """Compresses one optimizer's buckets; ``state`` works over its group from now on.

    What a pass changes in the memory of errors is kept once a step was taken with its gradients.
    """

    def __init__(self, state: ARCTopKState, collectives: Collectives) -> None:
        if state.process_group not in (None, collectives.group):
            raise OptionError(
                f"{collectives}: compression is of another group, wanted the optimizer's; leave "
                f"process_group out of ARCTopKState"
            )
        state.process_group = collectives.group
        self._state = state
        self._collectives = collectives
        self._reduced = False
        self._sent: set[str] = set()
        """Gradients sent since the last step: another optimizer may use the same state."""

    def start(self, shard: Shard) -> Work:
        """Starts the compressed mean of a bucket, of which ``own_grads`` gets this rank's chunk."""
        keys = self._state.keys(place.parameter for place in shard.places)
        self._sent.update(keys)

        def work() -> None:
            self._state.reduce(keys, [place.grad for place in shard.places], shard.grads, hold=True)
            shard.own_grads.copy_(shard.grads[shard.chunk])

        with self._collectives.delivery():
            return _Future(self._state._run(work, on_host=shard.grads.is_cpu))

    def check_taken(self) -> None:
        """Raises TrainingError if no step was taken with the last pass, and nobody has said that
        none will be."""
        if self._reduced:
            raise TrainingError(
                f"{self._collectives}: a second backward pass was sent before optimizer.step() or "
                f"optimizer.zero_grad(), with compression; put all but the last one into "
                f"`with optimizer.no_sync():` (model.zero_grad() doesn't take back what was sent)"
            )

    def end(self) -> None:
        self._state.iter += 1
        self._reduced = True

    def forget(self) -> None:
        """No step is taken with the last pass."""
        self._reduced = False
        self._state.discard(self._sent)
        self._sent.clear()

    def keep(self, unused: Iterable[Tensor]) -> None:
        """A step was taken with the last pass, without ``unused``, of which no rank had a
        gradient: what was sent of their errors is still to come."""
        self._state.discard(self._state.keys(unused))
        self._state.commit(self._sent)
        self._sent.clear()
        self._reduced = False


@dataclass(frozen=True)
class _Future:
    future: Future[None]

    def wait(self) -> None:
        self.future.result()


@dataclass(eq=False)
class _BucketState:
    """A bucket, and how far the last backward pass has come with it."""

    shard: Shard
    residual: Tensor | None = None
    """With error feedback, lost gradients, float (size,), which are sent with the next ones.

    The mean of what arrives is unbiased but noisier than that of all, by (1 - p^N) / (1 - p). Here
    what is lost counts as zero, and its sender, to whom it is reported, adds it to its next
    gradient, and so what encodings round off: error-feedback SGD (Seide et al., Interspeech 2014;
    Karimireddy et al., arXiv 1901.09847) with the network as the compressor. The residual is
    without a GradScaler's scale, which is known only at a step: it is sent with the expected one.
    """
    missing: set[Place] = field(default_factory=set)  # those without a gradient so far
    work: Work | None = None  # the collective, once it has started
    report: ReportedMean | None = None
    """With error feedback, the collective until its losses have been added to the residual."""


class GradientReducer:
    """Reduces the gradients of a store's parameters, whose shards :meth:`watch` is given.

    ``finished`` is called when a pass has been reduced. With ``feedback`` what is lost is sent
    again with the next pass.
    """

    def __init__(
        self,
        store: ParameterStore,
        parameter_sync: ParameterSync,
        finished: Callable[[PassStatus], None],
        *,
        feedback: bool,
        compression: ARCTopKState | None,
    ) -> None:
        self._collectives = collectives = store.collectives
        self._store = store
        self._parameter_sync = parameter_sync
        self._finished = weakly(finished)  # or it would live until cycles are collected
        self.feedback = feedback
        self._compression = None if compression is None else Compressor(compression, collectives)
        self._order = orders.setdefault(collectives.group, ReducerOrder())
        self._model = store.model
        self._buckets: list[_BucketState] = []
        self.scale = 1.0  # the scale that a GradScaler is expected to have in the next pass
        self._sync = True
        self._armed: int | None = None  # the number of the backward pass that calls :meth:`end`
        self.is_open = False
        self._launched = 0  # buckets that have started in this pass: the first ones
        self._status = PassStatus(collectives.world, 0)
        self._status_work: Work | None = None  # the collective of the status, once it has started
        self._sent: dict[int, GradStamp] = {}
        """The stamps of the gradients that were sent, by parameter."""

    def join(self) -> None:
        self._order.join(self, self._collectives)

    def watch(self, shards: Sequence[Shard]) -> None:
        """Adds buckets of parameters; not during a pass."""
        for shard in shards:
            bucket = _BucketState(shard)
            if self.feedback:
                bucket.residual = torch.zeros_like(shard.grads)
                for member, place in zip(shard.bucket.members, shard.places, strict=True):
                    place.residual = member.view(bucket.residual)
            self._buckets.append(bucket)
            for position, place in enumerate(shard.places):
                # What isn't in the last pass has no gradient there.
                self._sent[place.index] = GradStamp(None)
                ready = partial(weakly(self.ready), len(self._buckets) - 1, position)
                place.parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A scope whose backward passes only add to ``grad``."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # ---- a backward pass ----

    @torch.no_grad()
    def ready(self, number: int, position: int, _: Parameter) -> None:
        bucket = self._buckets[number]
        place = bucket.shard.places[position]
        if not self._sync or not place.is_held():
            return  # another optimizer has it now; step() tells whoever doesn't know
        self._enter_pass()
        if number < self._launched:
            raise TrainingError(
                f"{self._collectives}: {self._store.names[place.index]} got its gradient in two "
                f"parts during one backward pass, the second after its bucket had been sent; is it "
                f"used inside and outside of a checkpointed block? use_reentrant=False makes it "
                f"one part"
            )
        self._copy(bucket, place)
        if not self._order.is_single:
            return
        with owners_needed():
            while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
                self._launch()

    def _enter_pass(self) -> None:
        """Makes the running backward pass the one that is reduced."""
        number = torch._C._current_graph_task_id()
        if self.is_open and self._armed not in (None, number) and not is_nested():
            self.finish()  # the pass before this one raised
        if self._compression is not None and not self.is_open:
            self._compression.check_taken()
        if self._armed is None:
            self._armed = number
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(weakly(self.end))
        if not self.is_open:
            self._begin()

    def end(self) -> None:
        """The pass that :meth:`ready` was called from is over."""
        if is_nested():
            self._armed = None  # the pass around it goes on, and calls back for itself
        elif self.is_open:
            self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Sends the gradients as they are, and those of the group's other touched reducers."""
        with owners_needed():
            self._order.finish(self, self._collectives)

    @property
    def is_used(self) -> bool:
        """True if some of its parameters haven't been given to another optimizer."""
        filled = sum(bool(p.data.numel()) for b in self._buckets for p in b.shard.places)
        return not filled or len(self._store.moved()) < filled

    def send(self) -> None:
        if not self.is_open:
            self._begin()
        try:
            self._launch_rest()
            if self._compression is not None:
                wait_all(self._works())  # before anything else is sent, on all ranks
                self._compression.end()
            self._combine_status()
            if self._compression is not None and self._status.bad:
                # All ranks refuse the step, and a GradScaler doesn't even ask for it.
                self._compression.forget()
        finally:
            self.is_open, self._armed = False, None
        self._finished(self._status)

    def _begin(self) -> None:
        self._parameter_sync.finish_all()
        if self._compression is not None:
            self._compression.forget()  # what was sent before, if anything, is sent anew
        self.is_open = True
        self._launched = 0
        self._sent = {}
        self._status = PassStatus(self._collectives.world, len(self._model))
        self._status_work = None
        for bucket in self._buckets:
            bucket.missing = set(bucket.shard.places)
            bucket.work = bucket.report = None

    def _copy(self, bucket: _BucketState, place: Place) -> None:
        grad = place.parameter.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise UnsupportedError(
                f"{self._collectives}: the gradient of {self._store.names[place.index]} is "
                f"{grad.layout}, but only dense ones can be sharded; make the embedding with "
                f"sparse=False"
            )
        place.grad.copy_(grad)
        self._sent[place.index] = GradStamp(grad)  # what hooks change from here on isn't sent
        if place.residual is not None:
            place.grad.add_(place.residual, alpha=self.scale)
        self._status.used[place.index] = 1
        bucket.missing.discard(place)

    def _launch_rest(self) -> None:
        for bucket in self._buckets[self._launched :]:
            for place in list(bucket.missing):
                if place.parameter.grad is None:
                    self._sent[place.index] = GradStamp(None)
                    place.grad.zero_()
                else:
                    self._copy(bucket, place)
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        shard = bucket.shard
        if not is_finite(shard.grads):
            self._status.is_bad[self._collectives.rank] = 1
        if self._launched == len(self._buckets) - 1 and self._compression is None:
            self._start_status()
        if self._compression is not None:
            bucket.work = self._compression.start(shard)
        elif self.feedback:
            report = self._collectives.reduce_scatter_reported(shard.own_grads, shard.grads)
            bucket.work = bucket.report = report
        else:
            bucket.work = self._collectives.reduce_scatter_mean(
                shard.own_grads, shard.grads, shard.bucket.counts
            )
        self._launched += 1

    def _works(self) -> list[Work]:
        return [bucket.work for bucket in self._buckets if bucket.work is not None]

    def _start_status(self) -> None:
        self._status.written.fill_(self._parameter_sync.was_written())
        self._status_work = self._collectives.all_reduce(self._status.flags, dist.ReduceOp.MAX)

    def _combine_status(self) -> None:
        if self._status_work is None:
            self._start_status()
        assert self._status_work is not None
        try:
            wait_all([*self._works(), self._status_work])
        except PeerLostError as error:
            if not self._collectives.continues_after(error):
                raise
            # Others may have all of what the lost rank sent, and continue: so does this rank, with
            # flags of its own, up to the check that all of them fail.
        check_all_took_part(self._collectives, REMEDY)

    # ---- between passes ----

    def forget(self) -> None:
        self._sent = {}
        if self._compression is not None:
            self._compression.forget()

    def changed(self) -> int | None:
        """The first parameter whose ``grad`` isn't what the last pass has sent."""
        for index, stamp in sorted(self._sent.items()):
            if not stamp.fits(self._model[index].grad):
                return index
        return None

    # ---- error feedback ----

    @torch.no_grad()
    def keep_lost(self, scale: float) -> None:
        """A step was taken with the last pass, whose gradients were divided by ``scale``."""
        if self._compression is not None:
            # Parameters that were added since weren't in the pass.
            pairs = zip(self._model, self._status.used.tolist(), strict=False)
            self._compression.keep(parameter for parameter, used in pairs if not used)
        for bucket in self._buckets:
            if bucket.residual is None or bucket.report is None:
                continue
            # Of what had no gradient zeros were sent: its residual stays.
            absent = [p.residual for p in bucket.missing if p.residual is not None]
            stays = [residual.clone() for residual in absent]
            bucket.residual.mul_(1 - self.scale / scale)
            for residual, before in zip(absent, stays, strict=True):
                residual.copy_(before)
            if (missed := bucket.report.missed) is not None:
                bucket.residual.add_(missed, alpha=1 / scale)
            bucket.report = None
        self.scale = scale

    def residuals(self) -> list[Tensor]:
        """The residuals, float (size,) of each bucket; none without error feedback."""
        return [b.residual for b in self._buckets if b.residual is not None]

    @torch.no_grad()
    def replace_residuals(self, values: Mapping[int, Tensor]) -> None:
        """Sets the residuals by the index of the parameter; zeros for the others."""
        for bucket in self._buckets:
            bucket.report = None
            if bucket.residual is not None:
                bucket.residual.zero_()
            for place in bucket.shard.places:
                if place.residual is not None and place.index in values:
                    place.residual.copy_(values[place.index])
