"""DropCompute: a step that doesn't wait for the slowest rank's compute.

Giladi et al., "DropCompute: simple and more robust distributed synchronous training via compute
variance reduction" (NeurIPS 2023, arXiv 2306.10598).
"""

from __future__ import annotations

import logging
import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from lossycoll.errors import MismatchError, OptionError, PeerLostError, TrainingError
from lossycoll.simulate.threshold import Choice, Cut
from lossycoll.train.common.arguments import is_number, is_whole
from lossycoll.train.sharded.optimizer import ShardedOptimizer

from .averaging import reduction_of
from .loop import MicroBatches, Peeking
from .report import DropReport, DropStep, of_row, to_row
from .sampler import Requeue
from .stopwatch import Stopwatch
from .threshold import Threshold

log: Final = logging.getLogger("lossycoll")

T = TypeVar("T")

COMPLETED, DROPPED, STALE, PHASE, PHASE_SQUARED, SECONDS, MORE, HEAD = range(8)
"""Places of what ranks add up in every step; flags of the reduction follow."""
SHORT_STEPS: Final = 3
"""Steps of one micro-batch after which a threshold is said to be too low."""


class DropCompute:
    """Ends a rank's micro-batches once its compute time passes a threshold; the step goes on with
    what was done.

    In place of the loop over micro-batches of gradient accumulation, on all ranks::

        drop = lossycoll.DropCompute(model, micro_batches=12)
        batches = iter(loader)
        for step in range(steps):
            for inputs, targets in drop(batches):  # at most 12, fewer on a rank that is late
                (loss(model(inputs), targets) / drop.micro_batches).backward()
            optimizer.step()  # the gradients have been averaged by now
            optimizer.zero_grad()

    The clock starts with the loop (so the loading of data counts) and is looked at between
    micro-batches: a rank is late by one of them at most, and always does at least one that it has.
    When a rank's loop ends, whatever ended it, the rank takes part in the averaging with what it
    has done, if that is nothing, too. Nothing is raised within the loop's body, and ``no_sync`` is
    entered here.

    ``model``: a module that DistributedDataParallel wraps (or torch.compile that), whose own
    reducer, buckets and comm hooks are used; a :class:`.ShardedOptimizer`; or a plain module, whose
    gradients are averaged here, in ``group`` (None: the default one; without any, nothing is
    averaged). Any backend. Its parameters are to be equal on all ranks, as ever.

    ``micro_batches``: a whole step's, by which the loss is to be divided.

    ``threshold``: seconds of compute; or "auto": measured over ``warm_up`` steps after the first
    ``skip``, in which nothing is dropped, as the one of the greatest predicted speed-up, or with
    ``drop_rate`` as the one that drops such a share. All ranks share what they measured in one
    reliable collective, and so find the same threshold. It is measured anew, on all ranks, when the
    median over ``window`` steps of one rank's seconds for a micro-batch has changed by more than
    ``tolerance`` (a share). ``cut``: what becomes of a micro-batch that the threshold falls into,
    for the choice (:func:`lossycoll.simulate.choose`): "started", it is seen through; "threshold",
    for those who leave it then (:attr:`.drop_loop.MicroBatches.late`).

    ``divisor``: "completed" divides the sum of the gradients by the number of micro-batches that
    were done at all ranks; "fixed", as the authors', by ``micro_batches`` times the ranks, so that
    what is dropped makes a step smaller. With nothing dropped both are the same, and the gradients
    bit for bit DDP's. The count travels reliably beside the gradients. Multiplied by one and the
    same factor on all ranks, a mean that lost packets left unbiased stays so (docs/dropcompute.md).

    ``requeue``: where a step is given a list of micro-batches, those that were dropped come first
    in the next step; else they are in :attr:`dropped`. From an iterator nothing is drawn that isn't
    handed out, so nothing is lost but at its end: :meth:`steps`, :meth:`sampler`.

    ``clock``: seconds; ``synchronize``: whether to wait for the GPU before it is read (None: if
    there are parameters on one).

    All ranks must make it alike, with the same arguments, and run equally many loops. Raises
    OptionError for an argument that can't be, UnsupportedError for a model of which this can't be
    done, MismatchError where ranks were given different arguments. The end of a loop raises what
    the collectives raise. ``optimizer.step()`` within a loop raises TrainingError: gradients aren't
    averaged there.
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
        given = _given(threshold, drop_rate)
        for name, value, least in (
            ("micro_batches", micro_batches, 1),
            ("warm_up", warm_up, 2),
            ("skip", skip, 0),
            ("window", window, 1),
        ):
            if not is_whole(value, least):
                raise OptionError(f"{name} is {value!r}, wanted a whole number, at least {least}")
        if divisor not in ("completed", "fixed"):
            raise OptionError(f"divisor is {divisor!r}, wanted 'completed' or 'fixed'")
        if cut not in get_args(Cut):
            raise OptionError(f"cut is {cut!r}, wanted one of {', '.join(get_args(Cut))}")
        if not is_number(tolerance) or not tolerance > 0:
            raise OptionError(f"tolerance is {tolerance!r}, wanted a share above 0")
        self.micro_batches = micro_batches
        """Of a whole step; by which the loss is to be divided."""
        self.dropped: Sequence[Any] = ()
        """What the last step was given as a list, and has not begun."""
        self._fixed = divisor == "fixed"
        self._requeue = requeue
        self._reduction = reduction_of(model, group)
        self._ranks = self._reduction.ranks
        self._ranks.check_alike(
            {
                "micro_batches": micro_batches,
                "threshold": threshold,
                "drop_rate": drop_rate,
                "divisor": divisor,
                "warm_up": warm_up,
                "skip": skip,
                "cut": cut,
            }
        )
        self._threshold = Threshold(
            micro_batches, given, drop_rate, skip, warm_up, window, tolerance, cut
        )
        on_gpu = any(parameter.is_cuda for parameter in self._reduction.parameters)
        waits = on_gpu if synchronize is None else synchronize
        self._watch = Stopwatch(clock, torch.cuda.synchronize if waits else None)
        self._report = DropReport(self._ranks.rank)
        self._short = 0
        self._samplers: list[Requeue] = []
        self._open: weakref.ref[MicroBatches[Any]] | None = None
        self._quiet: Any = None
        self._failure: BaseException | None = None
        self._given: Sequence[Any] | None = None
        """What the loop was given, where that is a list."""
        self._given_up: Sequence[Any] = ()
        """What was drawn from an iterator, and comes first in the next loop."""
        self._peeking: Peeking[Any] | None = None
        self._more = False
        guard = weakref.WeakMethod(self._before_step)
        self._guard = register_optimizer_step_pre_hook(
            lambda optimizer, args, kwargs: (found := guard()) and found(optimizer)
        )
        weakref.finalize(self, self._guard.remove)

    # ---- loops ----

    def __call__(self, batches: Iterable[T]) -> MicroBatches[T]:
        """The micro-batches of one step: an iterator, and a context for those who leave it early.

        ``batches``: an iterator, from which at most ``micro_batches`` are drawn, or a sequence of
        this step's. All ranks must call this, also those that have none left.
        """
        self._check_free()
        if isinstance(batches, DataLoader):
            raise OptionError(
                "a DataLoader begins anew with each loop; pass iter(loader), made once an epoch"
            )
        self._peeking = batches if isinstance(batches, Peeking) else None
        if isinstance(batches, Sequence):
            self._given = [*(self.dropped if self._requeue else ()), *batches]
            source: Iterator[T] = iter(self._given)
        else:
            self._given = None
            source = chain(self._given_up, batches) if self._given_up else iter(batches)
        self.dropped, self._given_up = (), ()
        self._check_cleared()
        self._quiet = self._reduction.quiet()
        self._quiet.__enter__()
        try:
            since = self._watch.start()
            self._threshold.began(since)
            if self._threshold.due:
                self._measure()
                self._watch.start()
            loop: MicroBatches[T] = MicroBatches(
                self,
                source,
                self.micro_batches,
                self._threshold.seconds,
                self._watch,
                self._reduction.parameters,
            )
        except BaseException:
            self._quiet.__exit__(None, None, None)
            raise
        self._open = weakref.ref(loop)
        return loop

    def steps(self, batches: Iterable[T]) -> Iterator[MicroBatches[T]]:
        """One step's loop after another, until no rank has any of its ``batches`` left::

            for step in drop.steps(loader):
                for inputs, targets in step:
                    ...
                optimizer.step()

        All ranks end with the same step, however many batches each had.
        """
        source = Peeking(iter(batches))
        more = True
        while more:
            loop = self(source)
            yield loop
            loop.close()
            more = self._more

    @property
    def room(self) -> int:
        """How many micro-batches the next step can take besides those that are given back to it."""
        held = len(self.dropped) if self._requeue else 0
        return max(0, self.micro_batches - held)

    def sampler(self, batches: Any) -> Requeue:
        """``batches`` (a batch sampler, one list of indices for each micro-batch) so that what an
        epoch leaves undone comes first in the next one. For the DataLoader's ``batch_sampler``, of
        which the loops are given the iterator."""
        sampler = Requeue(batches)
        self._samplers.append(sampler)
        return sampler

    # ---- the threshold ----

    @property
    def threshold(self) -> float:
        """Seconds; inf while nothing is dropped."""
        return self._threshold.seconds

    @property
    def choice(self) -> Choice | None:
        """The last measured threshold with its prediction, None before; see
        :func:`lossycoll.simulate.choose`."""
        return self._threshold.choice

    def measure_again(self) -> None:
        """Has a measured threshold measured anew, on all ranks from the next step but one on. Any
        rank may call this."""
        self._threshold.ask()

    # ---- figures ----

    def report(self) -> DropReport:
        """This rank's steps so far."""
        return replace(
            self._report,
            threshold=self._threshold.seconds,
            choices=self._threshold.choices,
            clock_jumps=self._watch.jumps,
        )

    def gather_report(self) -> list[DropReport]:
        """Every rank's, without its last step. All ranks must call this. Ranks that the group goes
        on without are left out."""
        rows = self._ranks.share(to_row(self.report()))
        return [of_row(rank, row) for rank, row in enumerate(rows) if row.any()]

    # ---- what the loop tells ----

    def used(self) -> None:
        for sampler in self._samplers:
            sampler.done()

    def failed(self, error: BaseException) -> None:
        self._failure = error

    def ended(self, loop: MicroBatches[Any]) -> None:
        """Averages over the ranks."""
        self._open = None
        self._quiet.__exit__(None, None, None)
        dropped = self._rest(loop)
        count = self._count(loop, dropped)
        works: list[Any] = []
        # The count sets out first and is needed last, so it costs no time of its own.
        self._reduction.reduce(lambda: works.append(self._ranks.start_sum(count)))
        for work in works:
            if work is not None:
                work.wait()
        left = self._ranks.left
        totals = (count[:HEAD] * (left / self._ranks.world)).tolist()
        factor = self._factor(totals[COMPLETED], left)
        self._reduction.finish(count[HEAD:], factor)
        self._note(loop, dropped, totals, factor)
        self._follow(totals, left)
        self._more = totals[MORE] > 0

    def _rest(self, loop: MicroBatches[Any]) -> int:
        """How many micro-batches were dropped. Puts aside what is to come again."""
        used, wanted = len(loop.laps) - len(loop.given_up), self.micro_batches
        if self._given is None:
            self._given_up = loop.given_up
        else:
            self.dropped = self._given[used:]
            wanted = min(wanted, len(self._given))
        return wanted - used if loop.stopped else 0

    def _count(self, loop: MicroBatches[Any], dropped: int) -> Tensor:
        """What ranks add up."""
        threshold, flags = self._threshold, self._reduction.flags
        head = torch.zeros(HEAD, dtype=torch.float64)
        # Of a step's time to the next one, what comes now is no compute.
        threshold.note(loop.laps)
        head[COMPLETED] = loop.completed
        head[DROPPED] = dropped
        head[STALE] = threshold.stale
        head[PHASE] = threshold.phase
        head[PHASE_SQUARED] = threshold.phase**2
        head[SECONDS] = threshold.seconds if math.isfinite(threshold.seconds) else 0.0
        if self._peeking is not None:
            head[MORE] = bool(self._given_up) or self._peeking.has_more()
        return torch.cat([head, flags]).to(self._ranks.device)

    def _factor(self, completed: float, left: int) -> float:
        """What makes the mean that over completed micro-batches: it is 1 / (M N) of the sum over
        the ranks, of M micro-batches and N ranks that are left."""
        if self._fixed or not completed:
            return 1.0
        return self.micro_batches * left / completed

    def _note(
        self, loop: MicroBatches[Any], dropped: int, totals: Sequence[float], factor: float
    ) -> None:
        report, laps = self._report, loop.laps
        completed, wanted = round(totals[COMPLETED]), round(totals[DROPPED])
        seconds = sum(laps)
        # What a step was slow by goes on in it; low, so that a clock that jumps isn't believed.
        pace = statistics.median_low(laps) if laps else 0.0
        self._report = replace(
            report,
            steps=report.steps + 1,
            completed=report.completed + loop.completed,
            dropped=report.dropped + dropped,
            skipped=report.skipped + len(laps) - len(loop.given_up) - loop.completed,
            seconds=report.seconds + seconds,
            saved=report.saved + dropped * pace,
            total_completed=report.total_completed + completed,
            total_dropped=report.total_dropped + wanted,
            last=DropStep(loop.completed, dropped, seconds, completed, wanted, factor),
        )
        if not self._threshold.measured:
            self._warn_of_short_steps(loop)

    def _warn_of_short_steps(self, loop: MicroBatches[Any]) -> None:
        """A given threshold may be less than one micro-batch takes."""
        short = loop.stopped and len(loop.laps) == 1
        self._short = self._short + 1 if short else 0
        if self._short == SHORT_STEPS:
            log.warning(
                "%s: one micro-batch takes %.3g s, longer than the threshold of %.3g s of "
                "DropCompute: it is the only one of %d in each step; wanted: a threshold above "
                "that of a few micro-batches, or 'auto'",
                self._ranks, loop.laps[0], self._threshold.seconds, self.micro_batches,
            )  # fmt: skip

    def _follow(self, totals: Sequence[float], left: int) -> None:
        """What all ranks do alike, now that they know of each other."""
        threshold = self._threshold
        if not threshold.measured:
            return
        mean = totals[PHASE] / left
        apart = totals[PHASE_SQUARED] / left - mean * mean
        if totals[STALE] or apart > 1e-6:
            # Phases differ where a rank was lost while they told each other.
            threshold.restart()
            log.info("%s: compute times have changed, the threshold is measured anew", self._ranks)
            return
        own = threshold.seconds if math.isfinite(threshold.seconds) else 0.0
        agreed = totals[SECONDS] / left
        if abs(agreed - own) > 1e-6 * own:
            raise MismatchError(
                f"{self._ranks}: the threshold is {own:.9g} s here and {agreed:.9g} s on average "
                f"over the ranks, of the same measured times; wanted: the same version of "
                f"lossycoll and of numpy on all ranks"
            )

    def _measure(self) -> None:
        """Takes a threshold from what all ranks have measured."""
        threshold = self._threshold
        try:
            tables = self._ranks.share(threshold.table())
        except PeerLostError as error:
            if not self._ranks.goes_on_without(error):
                raise
            threshold.restart()  # and so will others, whether they were told or not
            return
        if threshold.settle(tables, self._ranks.rank) and self._ranks.rank == 0:
            choice = threshold.choice
            assert choice is not None
            log.info(
                "%s: DropCompute's threshold is %.4g s: %.1f%% dropped, %.3g times as many "
                "micro-batches a second",
                self._ranks, choice.threshold, 100 * choice.drop_rate, choice.speedup,
            )  # fmt: skip

    # ---- what goes wrong ----

    def _check_free(self) -> None:
        """Raises what couldn't be raised, and if a loop isn't over."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise TrainingError(
                f"{self._ranks}: the last step's gradients could not be averaged when its loop was "
                f"left: {failure}"
            ) from failure
        loop = None if self._open is None else self._open()
        if loop is not None and not loop.over:
            raise TrainingError(
                f"{self._ranks}: the loop over micro-batches isn't over, so gradients aren't "
                f"averaged yet; call optimizer.step() after it, and the next loop after that. If "
                f"it was left by break while something else still holds its iterator, other ranks "
                f"wait for this one: leave it by `with drop(batches) as step: for batch in step:`"
            )

    def _check_cleared(self) -> None:
        """Raises if the gradients are still those of the last step, which would be averaged, and
        divided by the count, again."""
        if self._fixed:
            return
        grads = (parameter.grad for parameter in self._reduction.parameters)
        for grad in (grad for grad in grads if grad is not None):
            if grad.layout is torch.strided:
                if grad.any():
                    raise TrainingError(
                        f"{self._ranks}: a loop over micro-batches begins with gradients that "
                        f"aren't 0, but divides all of them by the number completed in it; call "
                        f"optimizer.zero_grad() between loops, or use divisor='fixed'"
                    )
                return

    def _before_step(self, optimizer: Optimizer) -> None:
        """Any optimizer is about to step."""
        loop = None if self._open is None else self._open()
        if self._failure is None and (loop is None or loop.over):
            return
        ours = {id(parameter) for parameter in self._reduction.parameters}
        owner = getattr(self._reduction, "optimizer", None)
        stepped = (p for entry in optimizer.param_groups for p in entry["params"])
        if optimizer is not owner and not any(id(parameter) in ours for parameter in stepped):
            return
        self._check_free()


def _given(threshold: float | str, drop_rate: float | None) -> float | None:
    """The threshold in seconds; None: it is to be measured."""
    if threshold == "auto":
        if drop_rate is not None and not (is_number(drop_rate) and 0 <= drop_rate < 1):
            raise OptionError(f"drop_rate is {drop_rate!r}, wanted a share, at least 0 and below 1")
        return None
    if not is_number(threshold) or not threshold > 0:
        raise OptionError(f"threshold is {threshold!r}, wanted seconds above 0, or 'auto'")
    if drop_rate is not None:
        raise OptionError(
            f"threshold is {threshold!r} and drop_rate {drop_rate!r}, wanted one of them; a drop "
            f"rate goes with threshold='auto'"
        )
    return float(threshold)
