"""Training in a swarm: local steps, and now and then a round of averaging with some peers.

Source: Ryabinin et al., "Moshpit SGD", NeurIPS 2021, algorithm 2 (local steps, then the mean over a
group).
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lossycoll.errors import LossyError, OptionError
from lossycoll.runtime.swarm.member import RoundReport
from lossycoll.runtime.swarm.protocol import AVERAGE
from lossycoll.train.common.models import local

from . import checkpoint
from .averager import Fragments, MoshpitAverager, OneRound, averaged, check_seconds, check_weight
from .newcomer import CatchUpReport, Newcomer
from .pace import Pace
from .replica import GRADIENTS, PSEUDO, Outer, Replica

AVERAGES: Final = ("parameters", GRADIENTS, PSEUDO)
LONGEST_SCHEDULE: Final = 200
log: Final = logging.getLogger("lossycoll")


class MoshpitSGD(Optimizer):
    """Optimizer of a swarm's peer, which takes local steps and averages after some of them.

    Schedulers, clipping and ``GradScaler`` take it as a torch optimizer: ``param_groups`` and
    ``state`` are those of the wrapped optimizers.

    Args:
        model: Model to train, compiled or not. Frozen parameters are ignored.
        optimizer: Optimizer of the model's parameters: any of torch's but LBFGS, or several.
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

    _step_supports_amp_scaling = True
    """GradScaler has :meth:`step` skip overflows: it would skip the round that heals this peer, as
    well."""

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
        super().__init__(averaged(model.parameters()) or [{"params": []}], {})
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
        self._inner = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._averager = averager
        self._replica = Replica(
            *(model, self._inner, averager, self._pace),
            average=average,
            outer=outer,
            delayed=delayed,
            fragments=Fragments(fragments),
        )
        _check_optimizers(self._inner, model)
        shared = set.intersection(*(set(one.defaults) for one in self._inner))
        # For schedulers.
        self.defaults: dict[str, Any] = {name: self._inner[0].defaults[name] for name in shared}
        if self._replica.shards and (target_samples or every_seconds):
            raise OptionError(
                f"target_samples is {target_samples} and every_seconds {every_seconds}, and the "
                f"model has shards (fully_shard), whose ranks could begin a round at unlike steps: "
                f"wanted every="
            )
        self._timeout = check_seconds(timeout)
        self._round: OneRound | None = None
        self._sums: list[Tensor] = []  # of gradients since the latest round
        self._calls = 0  # calls of :meth:`step` whose gradients they have
        kinds = " and ".join(self._replica.kinds())
        averager.settle(
            {
                AVERAGE: average,
                "every": every,
                "every_seconds": every_seconds,
                "target_samples": target_samples,
                "outer": None if outer is None else type(self._replica.outer).__name__,
                "delayed": delayed,
                "fragments": fragments,
                # With gradients all peers make the same steps.
                **({"optimizer": kinds} if self._replica.by_gradients else {}),
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer.

        Args:
            param_group: The group. Rounds don't average parameters that were frozen before.

        Raises:
            OptionError: There are several optimizers: add it to one of them.
        """
        if len(self._inner) > 1:
            raise OptionError("there are several optimizers inside: add the group to one of them")
        if self._inner:
            self._inner[0].add_param_group(param_group)
        else:  # by Optimizer's __init__
            super().add_param_group(param_group)

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
    def samples(self) -> int:
        """Samples of the swarm when this peer's latest round began: the sum of all steps'
        ``weight``. A schedule by it is the same for all peers, newcomers included."""
        return self._pace.samples

    @property
    def round(self) -> int:
        """Number of the latest round that the parameters include."""
        return self._replica.latest

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
        weight = check_weight(weight)
        if closure is not None:
            with torch.enable_grad():
                closure()
        self._pace.since += round(weight)
        overflows = self._unscale()
        if self._replica.by_gradients:
            return self._step_by_gradients(weight, overflows=overflows)
        self._replica.step(skips=overflows)
        by_steps = self._pace.is_by_steps
        if not by_steps and self._round is not None and not self._round.report.done():
            return None  # no step waits for it
        report = None if by_steps else self.finish()
        if not self._pace.is_due(self._replica.steps):
            return report
        report = self.finish() or report
        self._pace.tell()
        begun = self._replica.new_round(self._pace.weight(weight), self._timeout)
        if self._replica.is_delayed:
            begun.start()
            self._round = begun
            return report
        begun.run()  # Ctrl-C in it leaves no round behind
        self._round = begun
        return self.finish()

    def _unscale(self) -> bool:
        """Divide gradients by the scale of a ``GradScaler`` that calls :meth:`step`; return whether
        it has found some that aren't finite."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            grads = [one.grad for group in self.param_groups for one in group["params"]]
            for grad in grads:
                if grad is not None:
                    local(grad).div_(scale)
        return found is not None and bool(found)

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
        wait([one.report])  # Ctrl-C in it leaves the round to the next call
        self._round = None
        report = one.report.result()
        if report.round >= 0:
            self._pace.formed(one.began + report.waited)
        if report.newer:
            return self._take_newer(report)
        if report.round >= 0:
            self._replica.take(one, report)
            self._replica.offer(report)
        return report

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

    def _step_by_gradients(self, weight: float, *, overflows: bool) -> RoundReport | None:
        """Sums lie apart from the gradients: what clips or unscales them has those of one call."""
        replica = self._replica
        replica.steps += 1
        if not self._sums:
            self._sums = [torch.zeros_like(local(one)) for one in replica.parameters]
        self._calls += not overflows
        for total, parameter in zip(self._sums, replica.parameters, strict=True):
            if parameter.grad is not None and not overflows:
                total.add_(local(parameter.grad))
            parameter.grad = None
        if not self._pace.is_due(replica.steps):
            return None
        # Of calls that all overflowed it is 0 / 0, which the averager leaves out.
        means = [total / self._calls for total in self._sums]
        self._sums, self._calls = [], 0
        self._pace.tell()
        report = self._average_gradients(means, self._pace.weight(weight), self._timeout)
        if report.newer:
            return self._take_newer(report)
        replica.step_by(means, report)
        replica.offer(report)
        return report

    def _average_gradients(self, means: list[Tensor], weight: float, timeout: float) -> RoundReport:
        """Extends ``means`` by the buffers, whose means are taken with them."""
        count = len(means)
        means += [buffer.clone() for buffer in self._replica.buffers]
        return self._averager.step_on(means, weight, timeout, increments=count)

    def _empty_round(self, timeout: float) -> RoundReport:
        """The others' next round, to which this peer brings nothing."""
        replica = self._replica
        if replica.by_gradients:
            means = [torch.zeros_like(local(p)) for p in replica.parameters]
            report = self._average_gradients(means, 0.0, timeout)
            if report.kept < 1:
                replica.step_by(means, report)
                self.zero_grad()
            return report
        empty = replica.new_round(0.0, timeout)
        empty.run()
        if (report := empty.report.result()).newer:
            return report  # of a third peer: it is taken next
        self._round = empty
        return self.finish() or report

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
        newcomer = Newcomer(self._replica, self._empty_round, donors, tries)
        until = time.monotonic() + check_seconds(timeout)
        self.finish()
        return newcomer.catch_up(until)

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
        state = self._replica.state()
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
        own = self._replica.snapshot()
        memory: dict[int, Tensor] = {}

        def take(state: Any) -> None:
            known = state if isinstance(state, dict) else {}
            checkpoint.check_finite(known.get("model"))
            kept = checkpoint.memory_of(known, self._averager.name)
            self._replica.take_state(lambda: state, own.round, own, "the state")
            memory.update(kept)

        checkpoint.read(path, take)
        self._averager.remember(memory)
        self._replica.offer()
        self._averager.progress(self.samples, 0, claims=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, for a checkpoint of your own beside the model's.

        Returns:
            The steps so far, the optimizer's state, and the outer optimizer's.
        """
        return self._replica.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, after the model's has been loaded.

        Args:
            state: The state that :meth:`state_dict` of any peer returned.

        Raises:
            OptionError: The state is of another ``outer``, or of other parameters.
        """
        self._replica.load_state_dict(state)


def _check_optimizers(inner: Sequence[Optimizer], model: nn.Module) -> None:
    own = set(map(id, model.parameters()))
    for one in inner:
        if isinstance(one, torch.optim.LBFGS):
            raise OptionError("optimizer is LBFGS, whose steps need a closure; wanted another one")
        if not any(id(each) in own for group in one.param_groups for each in group["params"]):
            raise OptionError(
                f"optimizer: {type(one).__name__} has no parameter of the model; make it of the "
                f"model's parameters, after fully_shard()"
            )
    if not inner:
        raise OptionError("optimizer is an empty list, wanted one optimizer or several")


def _check_schedule(name: str) -> None:
    if not name.isprintable() or {*name} & {*",="} or len(name) > LONGEST_SCHEDULE:
        raise OptionError(
            f"schedule is {name!r:.220}, wanted at most {LONGEST_SCHEDULE} characters that can be "
            f"printed, without commas and equals signs"
        )
