"""A ShardedOptimizer's buckets, compressed on their way to their owners."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from torch import Tensor

from lossycoll.errors import OptionError, TrainingError
from lossycoll.train.common.collectives import Exchange, Work
from lossycoll.train.compress.arc_topk import ARCTopKState

from .shard import Shard


class Compressor:
    """``state`` as one optimizer has it, over the optimizer's group."""

    def __init__(self, state: ARCTopKState, exchange: Exchange) -> None:
        if state.process_group not in (None, exchange.group):
            raise OptionError(
                f"{exchange}: compression is of another group, wanted the optimizer's; leave "
                f"process_group out of ARCTopKState"
            )
        state.process_group = exchange.group
        self._state = state
        self._exchange = exchange
        self._reduced = False

    def start(self, shard: Shard, model: Sequence[Tensor]) -> Work:
        """Starts to put this rank's chunk of what is used of all ranks' gradients of ``shard`` into
        ``own_grads``. ``model``: all parameters, by index."""
        keys = self._state.keys(model[member.index] for member in shard.bucket.members)

        def work() -> None:
            self._state.reduce(keys, shard.views, shard.grads)
            shard.own_grads.copy_(shard.grads.chunk(self._exchange.world)[self._exchange.rank])

        with self._exchange.delivery():
            if shard.grads.is_cpu:
                return _Started(self._state.start(work))
            work()
            return _Started(None)

    def begin(self) -> None:
        """A pass begins. Raises TrainingError if nothing has become of the last one: its gradients
        are in the memory of errors, and would be there twice."""
        if self._reduced:
            raise TrainingError(
                f"{self._exchange}: a second backward pass was sent before step() or zero_grad(), "
                f"with compression; put all but the last one into a block of optimizer.no_sync()"
            )

    def end(self) -> None:
        """All buckets of a pass have been reduced."""
        self._state.iter += 1
        self._reduced = True

    def forget(self) -> None:
        """The last pass was stepped with, or isn't wanted any more."""
        self._reduced = False


class _Started:
    def __init__(self, future: Future[None] | None) -> None:
        self._future = future

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()
