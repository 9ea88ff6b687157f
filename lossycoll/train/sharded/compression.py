"""A ShardedOptimizer's buckets, compressed on their way to their owners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from torch import Tensor

from lossycoll.errors import OptionError, TrainingError
from lossycoll.train.common.collectives import Collectives
from lossycoll.train.common.works import Work
from lossycoll.train.compress.arc_topk import ARCTopKState

from .shard import Shard


class Compressor:
    """Compresses the buckets of one optimizer.

    ``state`` works over the optimizer's group from now on; OptionError if it is of another.
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

    def start(self, shard: Shard, model: Sequence[Tensor]) -> Work:
        """Starts the compressed mean of a bucket, of which ``own_grads`` gets this rank's chunk."""
        keys = self._state.keys(model[member.index] for member in shard.bucket.members)

        def work() -> None:
            self._state.reduce(keys, shard.views, shard.grads)
            shard.own_grads.copy_(
                shard.grads.chunk(self._collectives.world)[self._collectives.rank]
            )

        with self._collectives.delivery():
            if shard.grads.is_cpu:
                return _Future(self._state.start(work))
            return _Future(_done_here(work))

    def begin(self) -> None:
        """Begins a pass. TrainingError: no step was taken with the last one.

        Its gradients are in the memory of errors, and would be there twice.
        """
        if self._reduced:
            raise TrainingError(
                f"{self._collectives}: a second backward pass was sent before step() or "
                f"zero_grad(), with compression; put all but the last one into "
                f"`with optimizer.no_sync():`"
            )

    def end(self) -> None:
        """All buckets of a pass have been reduced."""
        self._state.iter += 1
        self._reduced = True

    def forget(self) -> None:
        """The last pass was stepped with, or isn't wanted any more."""
        self._reduced = False


def _done_here(work: Callable[[], None]) -> Future[None]:
    """Where kernels are queued. An error comes from the wait, as another thread's would: so all
    buckets have been started when it does."""
    done: Future[None] = Future()
    try:
        work()
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(None)
    return done


class _Future:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()
