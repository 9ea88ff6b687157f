"""DropCompute: a step that does not wait for the slowest rank's compute.

Giladi et al., "DropCompute: simple and more robust distributed synchronous training via compute
variance reduction" (NeurIPS 2023, arXiv 2306.10598).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lossycoll.simulate.threshold import Choice, Cut
from lossycoll.train.common.consistency import Agreement, as_lines, check_same
from lossycoll.train.sharded.optimizer import ShardedOptimizer

from .averaging import averaging_of
from .loop import BatchSource, MicroBatches, PeekingIterator, RequeueSampler, Stopwatch
from .report import DropReport
from .runner import StepRunner
from .threshold import DropSettings

T = TypeVar("T")


class DropCompute:
    """Gradient accumulation that drops a straggler's micro-batches after a threshold.

    It replaces the gradient accumulation loop and ``no_sync``. All ranks pass the same arguments
    and run equally many loops (docs/dropcompute.md)::

        for inputs, targets in drop(batches):  # at most micro_batches, fewer on a straggler
            (loss(model(inputs), targets) / drop.micro_batches).backward()
        optimizer.step()  # the gradients were averaged when the loop ended
        optimizer.zero_grad()

    The clock starts with the loop and is read between micro-batches. So a rank always does one
    micro-batch, and exceeds the threshold by one at most. The end of a loop raises the collectives'
    errors.
    Source: Giladi et al., NeurIPS 2023, arXiv 2306.10598.

    Args:
        model: DistributedDataParallel, a ShardedOptimizer, or a plain module.
        micro_batches: Number of micro-batches in a full step; divide the loss by it.
        threshold: Seconds of compute in a step, or "auto" to choose the best by measurement.
        drop_rate: With "auto", maximum share to drop; it replaces the choice by speed-up.
        divisor: Divisor of the gradients' sum. "completed": number of completed micro-batches, over
            all ranks. "fixed": ``micro_batches`` times the number of ranks.
        group: Ranks that train a plain module; None is the default group.
        warm_up: Number of steps that "auto" measures; nothing is dropped in them.
        skip: Number of steps before the warm-up.
        window: Number of steps of the running median of compute times that is watched afterwards.
        tolerance: Change of that median, as a share, after which "auto" measures again.
        cut: For "auto", treatment of the micro-batch in which the threshold falls. "started": it is
            finished. "threshold": your code leaves it (``MicroBatches.late``).
        requeue: Whether the next list of batches begins with the dropped batches.
        clock: Function that returns seconds.
        synchronize: Whether to wait for the GPU before reading the clock. None: only if a GPU is
            used.

    Raises:
        OptionError: An argument has a value it cannot have.
        UnsupportedError: The model's forward or backward passes wait for other ranks, or average by
            other means.
        MismatchError: Ranks have different arguments.
    """

    def __init__(
        self,
        model: nn.Module | ShardedOptimizer,
        micro_batches: int,
        threshold: float | str = "auto",
        *,
        drop_rate: float | None = None,
        divisor: str = "completed",
        group: dist.ProcessGroup | None = None,
        warm_up: int = 44,
        skip: int = 5,
        window: int = 32,
        tolerance: float = 0.25,
        cut: Cut = "started",
        requeue: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: bool | None = None,
    ) -> None:
        self._settings = DropSettings(
            micro_batches=micro_batches,
            threshold=threshold,
            drop_rate=drop_rate,
            divisor=divisor,
            warm_up=warm_up,
            skip=skip,
            window=window,
            tolerance=tolerance,
            cut=cut,
        )
        averaging = averaging_of(model, group)
        lines = as_lines(self._settings.shared())
        check_same(
            [Agreement(averaging.collectives, lines, averaging.device)],
            "DropCompute is made differently",
            "all ranks need the same arguments",
        )
        self._source = BatchSource(micro_batches, requeue)
        devices = {each.device for each in averaging.parameters if each.is_cuda}
        if synchronize is None:
            synchronize = bool(devices)
        watch = Stopwatch(clock, partial(_wait_for_kernels, devices) if synchronize else None)
        self._runner = StepRunner(self._settings, averaging, self._source, watch)

    # ---- loops ----

    def __call__(self, batches: Iterable[T]) -> MicroBatches[T]:
        """Start a step. Ranks that have no batches left must call this, too.

        Args:
            batches: An iterator, from which at most ``micro_batches`` are drawn, or a sequence.

        Returns:
            An iterator over the step's micro-batches. To leave it early, use ``break``, or a
            context manager if anything else holds the iterator.

        Raises:
            OptionError: ``batches`` is a DataLoader, which would start again with each step.
            TrainingError: The last loop is open or has failed, or its gradients were not cleared.
        """
        return self._runner.start(batches)

    def steps(self, batches: Iterable[T]) -> Iterator[MicroBatches[T]]:
        """Iterate over steps until no rank has any ``batches`` left::

            for step in drop.steps(loader):
                for inputs, targets in step:
                    ...
                optimizer.step()

        All ranks end with the same step, however many batches each had.

        Args:
            batches: This rank's batches, any number of them; each rank has its own.

        Yields:
            A step: an iterator over its micro-batches.
        """
        source = PeekingIterator(iter(batches))
        unfinished = True
        while unfinished:
            loop = self(source)
            yield loop
            loop.close()
            unfinished = self._runner.unfinished

    def sampler(self, batches: Any) -> RequeueSampler:
        """Return a batch sampler whose epochs begin with the last epoch's unfinished batches.

        Args:
            batches: A batch sampler that yields a list of indices for each micro-batch.

        Returns:
            A ``batch_sampler`` for the DataLoader whose iterator the loops read.
        """
        return self._source.sampler(batches)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a full step; divide the loss by it."""
        return self._settings.micro_batches

    @property
    def dropped(self) -> Sequence[Any]:
        """Batches of the last step's list that were not used."""
        return self._source.dropped

    @property
    def room(self) -> int:
        """Number of new micro-batches that the next step takes, without repeated ones."""
        return self._source.room

    # ---- the threshold ----

    @property
    def threshold(self) -> float:
        """Seconds of compute in a step; inf while nothing is dropped."""
        return self._runner.threshold.seconds

    @property
    def choice(self) -> Choice | None:
        """The last measured threshold and its predicted effect, from
        :func:`lossycoll.simulate.choose`; None before it."""
        return self._runner.threshold.choice

    def measure_again(self) -> None:
        """Make all ranks measure the threshold again, starting with the step after the next.

        Any rank may call this. A fixed threshold stays.
        """
        self._runner.threshold.request()

    # ---- the report ----

    def report(self) -> DropReport:
        """This rank's steps so far."""
        return self._runner.report()

    def gather_report(self) -> list[DropReport]:
        """Return the reports of all ranks but the lost ones, without their last steps.

        All ranks must call this.

        Returns:
            The reports, in the order of the ranks.
        """
        return self._runner.gather_report()


def _wait_for_kernels(devices: Collection[torch.device]) -> None:
    """Waits for what is queued here on GPUs, or on the current one. Other streams have collectives,
    which end when slower ranks have come to them: that isn't this rank's compute."""
    for device in devices or (None,):
        torch.cuda.current_stream(device).synchronize()
