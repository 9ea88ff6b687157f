"""Training in a swarm: local steps, and now and then a round of averaging with some peers.

Sources: Ryabinin et al., "Moshpit SGD", NeurIPS 2021, algorithm 2 (local steps, then the mean over
a group). Douillard et al., "DiLoCo", 2023, algorithm 1 (an outer optimizer, whose gradient is the
way that local steps went).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lossycoll.errors import OptionError
from lossycoll.runtime.swarm.member import RoundReport

from .averager import MoshpitAverager, check_weight

AVERAGES: Final = ("parameters", "gradients")

Outer = Callable[[Iterable[Tensor]], Optimizer]


class MoshpitSGD:
    """An optimizer of a swarm's peer: its own steps, and a round of averaging after some of them.

    Args:
        model: Whose parameters are trained.
        optimizer: Of these parameters; any of torch's.
        averager: Of these parameters, all of them, in the order of ``model.parameters()``.
        every: Steps from round to round.
        average: ``"parameters"``: each step is taken at once, and a round replaces the parameters
            by a mean. ``"gradients"``: gradients add up over ``every`` calls of :meth:`step`, and
            their mean over calls and peers makes one step of the optimizer.
        outer: Makes the outer optimizer from its parameters, as in ``lambda p: torch.optim.SGD(p,
            lr=0.7, momentum=0.9, nesterov=True)``: its gradient is how far the mean of a round has
            gone from where the round before ended. None: the mean itself is taken. Only with
            parameters.
        delayed: A round runs beside the next ``every`` steps, and what it changes is added at the
            next one. Only with parameters.
        timeout: Seconds for a round.

    Raises:
        OptionError: An argument can't be, or the averager isn't one of the model's parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        averager: MoshpitAverager,
        *,
        every: int = 1,
        average: str = "parameters",
        outer: Outer | None = None,
        delayed: bool = False,
        timeout: float = 60.0,
    ) -> None:
        self._parameters = list(model.parameters())
        if every < 1:
            raise OptionError(f"every is {every}, wanted 1 or more")
        if average not in AVERAGES:
            raise OptionError(f"average is {average!r}, wanted one of {', '.join(AVERAGES)}")
        if average == "gradients" and (outer is not None or delayed):
            raise OptionError("outer and delayed are for average='parameters'")
        averager.check(self._parameters)
        self._optimizer = optimizer
        self._averager = averager
        self._every = every
        self._of_gradients = average == "gradients"
        self._timeout = timeout
        self._steps = 0
        self._anchor = [p.detach().clone() for p in self._parameters] if outer else []
        """Where the outer optimizer is: where the latest round ended."""
        self._outer = outer(self._anchor) if outer else None
        self._delayed = delayed
        self._round: _Round | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the optimizer. Between two rounds of gradients it keeps them: they add up.

        Args:
            set_to_none: Gradients become None rather than 0.
        """
        if not self._of_gradients or self._steps % self._every == 0:
            self._optimizer.zero_grad(set_to_none)

    def step(self, weight: float = 1.0) -> RoundReport | None:
        """One step, and a round of averaging if one is due.

        A round that fails changes nothing: training goes on from what this peer has.

        Args:
            weight: What this peer counts in a round that begins now, 0 to 1e6: its samples, say.

        Returns:
            What a round did that has ended in this step; None: none has.

        Raises:
            OptionError: The weight can't be.
            OperationTimeout: No group forms within ``timeout``.
            RendezvousError: The directory refuses this peer.
        """
        check_weight(weight)
        if self._of_gradients:
            return self._step_by_gradients(weight)
        self._optimizer.step()
        self._steps += 1
        if self._steps % self._every:
            return None
        report = self.finish()
        values = [p.detach().clone() for p in self._parameters]
        self._round = _Round(self._averager, values, weight, self._timeout)
        if self._delayed:
            self._round.start()
            return report
        self._round.run()
        return self.finish()

    def finish(self) -> RoundReport | None:
        """Waits for the round that runs beside the steps, if one does, and takes what it brings: to
        be called after the last step.

        Returns:
            What the round did; None: none was running.

        Raises:
            OperationTimeout: No group formed within ``timeout``.
            RendezvousError: The directory refuses this peer.
        """
        one, self._round = self._round, None
        if one is None:
            return None
        report = one.result()
        with torch.no_grad():
            self._take(one.before, one.values)
        return report

    def _take(self, before: list[Tensor], means: list[Tensor]) -> None:
        """Adds what a round has changed: steps that were taken meanwhile stay."""
        ends = means
        if self._outer is not None:
            for anchor, mean in zip(self._anchor, means, strict=True):
                anchor.grad = anchor - mean
            self._outer.step()
            ends = self._anchor
        for parameter, begin, end in zip(self._parameters, before, ends, strict=True):
            if self._delayed:
                parameter.add_(end - begin)
            else:
                parameter.copy_(end)

    def _step_by_gradients(self, weight: float) -> RoundReport | None:
        self._steps += 1
        if self._steps % self._every:
            return None
        with torch.no_grad():
            means = [
                torch.zeros_like(p) if p.grad is None else p.grad / self._every
                for p in self._parameters
            ]
            report = self._averager.step_on(means, weight, self._timeout)
            for parameter, mean in zip(self._parameters, means, strict=True):
                parameter.grad = mean
        self._optimizer.step()
        return report

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, beside the model's: any peer may write it, and any go on from it.

        Returns:
            The steps so far, the optimizer's state, and where the outer one is.
        """
        return {
            "steps": self._steps,
            "optimizer": self._optimizer.state_dict(),
            "anchor": [anchor.clone() for anchor in self._anchor],
            "outer": None if self._outer is None else self._outer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint, after the model has.

        Args:
            state: As :meth:`state_dict` of any peer returned it.

        Raises:
            OptionError: It is of another ``outer``, or of other parameters.
        """
        if (state["outer"] is None) != (self._outer is None):
            raise OptionError("the checkpoint has an outer optimizer and this has none, or reverse")
        shapes = [tuple(anchor.shape) for anchor in self._anchor]
        if [tuple(anchor.shape) for anchor in state["anchor"]] != shapes:
            raise OptionError("the checkpoint is of parameters of other shapes")
        self._steps = int(state["steps"])
        self._optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for anchor, saved in zip(self._anchor, state["anchor"], strict=True):
                anchor.copy_(saved)
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])


class _Round:
    """One round, maybe on a thread of its own. ``before``: the values as they were given."""

    def __init__(
        self, averager: MoshpitAverager, values: list[Tensor], weight: float, timeout: float
    ) -> None:
        self._averager = averager
        self.before = values
        self.values = [value.clone() for value in values]
        self._how = weight, timeout
        self._report: RoundReport | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        try:
            self._report = self._averager.step_on(self.values, *self._how)
        except Exception as error:  # the thread that asks for the result raises it
            self._error = error

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, daemon=True, name="moshpit round")
        self._thread.start()

    def result(self) -> RoundReport:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report
