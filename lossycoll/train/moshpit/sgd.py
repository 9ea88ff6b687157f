"""Training in a swarm: local steps, and now and then a round of averaging with some peers.

Sources: Ryabinin et al., "Moshpit SGD", NeurIPS 2021, algorithm 2 (local steps, then the mean over
a group). Douillard et al., "DiLoCo", 2023, algorithm 1 (an outer optimizer, whose gradient is the
way that local steps went).

Long because steps, rounds, newcomers and checkpoints change one state.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lossycoll.errors import (
    CheckpointError,
    ClosedError,
    LossyError,
    OperationTimeout,
    OptionError,
    RendezvousError,
)
from lossycoll.runtime.control.schema import printable
from lossycoll.runtime.swarm.member import RoundReport
from lossycoll.runtime.swarm.protocol import AVERAGE
from lossycoll.runtime.swarm.state_transfer import Snapshot
from lossycoll.train.common.collectives import extremes
from lossycoll.train.common.models import is_dtensor, like, local, parts
from lossycoll.train.common.packing import packed, unpacked

from . import checkpoint
from .averager import MoshpitAverager, OneRound, averaged, check_weight
from .checkpoint import load_model, load_optimizer, model_state, shards_of
from .fragments import Fragments
from .pace import Pace

GRADIENTS: Final = "gradients"
PSEUDO: Final = "pseudo-gradients"
AVERAGES: Final = ("parameters", GRADIENTS, PSEUDO)

MOST_STATES: Final = 16
"""A state may have so many times the bytes of the model's own, and MOST_BYTES besides."""
MOST_BYTES: Final = 1 << 26

MOST_DONORS: Final = 127
MOST_KEPT: Final = 0.5  # a round of which less came is none to begin with
FAILED: Final = -1  # in place of a step
LONGEST_SCHEDULE: Final = 200
log: Final = logging.getLogger("lossycoll")
AGAIN_SECONDS: Final = 0.2  # after donors that have failed
LINES: Final = "\n\t"  # torch's errors have several

Outer = Callable[[Iterable[Tensor]], Optimizer]


@dataclass(frozen=True, slots=True)
class CatchUpReport:
    """Report of a newcomer's catch-up with the others' state.

    Attributes:
        round: Number of the round in which it took part with weight 0.
        in_step: Whether its state is the others'. False: its outer optimizer is of an earlier
            round.
        tries: Number of states that it fetched.
        donors: Number of peers that sent parts of the last state.
        bytes: Bytes received, in all.
        seconds: Seconds in all, the wait for the others' round included.
    """

    round: int
    in_step: bool
    tries: int
    donors: int
    bytes: int
    seconds: float


class MoshpitSGD(Optimizer):
    """Optimizer of a swarm's peer, which takes local steps and averages after some of them.

    Schedulers, clipping and ``GradScaler`` take it as a torch optimizer: ``param_groups`` and
    ``state`` are those of the wrapped optimizers.

    Args:
        model: Model to train, compiled or not. Frozen parameters are ignored.
        optimizer: Optimizer of the model's parameters: any of torch's, or several.
        averager: ``MoshpitAverager(swarm, model)``, which averages floating-point buffers as well,
            or ``MoshpitAverager(swarm, model.parameters())``.
        every: Number of steps from round to round.
        every_seconds: Seconds after the beginning of a round, after which the next step
            begins another one, in place of ``every``.
        target_samples: Number of samples of all peers together after which a round begins, in place
            of ``every``. The argument ``weight`` of :meth:`step` counts samples. Each peer's
            contribution is weighted by its samples, so no peer waits for another one's steps.
        average: ``"parameters"``: each step is taken at once, and a round replaces the parameters
            by a mean. ``"gradients"``: gradients add up over calls of :meth:`step` from round to
            round, and their mean over calls and peers makes one step of the optimizer.
            ``"pseudo-gradients"``: with ``outer``, peers average the distance of their parameters
            from the outer optimizer's; it suits packets of few bits.
        outer: Function that makes the outer optimizer from parameters, as in ``lambda p:
            torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)``. Its gradient is the distance
            between a round's mean and the end of the previous round. None: the mean itself is
            taken. Not with gradients.
        delayed: Whether a round runs beside the next steps. With ``target_samples`` or
            ``every_seconds`` no step waits: the first one after the round's end adds its change.
            With ``every`` the round has the next ``every`` steps, and the last of these waits for
            its end, so that all peers take equally many steps from round to round. Not with
            gradients.
        fragments: Number of parts of the model, each of some rows of all tensors. A round averages
            one part, so traffic is divided by this number. Not with gradients or ``max_norm``.
        timeout: Seconds for a round.
        schedule: Name of the learning rate's schedule, and of whatever else must be the same on all
            peers, such as ``"cosine to 20000 samples"``. Peers with another name are refused.

    Raises:
        OptionError: An argument is invalid, or the averager isn't of the model's parameters.
        RendezvousError: Other peers have other settings.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        averager: MoshpitAverager,
        *,
        every: int = 1,
        every_seconds: float | None = None,
        target_samples: int | None = None,
        average: str = "parameters",
        outer: Outer | None = None,
        delayed: bool = False,
        fragments: int = 1,
        timeout: float = 60.0,
        schedule: str = "",
    ) -> None:
        """Long because each argument that can't be is named."""
        self._inner: list[Optimizer] = []  # before Optimizer's __init__ looks at the groups
        self._parameters = averaged(model.parameters())
        super().__init__(self._parameters or [{"params": []}], {})
        self._pace = Pace(averager, every, every_seconds, target_samples, timeout)
        if average not in AVERAGES:
            raise OptionError(f"average is {average!r}, wanted one of {', '.join(AVERAGES)}")
        if average == GRADIENTS and (outer or delayed or fragments != 1 or every_seconds):
            raise OptionError(
                "outer, delayed, fragments and every_seconds aren't for average='gradients'"
            )
        if average == PSEUDO and outer is None:
            raise OptionError(
                "average is 'pseudo-gradients' without outer, wanted outer=lambda p: "
                "torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True), say"
            )
        _check_schedule(schedule)
        if fragments != 1 and averager.bounds:
            raise OptionError(f"fragments is {fragments} with max_norm, wanted one of the two")
        self._fragments = Fragments(fragments)
        buffers = [one for one in model.buffers() if one.is_floating_point()]
        has_buffers = averager.count == len(self._parameters) + len(buffers)
        self._buffers = buffers if has_buffers else []
        averager.check(self._locals)
        self._inner = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._averager = averager
        self._sick_buffers: list[str] = []  # names that were told
        self._is_sick = False  # values weren't finite as the latest round began, or aren't since
        self._skipped = 0  # steps since then that were none, as their gradients weren't finite
        self._calls = 0  # calls of :meth:`step` whose gradients have added up
        self._rest: dict[int, Tensor] = {}
        """Rest of the latest mean that parameters of 16 bits can't hold."""
        self._of_gradients, self._of_pseudo = average == GRADIENTS, average == PSEUDO
        self._timeout = timeout
        self._steps = 0
        self._anchors = [
            [
                one.clone().float()
                for one in self._fragments.rows(list(map(local, self._parameters)), part)
            ]
            for part in range(fragments if outer else 0)
        ]  # parameters of the outer optimizer, of each fragment, as its latest round ended
        self._outer = outer(self._anchor) if outer else None
        self._delayed = delayed
        self._round: OneRound | None = None
        self._model = model
        self._shards = shards_of(model)
        if self._shards and (target_samples or every_seconds):
            raise OptionError(
                f"target_samples is {target_samples} and every_seconds {every_seconds}, and the "
                f"model has shards (fully_shard), whose ranks could begin a round at unlike steps: "
                f"wanted every="
            )
        self._latest = 0  # the round that the parameters have had last
        self._latest_at = 0  # after how many steps it began
        self._offers = False
        self._changing = threading.Lock()
        """Lock that a donor of the state takes between two changes."""
        averager.settle(
            {
                AVERAGE: average,
                "every": every,
                "every_seconds": every_seconds,
                "target_samples": target_samples,
                "outer": None if self._outer is None else type(self._outer).__name__,
                "delayed": delayed,
                "fragments": fragments,
                # With gradients all peers make the same steps.
                **({"optimizer": " and ".join(self._kinds())} if self._of_gradients else {}),
                **({"schedule": schedule} if schedule else {}),
            },
            self._pace.target,
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the wrapped optimizers."""
        if len(self._inner) == 1:
            return self._inner[0].param_groups
        return [group for one in self._inner for group in one.param_groups]

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        """They stay those of the optimizers inside."""

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """State of the wrapped optimizers."""
        found: defaultdict[Tensor, Any] = defaultdict(dict)
        for one in self._inner:
            found.update(one.state)
        return found

    @state.setter
    def state(self, state: Any) -> None:
        """It stays that of the optimizers inside."""

    @property
    def _locals(self) -> list[Tensor]:
        """This rank's part of each parameter, and the buffers; without autograd."""
        return [local(one) for one in (*self._parameters, *self._buffers)]

    @property
    def samples(self) -> int:
        """Samples of the swarm when this peer's latest round began: the sum of all steps'
        ``weight``. A schedule by it is the same for all peers, newcomers included."""
        return self._pace.samples

    @property
    def round(self) -> int:
        """Number of the latest round that the parameters include."""
        return self._latest

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as the optimizer does. Between rounds of gradients they are kept and add
        up.

        Args:
            set_to_none: Whether gradients become None rather than 0.
        """
        if not self._calls:
            for one in self._inner:
                one.zero_grad(set_to_none)

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, weight: float = 1.0
    ) -> RoundReport | None:
        """Take one step, and run a round of averaging if one is due.

        A round that fails changes nothing: training continues from this peer's state. If the report
        has ``newer`` samples of another peer's state, this peer has taken that state.

        Args:
            closure: Function that computes the gradients, if they aren't there yet.
            weight: Samples of this step, 0 to 1e6. They are this peer's weight in a round that
                begins now. With ``target_samples``, the weight is all its samples since its latest
                round.

        Returns:
            The report of a round that ended in this step, or None. If none began within
            ``timeout``, ``failure`` says why.

        Raises:
            OptionError: The weight is out of range.
            RendezvousError: The directory refuses this peer.
        """
        check_weight(weight)
        if closure is not None:
            with torch.enable_grad():
                closure()
        self._pace.since += round(weight)
        if self._of_gradients:
            return self._step_by_gradients(weight)
        with self._changing:
            if not self._is_sick or self._has_finite_gradients():
                for one in self._inner:
                    one.step()
            self._steps += 1
        by_steps = self._pace.is_by_steps
        if not by_steps and self._round is not None and not self._round.is_over:
            return None  # no step waits for it
        report = None if by_steps else self.finish()
        if not self._pace.is_due(self._steps):
            return report
        report = self.finish() or report
        self._pace.tell()
        begun = self._new_round(self._pace.weight(weight), self._timeout)
        if self._delayed:
            begun.start()
            self._round = begun
            return report
        begun.run()  # Ctrl-C in it leaves no round behind
        self._round = begun
        return self.finish()

    def finish(self) -> RoundReport | None:
        """Wait for a round that runs beside the steps, and apply its change. Call it after the last
        step.

        Returns:
            The round's report, or None if none was running.

        Raises:
            RendezvousError: The directory refuses this peer.
        """
        one = self._round
        if one is None:
            return None
        try:
            report = one.result()  # Ctrl-C in it leaves the round to the next call
        except Exception:
            self._round = None
            raise
        self._round = None
        self._pace.formed(one.formed)
        if report.newer:
            return self._take_newer(report)
        if report.round < 0:  # none began
            return report
        with self._changing, torch.no_grad():
            part, sick = self._fragments.of(report.round), bool(report.left_out)
            # After a round that fails values are as before, and the outer optimizer has no step.
            sound = bool(report.failure) or self._take(one.before, one.values, part, sick=sick)
            if sick or not sound:
                self._heal()
            self._is_sick = sick or not sound or self._skipped > 0
            self._skipped = 0
            self._has_had(report, one.at)
        self._offer(report)
        return report

    def _has_had(self, report: RoundReport, at: int) -> None:
        self._latest, self._latest_at = report.round, at
        self._pace.has_had(report.samples)
        if report.left_out and not self._buffers:
            self._tell_sick_buffers()

    def _tell_sick_buffers(self) -> None:
        named = self._model.named_buffers()
        sick = [name for name, one in named if not bool(one.isfinite().all())]
        if sick and sick != self._sick_buffers:
            log.warning(
                "buffers of this peer aren't finite either, and rounds average parameters alone: "
                "%s; catch_up() takes another peer's, MoshpitAverager(swarm, model) averages them",
                ", ".join(sick[:4]) + (" ..." if len(sick) > 4 else ""),
            )
        self._sick_buffers = sick

    def _take_newer(self, report: RoundReport) -> RoundReport:
        """Another peer has loaded a newer state: this one's is lost."""
        log.warning(
            "peer %r has a state of %d samples, and another peer one of %d: it takes the newer one",
            self._averager.name,
            self.samples,
            report.newer,
        )
        try:
            self.catch_up(self._timeout)
        except LossyError as error:
            return replace(report, failure=f"{report.failure}, and wasn't taken: {error}")
        return report

    def _values(self) -> list[Tensor]:
        """Copies of what is averaged, in float32, what 16 bits couldn't hold included."""
        values = [one.clone().float() for one in self._locals]
        for number, rest in self._rest.items():
            values[number] += rest
        return values

    def _new_round(self, weight: float, timeout: float) -> OneRound:
        origin: list[Tensor] = []
        if self._of_pseudo:
            origin = [torch.empty_like(local(p), dtype=torch.float32) for p in self._parameters]
            for part, anchors in enumerate(self._anchors):
                for view, anchor in zip(self._fragments.rows(origin, part), anchors, strict=True):
                    view.copy_(anchor)
        how = weight, timeout, self._steps, self._fragments, origin
        return OneRound(self._averager, self._values(), *how)

    def _take(
        self, before: list[Tensor], means: list[Tensor], part: int, *, sick: bool = False
    ) -> bool:
        """Adds what a round has changed in a fragment: steps that were taken meanwhile stay. False:
        some that were taken meanwhile weren't finite, and means stand for what they left.
        ``sick``: not all of ``before`` is finite, nor of ``means`` where none came."""
        rows, sound = self._fragments.rows, True
        ends = rows(means, part)
        if self._outer is not None:
            anchors = self._anchors[part]
            for anchor, mean in zip(anchors, ends, strict=False):
                gradient = -mean if self._of_pseudo else anchor - mean
                anchor.grad = _finite(gradient) if sick else gradient
            self._outer.step()
            for anchor in anchors:  # the next fragment's step is none of this one
                anchor.grad = None
            ends = [*anchors, *ends[len(anchors) :]]
        whole = rows(self._values() if self._delayed else before, part)
        begins, owns = rows(before, part), rows(self._locals, part)
        rests = rows(self._rests(), part)
        for number, (own, begin, end) in enumerate(zip(owns, begins, ends, strict=True)):
            value = end
            if self._delayed:
                moved = whole[number] + (end - begin)
                finite = moved.isfinite()
                sound = sound and bool(finite.all())
                value = torch.where(finite, moved, end)
            own.copy_(value)
            if own.dtype != torch.float32:
                rests[number].copy_(value - own.float())
        return sound

    def _has_finite_gradients(self) -> bool:
        """False: this step is skipped. Values may still not be finite for which no mean came, and a
        step would spread that to all others. The next rounds bring what is left."""
        found = all(
            bool(local(p.grad).isfinite().all()) for p in self._parameters if p.grad is not None
        )
        self._skipped += not found
        return found

    def _heal(self) -> None:
        """What isn't finite here after a round that healed its part, and would spoil it in the next
        step: parameters outside of it take the outer ones, moments begin as in a first step."""
        for part, anchors in enumerate(self._anchors):
            owns = self._fragments.rows(list(map(local, self._parameters)), part)
            for own, anchor in zip(owns, anchors, strict=True):
                own.copy_(torch.where(own.isfinite(), own, anchor.to(own.dtype)))
        for one in self._inner:
            for parameter, kept in list(one.state.items()):
                floats = [
                    x for x in kept.values() if isinstance(x, Tensor) and x.is_floating_point()
                ]
                if not all(bool(local(x).isfinite().all()) for x in floats):
                    del one.state[parameter]

    def _rests(self) -> list[Tensor]:
        """What parameters of 16 bits can't hold. Those of 32, which hold all, stand for theirs."""
        averages = self._locals
        for number, one in enumerate(averages):
            if one.dtype != torch.float32 and number not in self._rest:
                self._rest[number] = torch.zeros_like(one, dtype=torch.float32)
        return [self._rest.get(number, one) for number, one in enumerate(averages)]

    @property
    def _anchor(self) -> list[Tensor]:
        return [one for part in self._anchors for one in part]

    def _step_by_gradients(self, weight: float) -> RoundReport | None:
        self._steps += 1
        self._calls += 1
        if not self._pace.is_due(self._steps):
            return None
        calls, self._calls = self._calls, 0
        with torch.no_grad():
            means = [
                torch.zeros_like(local(p)) if p.grad is None else local(p.grad) / calls
                for p in self._parameters
            ]
            means += [buffer.clone() for buffer in self._buffers]
            self._pace.tell()
            report = self._average_gradients(means, self._pace.weight(weight), self._timeout)
        if report.newer:
            return self._take_newer(report)
        self._step_on(means, report)
        self._offer(report)
        return report

    def _average_gradients(self, means: list[Tensor], weight: float, timeout: float) -> RoundReport:
        count = len(self._parameters)
        return self._averager.step_on(means, weight, timeout, increments=count)

    def _step_on(self, means: list[Tensor], report: RoundReport) -> None:
        count = len(self._parameters)
        for parameter, mean in zip(self._parameters, means[:count], strict=True):
            # Of a gradient that wasn't finite, no mean came for what still isn't.
            parameter.grad = like(parameter, _finite(mean) if report.left_out else mean)
        with self._changing:
            for buffer, mean in zip(self._buffers, means[count:], strict=True):
                buffer.copy_(mean)
            for one in self._inner:
                one.step()
            if report.round >= 0:
                self._has_had(report, self._steps)

    # ---- newcomers ----

    def catch_up(
        self, timeout: float = 60.0, *, donors: int = 4, tries: int = 3
    ) -> CatchUpReport | None:
        """Take the state of the other peers, before this peer's first step.

        The state is the model's parameters and buffers, and the optimizers' state, of peers that
        have had a round. Parts that this peer already has aren't sent. Then this peer takes part in
        the others' next round with weight 0, so it begins where they end. If a round has passed
        meanwhile, and there is an outer optimizer or gradients are averaged, this peer fetches the
        changes and tries again.

        Args:
            timeout: Seconds for all of it, the wait for the others' next round included.
            donors: Maximum number of peers that send the state at once, up to 127.
            tries: Maximum number of states to fetch because a round has passed. With the last one,
                this peer begins all the same if parameters are averaged (``in_step`` is False); an
                outer optimizer then stays behind.

        Returns:
            The report; None: no peer has a newer state, so this peer begins with its own.

        Raises:
            OptionError: An argument can't be.
            OperationTimeout: The others had no round within ``timeout``. With gradients: a further
                round passed during each try.
            CheckpointError: The others' state isn't of this model or these optimizers. This peer's
                own state hasn't changed.
            LossyError: No donor has all of the state, or all donors have gone.
        """
        _check_catch_up(donors, tries)
        self.finish()
        until = time.monotonic() + timeout
        if not self._shards:
            return self._catch_up_alone(until, donors, tries)
        return self._catch_up_together(until, donors, tries)

    def _catch_up_together(self, until: float, donors: int, tries: int) -> CatchUpReport | None:
        """:meth:`catch_up` of the ranks of one peer, which come to one step: those that are behind
        have the others' next round. If one fails, all do."""
        shard = next(filter(is_dtensor, self._shards.values()))
        report: CatchUpReport | None = None
        greatest: int | None = None
        while True:
            failed: LossyError | None = None
            try:
                if greatest is None or self._latest_at < greatest:
                    how = {"is_behind": greatest is not None}
                    report = self._catch_up_alone(until, donors, tries, **how)
            except LossyError as error:
                failed = error
            at = FAILED if failed else self._latest_at
            least, greatest = extremes(at, shard)
            if least == FAILED:
                raise failed or OperationTimeout(
                    "another rank of this peer can't come to the others' step"
                )
            if least == greatest:
                return report

    def _catch_up_alone(
        self, until: float, donors: int, tries: int, *, is_behind: bool = False
    ) -> CatchUpReport | None:
        """:meth:`catch_up` of this rank. ``is_behind``: it has a round even with the newest state.

        Long because it explains each way in which a try ends.
        """
        begin, came, number = time.monotonic(), 0, 0
        own = first = self._snapshot()
        most = MOST_STATES * len(own.data) + MOST_BYTES
        failed: LossyError | None = None
        while (left := until - time.monotonic()) > 0:
            try:
                taken = self._averager.fetch_state(own, donors, most, left)
            except (ClosedError, RendezvousError, OperationTimeout):
                raise
            except LossyError as error:  # others may have it
                failed = error
                time.sleep(min(AGAIN_SECONDS, left))
                continue
            if taken is None and failed is not None and own is first:
                if self._averager.peers == 1:  # all others have gone
                    raise failed
                # For a while the directory names none that couldn't be reached.
                time.sleep(min(AGAIN_SECONDS, left))
                continue
            is_newer = taken is not None and taken.snapshot is not own
            if not is_newer and own is first and not is_behind:
                return None
            sources = 0 if taken is None else taken.donors
            if taken is not None and is_newer:
                own, came = taken.snapshot, came + taken.bytes
                skeleton, data, newest = own.skeleton, own.data, own.round
                self._take_whole(
                    partial(unpacked, skeleton, data), newest, first, "the others' state"
                )
                self._pace.samples = own.samples
                self._pace.tell()
            number += 1
            report = self._join_in(until - time.monotonic())
            if report.failure or report.kept > MOST_KEPT:
                number -= 1
                continue
            in_step = self._is_in_step(own, report)
            if in_step or (number >= tries and not self._of_gradients):
                self._offer(report)
                took = time.monotonic() - begin
                return CatchUpReport(report.round, in_step, number, sources, came, took)
        raise failed or OperationTimeout(f"no round of the others within {until - begin:g} s")

    def _is_in_step(self, began_with: Snapshot, report: RoundReport) -> bool:
        """Return whether this peer is where the others are, after its first round."""
        if self._outer is None and not self._of_gradients:
            # The mean is all that they have in common. Moments are each peer's own: those of some
            # rounds ago are as good, and by the time that newer ones came they would be old, too.
            return True
        # A round that runs beside steps has begun when the one before is taken.
        follows = report.round - began_with.round - 1 <= int(self._delayed)
        return follows and (report.kept == 0 or not self._of_gradients)

    def _join_in(self, timeout: float) -> RoundReport:
        """The others' next round, to which this peer brings nothing. Then it has had as many steps
        as they had when it began."""
        timeout = max(1.0, timeout)
        before, at = self._latest, self._latest_at
        report = self._empty_round(timeout)
        # A state doesn't say which round comes next: this one is known by its number.
        self._steps = self._latest_at = at + max(1, report.round - before) * self._pace.every
        return report

    def _empty_round(self, timeout: float) -> RoundReport:
        if self._of_gradients:
            means = [torch.zeros_like(local(p)) for p in self._parameters]
            means += [buffer.clone() for buffer in self._buffers]
            report = self._average_gradients(means, 0.0, timeout)
            if report.kept < 1:
                self._step_on(means, report)
                for one in self._inner:
                    one.zero_grad()
            return report
        empty = self._new_round(0.0, timeout)
        empty.run()
        if (report := empty.result()).newer:
            return report  # of a third peer: it is taken next
        self._round = empty
        ended = self.finish()
        assert ended is not None
        return ended

    def _offer(self, report: RoundReport) -> None:
        """A peer that has had a round, if only by itself, has a state that others may take."""
        if not report.failure and (report.kept < 1 or len(report.members) == 1):
            self._offer_state()

    def _offer_state(self) -> None:
        if not self._offers:
            self._offers = True
            self._averager.offer(self._snapshot)

    def _snapshot(self) -> Snapshot:
        with self._changing:
            # A donor's thread reads what this one's stream of the device may not have written yet.
            if (device := self._locals[0].device).type != "cpu":
                torch.accelerator.synchronize(device)
            return Snapshot(self._latest, *packed(self._state()), self.samples)

    def _state(self) -> dict[str, Any]:
        return {
            "kinds": self._kinds(),
            "model": model_state(self._model, self._shards),
            "training": parts(self.state_dict()),
            "latest at": self._latest_at,
        }

    def _kinds(self) -> list[Any]:
        """Kinds of the optimizers, which a state must have to be for them."""
        outer = [] if self._outer is None else [self._outer]
        return [type(one).__name__ for one in (*self._inner, *outer)]

    def _take_whole(
        self, state_of: Callable[[], Any], latest: int, own: Snapshot, whose: str
    ) -> None:
        try:
            state = state_of()
            if state["kinds"] != self._kinds():
                raise OptionError(f"it is of {state['kinds']}, and here are {self._kinds()}")
            self._take_state(state, latest)
        except Exception as error:  # whatever the state may be
            self._take_state(unpacked(own.skeleton, own.data), own.round)
            raise CheckpointError(
                f"{whose} isn't one of this model and its optimizers: "
                f"{printable(str(error), but=LINES)}"
            ) from error

    def _take_state(self, state: Any, latest: int) -> None:
        with self._changing:
            load_model(self._model, state["model"], self._shards)
            self._rest = {}
            self.load_state_dict(copy.deepcopy(state["training"]))  # torch keeps what it is given
            self._latest, self._latest_at = latest, int(state.get("latest at", self._latest_at))

    # ---- checkpoints ----

    def save(self, path: checkpoint.PathLike) -> int:
        """Write a checkpoint: the model's parameters and buffers, and the optimizers' state. Any
        peer may write it, and any peer may load it. The former file stays until the new one is on
        the disk.

        Args:
            path: Path of the file, in a folder that exists.

        Returns:
            Bytes of the file.

        Raises:
            CheckpointError: The file can't be written, for example because the disk is full. This
                peer and the others are unaffected.
        """
        state = self._state()
        checkpoint.check_finite(state["model"])
        memory = {"of": self._averager.name, "parts": self._averager.memory()}
        return checkpoint.write(path, {**state, "memory": memory})

    def load(self, path: checkpoint.PathLike) -> None:
        """Load a checkpoint that :meth:`save` of any peer wrote. Later peers may take the state by
        :meth:`catch_up`. If others train already, call :meth:`catch_up` to fetch the changes since.

        Args:
            path: Path of the file.

        Raises:
            CheckpointError: The file is missing or incomplete, or isn't of this model and these
                optimizers. This peer's own state hasn't changed.
        """
        self.finish()
        own = self._snapshot()
        memory: dict[int, Tensor] = {}

        def take(state: Any) -> None:
            known = state if isinstance(state, dict) else {}
            checkpoint.check_finite(known.get("model"))
            kept = checkpoint.memory_of(known, self._averager.name)
            self._take_whole(lambda: state, own.round, own, "the state")
            memory.update(kept)

        checkpoint.read(path, take)
        self._averager.remember(memory)
        self._offer_state()
        self._averager.progress(self.samples, 0, claims=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, for a checkpoint of your own beside the model's.

        Returns:
            The steps so far, the optimizer's state, and the outer optimizer's.
        """
        return {
            "steps": self._steps,
            "samples": self._pace.samples,
            "since": self._pace.since,
            "optimizers": [one.state_dict() for one in self._inner],
            "anchor": [anchor.clone() for anchor in self._anchor],
            "outer": None if self._outer is None else self._outer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, after the model's has been loaded.

        Args:
            state: The state that :meth:`state_dict` of any peer returned.

        Raises:
            OptionError: The state is of another ``outer``, or of other parameters.
        """
        if (state["outer"] is None) != (self._outer is None):
            raise OptionError("the checkpoint has an outer optimizer and this has none, or reverse")
        shapes = [tuple(anchor.shape) for anchor in self._anchor]
        if [tuple(anchor.shape) for anchor in state["anchor"]] != shapes:
            raise OptionError("the checkpoint is of parameters of other shapes")
        if type(state["steps"]) is not int or state["steps"] < 0:
            raise OptionError(f"the checkpoint has had {state['steps']!r} steps")
        for name in ("samples", "since"):
            if type(state[name]) is not int or not 0 <= state[name] < 1 << 52:
                raise OptionError(f"the checkpoint has had {state[name]!r} samples")
        self._steps = state["steps"]
        self._pace.continue_from(state["samples"] + state["since"])
        self._latest_at = self._steps - self._steps % self._pace.every
        for own, theirs in zip(self._inner, state["optimizers"], strict=True):
            load_optimizer(own, theirs)
        with torch.no_grad():
            for anchor, saved in zip(self._anchor, state["anchor"], strict=True):
                anchor.copy_(saved)
        if self._outer is not None:
            load_optimizer(self._outer, state["outer"])


def _finite(values: Tensor) -> Tensor:
    """The same, with 0 for what isn't finite."""
    return torch.where(values.isfinite(), values, 0.0)


def _check_schedule(name: str) -> None:
    if not name.isprintable() or {*name} & {*",="} or len(name) > LONGEST_SCHEDULE:
        raise OptionError(
            f"schedule is {name!r:.220}, wanted at most {LONGEST_SCHEDULE} characters that can be "
            f"printed, without commas and equals signs"
        )


def _check_catch_up(donors: int, tries: int) -> None:
    if not 1 <= donors <= MOST_DONORS or tries < 1:
        raise OptionError(
            f"donors={donors} and tries={tries}, wanted 1 to {MOST_DONORS}, and 1 or more"
        )
