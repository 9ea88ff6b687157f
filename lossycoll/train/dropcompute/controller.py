"""DropCompute: a step that does not wait for the slowest rank's compute.

Giladi et al., "DropCompute: simple and more robust distributed synchronous training via compute
variance reduction" (NeurIPS 2023, arXiv 2306.10598).
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lossycoll.errors import MismatchError, PeerLostError, TrainingError
from lossycoll.simulate.threshold import Choice, Cut
from lossycoll.train.common.collectives import formed_alike
from lossycoll.train.common.consistency import Agreement, as_lines, check_same
from lossycoll.train.common.models import weakly
from lossycoll.train.sharded.optimizer import ShardedOptimizer

from .averaging import averaging_of
from .loop import BatchSource, MicroBatches, PeekingIterator, RequeueSampler, Stopwatch
from .report import FIELDS, DropReport, StepRecord, StepSums, after_step, pack, unpack
from .threshold import DropSettings, Table, Threshold

log: Final = logging.getLogger("lossycoll")

T = TypeVar("T")

SHORT_STEPS: Final = 3
"""Steps of one micro-batch in a row after which a given threshold is reported as too low."""


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
        self._averaging = averaging_of(model, group)
        self._collectives, self._device = self._averaging.collectives, self._averaging.device
        check_same(
            [Agreement(self._collectives, as_lines(self._settings.shared()), self._device)],
            "DropCompute is made differently",
            "all ranks need the same arguments",
        )
        self._source = BatchSource(micro_batches, requeue)
        devices = {each.device for each in self._averaging.parameters if each.is_cuda}
        if synchronize is None:
            synchronize = bool(devices)
        self._watch = Stopwatch(clock, partial(_wait_for_kernels, devices) if synchronize else None)
        self._threshold = Threshold(self._settings)
        self._report = DropReport(self._collectives.rank)
        self._short_steps = 0
        self._unfinished = False  # whether a rank had more batches when the last step ended
        self._loop: weakref.ref[MicroBatches[Any]] | None = None  # the loop that began last
        self._failure: BaseException | None = None  # of the averaging at its end
        self._no_sync = contextlib.ExitStack()
        """The open loop's scope, in which backward passes send nothing."""
        hook = register_optimizer_step_pre_hook(weakly(self._before_step))
        weakref.finalize(self, hook.remove)

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
        self._check_over()
        self._check_cleared()
        opened = self._source.open(batches)
        with contextlib.ExitStack() as no_sync:
            no_sync.enter_context(self._averaging.no_sync())
            self._threshold.step_began(self._watch.start())
            if self._threshold.due:
                self._measure()
                self._watch.start()
            loop = MicroBatches(self, opened)
            self._no_sync = no_sync.pop_all()
        self._loop = weakref.ref(loop)
        return loop

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
            unfinished = self._unfinished

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
        return self._threshold.seconds

    @property
    def choice(self) -> Choice | None:
        """The last measured threshold and its predicted effect, from
        :func:`lossycoll.simulate.choose`; None before it."""
        return self._threshold.choice

    def measure_again(self) -> None:
        """Make all ranks measure the threshold again, starting with the step after the next.

        Any rank may call this. A fixed threshold stays.
        """
        self._threshold.request()

    # ---- the report ----

    def report(self) -> DropReport:
        """This rank's steps so far."""
        return replace(
            self._report,
            threshold=self._threshold.seconds,
            choices=self._threshold.choices,
            clock_jumps=self._watch.jumps,
        )

    def gather_report(self) -> list[DropReport]:
        """Return the reports of all ranks but the lost ones, without their last steps.

        All ranks must call this.

        Returns:
            The reports, in the order of the ranks.
        """
        rows = self._gather(pack(self.report()))
        return [unpack(rank, row) for rank, row in enumerate(rows) if row.any()]

    # ---- the start of a step ----

    def _check_over(self) -> None:
        """Raises TrainingError if a loop is open; or for a failure, once.

        It is asked when the next loop begins, and when any optimizer steps that has a parameter
        whose gradient is averaged.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise TrainingError(
                f"{self._collectives}: the last step's gradients could not be averaged when its "
                f"loop was left: {failure}"
            ) from failure
        if self._is_open():
            raise TrainingError(
                f"{self._collectives}: the loop over micro-batches isn't over, so gradients aren't "
                f"averaged yet; call optimizer.step() after it, and the next loop after that. If "
                f"it was left by break while something else still holds its iterator, other ranks "
                f"wait for this one: leave it by `with drop(batches) as step: for batch in step:`"
            )

    def _is_open(self) -> bool:
        loop = None if self._loop is None else self._loop()
        return loop is not None and not loop.over

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._failure is None and not self._is_open():
            return
        if optimizer is not self._averaging.optimizer:
            ours = {id(parameter) for parameter in self._averaging.parameters}
            stepped = (p for entry in optimizer.param_groups for p in entry["params"])
            if not any(id(parameter) in ours for parameter in stepped):
                return
        self._check_over()

    def _check_cleared(self) -> None:
        """Raises TrainingError if the gradients are still those of the last step: they would be
        averaged, and divided by the count, again."""
        if self._settings.fixed_divisor:
            return
        grads = (parameter.grad for parameter in self._averaging.parameters)
        for grad in (grad for grad in grads if grad is not None):
            if grad.layout is torch.strided:
                if grad.any():
                    raise TrainingError(
                        f"{self._collectives}: a loop over micro-batches begins with gradients "
                        f"that aren't 0, but divides all of them by the number completed in it; "
                        f"call optimizer.zero_grad() between loops, or use divisor='fixed'"
                    )
                return

    def _measure(self) -> None:
        """Takes the threshold from what all ranks have measured."""
        try:
            tables = self._gather(self._threshold.table())
        except PeerLostError as error:
            if not self._collectives.continues_after(error):
                raise
            self._threshold.restart()  # and so do the others, whether they know of the loss or not
            return
        if self._threshold.adopt(tables) and self._collectives.rank == 0:
            choice = self._threshold.choice
            assert choice is not None
            log.info(
                "%s: DropCompute's threshold is %.4g s: %.1f%% dropped, %.3g times as many "
                "micro-batches a second",
                self._collectives, choice.threshold, 100 * choice.drop_rate, choice.speedup,
            )  # fmt: skip

    # ---- the end of a step ----

    def _loop_ended(self, record: StepRecord) -> None:
        self._no_sync.close()
        self._source.close(record)
        self._threshold.step_ended(record.laps)
        addends = StepSums(
            completed=record.completed,
            dropped=record.dropped,
            outdated=self._threshold.outdated,
            warm_up_left=self._threshold.warm_up_left,
            warm_up_left_squared=self._threshold.warm_up_left**2,
            threshold=_finite(self._threshold.seconds),
            unfinished=self._source.has_more(),
        )
        sums, ranks, factor = self._average(addends)
        self._report = after_step(self._report, record, sums, factor)
        self._unfinished = sums.unfinished > 0
        if self._threshold.measured:
            self._follow_up(sums, ranks)
        else:
            self._warn_of_short_steps(record)

    def _average(self, addends: StepSums) -> tuple[StepSums, int, float]:
        """The sums, the number of ranks that took part, and the factor of the gradients' mean."""
        group = self._collectives
        own = addends.pack(self._averaging.grad_flags).to(self._device)
        packed, before = own.clone(), group.survivors
        # The sums are submitted first and needed last, so they cost no time of their own.
        self._averaging.average(lambda: group.all_reduce(packed)).wait()
        # Where the packet's owner dies meanwhile, a sum of floats is what each rank has by itself.
        packed = formed_alike(
            [group],
            self._device,
            lambda: group.summed(own.clone()),
            "to add up the completed micro-batches, so ranks would scale gradients differently; "
            "restart with those that are left",
            (packed, [before]),
        )
        ranks = group.survivors
        # After the loss of a rank a sum of floats is the survivors' mean, times the world.
        sums = StepSums.unpack(packed, ranks / group.world)
        factor = self._factor(sums.completed, ranks)
        self._averaging.finish(packed[FIELDS:], factor)
        return sums, ranks, factor

    def _factor(self, completed: float, ranks: int) -> float:
        """Turns the mean, which is 1 / (M N) of the sum of the gradients of M micro-batches of N
        ranks, into that sum over the number ``completed``."""
        if self._settings.fixed_divisor or not completed:
            return 1.0
        return self._settings.micro_batches * ranks / completed

    def _follow_up(self, sums: StepSums, ranks: int) -> None:
        if sums.outdated or sums.warm_up_differs(ranks):
            # Warm-ups differ where a rank was lost while the ranks exchanged their tables.
            self._threshold.restart()
            log.info(
                "%s: compute times have changed, the threshold is measured again",
                self._collectives,
            )
            return
        own, agreed = _finite(self._threshold.seconds), sums.threshold / ranks
        if abs(agreed - own) > 1e-6 * own:
            raise MismatchError(
                f"{self._collectives}: the threshold is {own:.9g} s here and {agreed:.9g} s on "
                f"average over the ranks, of the same measured times; wanted: the same version of "
                f"lossycoll and of numpy on all ranks"
            )

    def _warn_of_short_steps(self, record: StepRecord) -> None:
        """A given threshold may be less than one micro-batch takes."""
        short = record.stopped and len(record.laps) == 1
        self._short_steps = self._short_steps + 1 if short else 0
        if self._short_steps == SHORT_STEPS:
            log.warning(
                "%s: one micro-batch takes %.3g s, longer than the threshold of %.3g s of "
                "DropCompute: it is the only one of %d in each step; wanted: a threshold above "
                "that of a few micro-batches, or 'auto'",
                self._collectives, record.laps[0], self._threshold.seconds,
                self._settings.micro_batches,
            )  # fmt: skip

    def _gather(self, own: Table) -> Table:
        """Every rank's table, (world, ...), zeros for a lost rank: sums of their bits, as integers,
        lose nothing. A gather needs all ranks, and raises where one is lost."""
        bits = torch.zeros((self._collectives.world, *own.shape), dtype=torch.int64, device="cpu")
        bits[self._collectives.rank] = torch.from_numpy(own.view(np.int64))
        found = self._collectives.summed(bits.to(self._device)).cpu().numpy()
        return found.view(np.float64)


def _finite(seconds: float) -> float:
    """``seconds`` as ranks add them up."""
    return seconds if math.isfinite(seconds) else 0.0


def _wait_for_kernels(devices: Collection[torch.device]) -> None:
    """Waits for what is queued here on GPUs, or on the current one. Other streams have collectives,
    which end when slower ranks have come to them: that isn't this rank's compute."""
    for device in devices or (None,):
        torch.cuda.current_stream(device).synchronize()
