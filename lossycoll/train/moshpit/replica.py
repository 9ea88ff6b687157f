"""A peer's copy of the training: its model and optimizers, and how a round's means come into them.

Source: Douillard et al., "DiLoCo", 2023, algorithm 1 (an outer optimizer, whose gradient is the
way that local steps went).
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lossycoll.errors import CheckpointError, OptionError
from lossycoll.runtime.control.schema import printable
from lossycoll.runtime.swarm.member import RoundReport
from lossycoll.runtime.swarm.state_transfer import Snapshot
from lossycoll.train.common.models import like, local, parts
from lossycoll.train.common.packing import packed, unpacked

from .averager import Fragments, MoshpitAverager, OneRound, averaged
from .checkpoint import load_model, load_optimizer, model_state, shards_of
from .pace import Pace

GRADIENTS: Final = "gradients"
PSEUDO: Final = "pseudo-gradients"
MOST_COUNT: Final = (1 << 53) - 1  # samples or steps: more than a directory believes
LINES: Final = "\n\t"  # torch's errors have several
log: Final = logging.getLogger("lossycoll")

Outer = Callable[[Iterable[Tensor]], Optimizer]


class Replica:
    """Model, optimizers and counts of one peer. ``inner`` makes local steps. The other arguments
    are :class:`.sgd.MoshpitSGD`'s.

    Attributes:
        steps: Local steps so far.
        latest: Number of the latest round that the parameters include.
        latest_at: Steps before it.
        is_sick: Whether values weren't finite as the latest round began, or aren't since.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Sequence[Optimizer],
        averager: MoshpitAverager,
        pace: Pace,
        *,
        average: str,
        outer: Outer | None,
        delayed: bool,
        fragments: Fragments,
    ) -> None:
        self.parameters = averaged(model.parameters())
        buffers = [one for one in model.buffers() if one.is_floating_point()]
        has_buffers = averager.count == len(self.parameters) + len(buffers)
        self.buffers = buffers if has_buffers else []
        averager.check(self.locals)
        self._model, self.averager, self.pace = model, averager, pace
        self.shards = shards_of(model)
        self.inner, self.fragments, self.is_delayed = inner, fragments, delayed
        self.by_gradients, self._is_pseudo = average == GRADIENTS, average == PSEUDO
        self._anchors = [
            [one.clone().float() for one in fragments.rows(list(map(local, self.parameters)), part)]
            for part in range(0 if outer is None else fragments.count)
        ]  # parameters of the outer optimizer, of each fragment, as its latest round ended
        self.outer = None if outer is None else _made(outer, self.anchor)
        self._rest: dict[int, Tensor] = {}
        """Rest of the latest mean that parameters of 16 bits can't hold."""
        self.steps = self.latest = self.latest_at = 0
        self.is_sick = False
        self._skipped = 0  # steps since then that were none, as their gradients weren't finite
        self._sick_buffers: list[str] = []  # names that were told
        self._offers = False
        self._changing = threading.Lock()
        """Lock that a donor of the state takes between two changes."""

    @property
    def locals(self) -> list[Tensor]:
        """This rank's part of each parameter, and the buffers; without autograd."""
        return [local(one) for one in (*self.parameters, *self.buffers)]

    @property
    def anchor(self) -> list[Tensor]:
        return [one for part in self._anchors for one in part]

    # ---- steps and means ----

    def step(self, *, skips: bool) -> None:
        """Take a local step. ``skips``: it counts, but its gradients aren't finite."""
        with self._changing:
            if not skips and (not self.is_sick or self._has_finite_gradients()):
                for one in self.inner:
                    one.step()
            self.steps += 1

    def values(self) -> list[Tensor]:
        """Copies of what is averaged, in float32, what 16 bits couldn't hold included."""
        values = [one.clone().float() for one in self.locals]
        for number, rest in self._rest.items():
            values[number] += rest
        return values

    def new_round(self, weight: float, timeout: float) -> OneRound:
        values = self.values()
        before = [one.clone() for one in values] if self.is_delayed else []
        if self._is_pseudo:
            for part, anchors in enumerate(self._anchors):
                for view, anchor in zip(self.fragments.rows(values, part), anchors, strict=False):
                    view.sub_(anchor)
        how = {"fragments": self.fragments, "after": self.averager.mark()}
        step = partial(self.averager.step_on, values, weight, timeout, **how)
        return OneRound(values, before, self.steps, step)

    def take(self, one: OneRound, report: RoundReport) -> None:
        """Add what a round has changed."""
        with self._changing, torch.no_grad():
            part, sick = self.fragments.of(report.round), bool(report.left_out)
            # After a round that fails values are as before, and the outer optimizer has no step.
            sound = bool(report.failure) or self.add(one.before, one.values, part, sick=sick)
            if sick or not sound:
                self._heal()
            self.is_sick = sick or not sound or self._skipped > 0
            self._skipped = 0
            self._has_had(report, one.at)

    def add(
        self, before: list[Tensor], means: list[Tensor], part: int, *, sick: bool = False
    ) -> bool:
        """Adds what a round has changed in a fragment: steps that were taken meanwhile stay. False:
        some that were taken meanwhile weren't finite, and means stand for what they left.
        ``before``: what the round began with, if it is delayed. ``sick``: not all of that is
        finite, nor of ``means`` where none came."""
        rows = self.fragments.rows
        ends = rows(means, part)
        if self.outer is not None:
            anchors = self._anchors[part]
            for anchor, mean in zip(anchors, ends, strict=False):
                gradient = -mean if self._is_pseudo else anchor - mean
                anchor.grad = _finite(gradient) if sick else gradient
            self.outer.step()
            for anchor in anchors:  # the next fragment's step is none of this one
                anchor.grad = None
            ends = [*anchors, *ends[len(anchors) :]]
        sound = None
        if self.is_delayed:
            changes = zip(rows(self.values(), part), rows(before, part), ends, strict=True)
            moved = [now + (end - begin) for now, begin, end in changes]
            finite = [one.isfinite() for one in moved]
            sound = torch.stack([one.all() for one in finite]).all()
            ends = list(map(torch.where, finite, moved, ends))
        places = zip(rows(self.locals, part), rows(self._rests(), part), ends, strict=True)
        for own, rest, value in places:
            own.copy_(value)
            if own.dtype != torch.float32:
                rest.copy_(value - own.float())
        # Whether to heal is the host's decision: it waits for a device once in a delayed round.
        return sound is None or bool(sound)

    def step_by(self, means: list[Tensor], report: RoundReport) -> None:
        """Take the step of a round's mean gradients, which buffers follow."""
        count = len(self.parameters)
        for parameter, mean in zip(self.parameters, means[:count], strict=True):
            # Of a gradient that wasn't finite, no mean came for what still isn't.
            parameter.grad = like(parameter, _finite(mean) if report.left_out else mean)
        with self._changing:
            for buffer, mean in zip(self.buffers, means[count:], strict=True):
                buffer.copy_(mean)
            for one in self.inner:
                one.step()
            if report.round >= 0:
                self._has_had(report, self.steps)

    def _has_had(self, report: RoundReport, at: int) -> None:
        self.latest, self.latest_at = report.round, at
        self.pace.has_had(report.samples)
        if report.left_out and not self.buffers:
            self._tell_sick_buffers()

    def _rests(self) -> list[Tensor]:
        """What parameters of 16 bits can't hold. Those of 32, which hold all, stand for theirs."""
        averages = self.locals
        for number, one in enumerate(averages):
            if one.dtype != torch.float32 and number not in self._rest:
                self._rest[number] = torch.zeros_like(one, dtype=torch.float32)
        return [self._rest.get(number, one) for number, one in enumerate(averages)]

    # ---- healing ----

    def _has_finite_gradients(self) -> bool:
        """False: this step is skipped. Values may still not be finite for which no mean came, and a
        step would spread that to all others. The next rounds bring what is left."""
        found = all(
            bool(local(p.grad).isfinite().all()) for p in self.parameters if p.grad is not None
        )
        self._skipped += not found
        return found

    def _heal(self) -> None:
        """What isn't finite here after a round that healed its part, and would spoil it in the next
        step: parameters outside of it take the outer ones, moments begin as in a first step."""
        for part, anchors in enumerate(self._anchors):
            owns = self.fragments.rows(list(map(local, self.parameters)), part)
            for own, anchor in zip(owns, anchors, strict=True):
                own.copy_(torch.where(own.isfinite(), own, anchor.to(own.dtype)))
        for one in self.inner:
            for parameter, kept in list(one.state.items()):
                floats = [
                    x for x in kept.values() if isinstance(x, Tensor) and x.is_floating_point()
                ]
                if not all(bool(local(x).isfinite().all()) for x in floats):
                    del one.state[parameter]

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

    # ---- the state as a whole ----

    def offer(self, report: RoundReport | None = None) -> None:
        """Offer the state to newcomers. ``report``: only if that round was one, alone or not."""
        has_had = report is None or (
            not report.failure and (report.kept < 1 or len(report.members) == 1)
        )
        if has_had and not self._offers:
            self._offers = True
            self.averager.offer(self.snapshot)

    def snapshot(self) -> Snapshot:
        with self._changing:
            # A donor's thread reads what this one's stream of the device may not have written yet.
            if (device := self.locals[0].device).type != "cpu":
                torch.accelerator.synchronize(device)
            return Snapshot(self.latest, *packed(self.state()), self.pace.samples)

    def state(self) -> dict[str, Any]:
        """All that a peer needs to continue from here."""
        return {
            "kinds": self.kinds(),
            "model": model_state(self._model, self.shards),
            "training": parts(self.state_dict()),
            "latest at": self.latest_at,
        }

    def kinds(self) -> list[str]:
        """Kinds of the optimizers, which a state must have to be for them."""
        outer = [] if self.outer is None else [self.outer]
        return [type(one).__name__ for one in (*self.inner, *outer)]

    def take_state(
        self, state_of: Callable[[], Any], latest: int, own: Snapshot, whose: str
    ) -> None:
        """Take what :meth:`state` returned, as of the round ``latest``. CheckpointError: it isn't
        of this model, and this peer has ``own`` again."""
        try:
            state = state_of()
            if state["kinds"] != self.kinds():
                raise OptionError(f"it is of {state['kinds']}, and here are {self.kinds()}")
            self._load(state, latest)
        except Exception as error:  # whatever the state may be
            self._load(unpacked(own.skeleton, own.data), own.round)
            raise CheckpointError(
                f"{whose} isn't one of this model and its optimizers: "
                f"{printable(str(error), but=LINES)}"
            ) from error

    def _load(self, state: Any, latest: int) -> None:
        with self._changing:
            load_model(self._model, state["model"], self.shards)
            self._rest = {}
            self.load_state_dict(copy.deepcopy(state["training"]))  # torch keeps what it is given
            self._heal()
            self.latest, self.latest_at = latest, _check_count(state["latest at"], "steps")

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "samples": self.pace.samples,
            "since": self.pace.since,
            "optimizers": [one.state_dict() for one in self.inner],
            "anchor": [anchor.clone() for anchor in self.anchor],
            "outer": None if self.outer is None else self.outer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict` returned. OptionError: it is of another training."""
        if (state["outer"] is None) != (self.outer is None):
            raise OptionError("the checkpoint has an outer optimizer and this has none, or reverse")
        shapes = [tuple(anchor.shape) for anchor in self.anchor]
        if [tuple(anchor.shape) for anchor in state["anchor"]] != shapes:
            raise OptionError("the checkpoint is of parameters of other shapes")
        if not all(bool(anchor.isfinite().all()) for anchor in state["anchor"]):
            raise OptionError("the checkpoint's outer parameters aren't finite")
        for name, what in (("steps", "steps"), ("samples", "samples"), ("since", "samples")):
            _check_count(state[name], what)
        self.steps = state["steps"]
        self.pace.continue_from(min(state["samples"] + state["since"], MOST_COUNT))
        self.latest_at = self.steps - self.steps % self.pace.every
        for own, theirs in zip(self.inner, state["optimizers"], strict=True):
            load_optimizer(own, theirs)
        with torch.no_grad():
            for anchor, saved in zip(self.anchor, state["anchor"], strict=True):
                anchor.copy_(saved)
        if self.outer is not None:
            load_optimizer(self.outer, state["outer"])


def _made(outer: Outer, anchor: list[Tensor]) -> Optimizer:
    made = outer(anchor) if callable(outer) else None
    if not isinstance(made, Optimizer):
        raise OptionError(
            "outer makes no optimizer, wanted outer=lambda p: torch.optim.SGD(p, lr=0.7), say"
        )
    return made


def _check_count(count: object, what: str) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MOST_COUNT:
        raise OptionError(f"the checkpoint has had {count!r:.40} {what}")
    return count


def _finite(values: Tensor) -> Tensor:
    """The same, with 0 for what isn't finite."""
    return torch.where(values.isfinite(), values, 0.0)
