"""One step from its start to the averaged gradients: hand out, add up, scale, follow up.

Who owns what: the source owns the batches and what is left of them, the watch the clock, the
threshold what was measured, the averaging the gradients and the group, and the runner the open loop
and the report.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lossycoll.errors import MismatchError, PeerLostError, TrainingError
from lossycoll.train.common.collectives import formed_alike

from .averaging import GradientAveraging
from .loop import BatchSource, MicroBatches, Stopwatch
from .report import FIELDS, DropReport, StepRecord, StepSums, after_step, pack, unpack
from .threshold import DropSettings, Table, Threshold

log: Final = logging.getLogger("lossycoll")

T = TypeVar("T")

SHORT_STEPS: Final = 3
"""Steps of one micro-batch in a row after which a given threshold is reported as too low."""


class StepRunner:
    """Starts each step's loop and, when that says so, ends the step."""

    def __init__(
        self,
        settings: DropSettings,
        averaging: GradientAveraging,
        source: BatchSource,
        watch: Stopwatch,
    ) -> None:
        self.settings = settings
        self.averaging = averaging
        self.source = source
        self.watch = watch
        self._collectives = averaging.collectives
        self._device = averaging.device
        self._loop: weakref.ref[MicroBatches[Any]] | None = None  # the loop that began last
        self.failure: BaseException | None = None  # of the averaging at its end
        before_step = weakref.WeakMethod(self._before_step)
        hook = register_optimizer_step_pre_hook(
            lambda optimizer, args, kwargs: (found := before_step()) and found(optimizer)
        )
        weakref.finalize(self, hook.remove)
        self._no_sync = contextlib.ExitStack()
        """The open loop's scope, in which backward passes send nothing."""
        self._report = DropReport(self._collectives.rank)
        self._short_steps = 0
        self.threshold = Threshold(settings)
        self.unfinished = False  # whether a rank had more batches when the last step ended

    # ---- the start of a step ----

    def start(self, batches: Iterable[T]) -> MicroBatches[T]:
        self._check_over()
        self._check_cleared()
        source = self.source.open(batches)
        with contextlib.ExitStack() as no_sync:
            no_sync.enter_context(self.averaging.no_sync())
            self._start_watch()
            loop = MicroBatches(self, source)
            self._no_sync = no_sync.pop_all()
        self._loop = weakref.ref(loop)
        return loop

    def _check_over(self) -> None:
        """Raises TrainingError if a loop is open; or for a failure, once.

        It is asked when the next loop begins, and when any optimizer steps that has a parameter
        whose gradient is averaged.
        """
        rank = self._collectives
        failure, self.failure = self.failure, None
        if failure is not None:
            raise TrainingError(
                f"{rank}: the last step's gradients could not be averaged when its loop was "
                f"left: {failure}"
            ) from failure
        if self._is_open():
            raise TrainingError(
                f"{rank}: the loop over micro-batches isn't over, so gradients aren't "
                f"averaged yet; call optimizer.step() after it, and the next loop after that. If "
                f"it was left by break while something else still holds its iterator, other ranks "
                f"wait for this one: leave it by `with drop(batches) as step: for batch in step:`"
            )

    def _is_open(self) -> bool:
        loop = None if self._loop is None else self._loop()
        return loop is not None and not loop.over

    def _before_step(self, optimizer: Optimizer) -> None:
        if self.failure is None and not self._is_open():
            return
        if optimizer is not self.averaging.optimizer:
            ours = {id(parameter) for parameter in self.averaging.parameters}
            stepped = (p for entry in optimizer.param_groups for p in entry["params"])
            if not any(id(parameter) in ours for parameter in stepped):
                return
        self._check_over()

    def _check_cleared(self) -> None:
        """Raises TrainingError if the gradients are still those of the last step: they would be
        averaged, and divided by the count, again."""
        if self.settings.fixed_divisor:
            return
        grads = (parameter.grad for parameter in self.averaging.parameters)
        for grad in (grad for grad in grads if grad is not None):
            if grad.layout is torch.strided:
                if grad.any():
                    raise TrainingError(
                        f"{self._collectives}: a loop over micro-batches begins with gradients "
                        f"that aren't 0, but divides all of them by the number completed in it; "
                        f"call optimizer.zero_grad() between loops, or use divisor='fixed'"
                    )
                return

    def _start_watch(self) -> None:
        self.threshold.step_began(self.watch.start())
        if self.threshold.due:
            self._measure()
            self.watch.start()

    def _measure(self) -> None:
        """Takes the threshold from what all ranks have measured."""
        try:
            tables = self._gather(self.threshold.table())
        except PeerLostError as error:
            if not self._collectives.continues_after(error):
                raise
            self.threshold.restart()  # and so do the others, whether they know of the loss or not
            return
        if self.threshold.adopt(tables) and self._collectives.rank == 0:
            choice = self.threshold.choice
            assert choice is not None
            log.info(
                "%s: DropCompute's threshold is %.4g s: %.1f%% dropped, %.3g times as many "
                "micro-batches a second",
                self._collectives, choice.threshold, 100 * choice.drop_rate, choice.speedup,
            )  # fmt: skip

    # ---- its end ----

    def loop_ended(self, loop: MicroBatches[Any]) -> None:
        self._no_sync.close()
        record = loop.record(self.source.wanted)
        self.source.close(record, loop.returned)
        self.threshold.step_ended(record.laps)
        sums, ranks, factor = self._average(self._addends(record))
        self._report = after_step(self._report, record, sums, factor)
        self.unfinished = sums.unfinished > 0
        if self.threshold.measured:
            self._follow_up(sums, ranks)
        else:
            self._warn_of_short_steps(record)

    def _addends(self, record: StepRecord) -> StepSums:
        return StepSums(
            completed=record.completed,
            dropped=record.dropped,
            outdated=self.threshold.outdated,
            warm_up_left=self.threshold.warm_up_left,
            warm_up_left_squared=self.threshold.warm_up_left**2,
            threshold=_finite(self.threshold.seconds),
            unfinished=self.source.has_more(),
        )

    def _average(self, addends: StepSums) -> tuple[StepSums, int, float]:
        """The sums, the number of ranks that took part, and the factor of the gradients' mean."""
        group = self._collectives
        own = addends.pack(self.averaging.grad_flags).to(self._device)
        packed, before = own.clone(), group.survivors
        # The sums are submitted first and needed last, so they cost no time of their own.
        self.averaging.average(lambda: group.all_reduce(packed)).wait()
        # Where the packet's owner dies meanwhile, a sum of floats is what each rank has by itself.
        packed = formed_alike(
            [group],
            self._device,
            lambda: group.summed(own.clone()),
            "to add up the completed micro-batches, so ranks would scale gradients differently; "
            "restart with those that are left",
            first=(packed, [before]),
        )
        ranks = group.survivors
        # After the loss of a rank a sum of floats is the survivors' mean, times the world.
        sums = StepSums.unpack(packed, ranks / group.world)
        factor = self._factor(sums.completed, ranks)
        self.averaging.finish(packed[FIELDS:], factor)
        return sums, ranks, factor

    def _factor(self, completed: float, ranks: int) -> float:
        """Turns the mean, which is 1 / (M N) of the sum of the gradients of M micro-batches of N
        ranks, into that sum over the number ``completed``."""
        if self.settings.fixed_divisor or not completed:
            return 1.0
        return self.settings.micro_batches * ranks / completed

    def _follow_up(self, sums: StepSums, ranks: int) -> None:
        if sums.outdated or sums.warm_up_differs(ranks):
            # Warm-ups differ where a rank was lost while the ranks exchanged their tables.
            self.threshold.restart()
            log.info(
                "%s: compute times have changed, the threshold is measured again",
                self._collectives,
            )
            return
        own, agreed = _finite(self.threshold.seconds), sums.threshold / ranks
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
                self._collectives, record.laps[0], self.threshold.seconds,
                self.settings.micro_batches,
            )  # fmt: skip

    # ---- the report ----

    def report(self) -> DropReport:
        return replace(
            self._report,
            threshold=self.threshold.seconds,
            choices=self.threshold.choices,
            clock_jumps=self.watch.jumps,
        )

    def gather_report(self) -> list[DropReport]:
        rows = self._gather(pack(self.report()))
        return [unpack(rank, row) for rank, row in enumerate(rows) if row.any()]

    def _gather(self, own: Table) -> Table:
        """Every rank's table, (world, ...), zeros for a lost rank: sums of their bits, as integers,
        lose nothing."""
        bits = torch.from_numpy(own.view(np.int64)).to(self._device)
        found: Table = self._collectives.all_gather_survivors(bits).cpu().numpy().view(np.float64)
        return found


def _finite(seconds: float) -> float:
    """``seconds`` as ranks add them up."""
    return seconds if math.isfinite(seconds) else 0.0
