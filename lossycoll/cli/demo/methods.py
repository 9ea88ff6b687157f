"""The training methods that the demo and the study of quality compare. No torch, for ``--help``.

docs/extending.md says how to add one from another package (:func:`register`); one of this module
goes into ``BUILT_IN``. Ranks are processes of their own that import a method's ``module``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from lossycoll.options.fields import Options

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    Wrap: TypeAlias = Callable[
        [nn.Module, Callable[..., Optimizer], Mapping[str, Any]], tuple[nn.Module, Optimizer]
    ]
    Attach: TypeAlias = Callable[[nn.Module, Optimizer], object]

DEMO_RUNS: Final = ("gloo", "clean")
"""Names of the demo's own runs, which lose nothing."""

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
"""A name is a folder's, and one of several between commas."""


class Theory(Protocol):
    """Prediction of a run's drift while it trains."""

    def expected_drift(self) -> float:
        """Squared distance of all parameters, averaged over pairs of replicas. A collective."""


@dataclass
class Prepared:
    """A method applied to a model."""

    forward: nn.Module  # what is run forward: the model itself, or a wrapper of it
    optimizer: Optimizer  # what is stepped
    attached: object = None  # what ``attach`` returned; it only has to live as long as the training
    # what predicts the drift, where it was asked for and anything does
    theory: Theory | None = None
    wait: Callable[[Any], None] | None = None  # as the method's

    def wait_parameters(self) -> None:
        """Returns when the last step is over: before anything but ``forward`` reads parameters."""
        if self.wait is not None:
            self.wait(self.optimizer)


@dataclass(frozen=True)
class Method:
    """Preparation of a model and an optimizer for data-parallel training.

    Attributes:
        name: Key in results and tables, and for ``--runs`` unless ``run`` is given.
        module: Name of the module that registers the method (its ``__name__``). Ranks import it.
        wrap: Function of a model, an optimizer's class and its settings, which returns the model to
            run and the optimizer to step. Called on every rank, after ``init_process_group``.
        summary: Behaviour under loss in a clause or two, for the notes below the demo's table.
        run: Name of the method's run in the demo, if that isn't ``name``.
        attach: Function that is called with the results of ``wrap``, before the first step.
        wait: Function of the optimizer that waits for the end of its last step. It is needed if
            ``step`` returns while parameters are still under way to the next forward pass.
        options: Options of the group (:class:`lossycoll.Options`).
        expected_drift: Function of the optimizer and the share of lost packets, which returns a
            predictor of the distance between replicas. Called after ``attach``.
        colour: Colour in plots, as matplotlib names it.
        marker: Marker in plots, as matplotlib names it.
    """

    name: str
    module: str
    wrap: Wrap
    summary: str = ""
    run: str = ""
    attach: Attach | None = None
    wait: Callable[[Any], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    expected_drift: Callable[[Optimizer, float], Theory] | None = None
    colour: str = "tab:gray"
    marker: str = "o"

    @property
    def run_name(self) -> str:
        """Name of the method's run in the demo."""
        return self.run or self.name

    def prepare(
        self,
        model: nn.Module,
        optimizer_class: Callable[..., Optimizer],
        settings: Mapping[str, Any],
        loss: float | None = None,
    ) -> Prepared:
        """Apply the method to a model. All ranks must call this.

        Args:
            model: Model, equal on all ranks; or rank 0's counts, if the method broadcasts it.
            optimizer_class: Class that is called with parameters and ``settings``.
            settings: Keyword arguments of the optimizer.
            loss: Share of packets lost; with it, ``theory`` is prepared too.

        Returns:
            The model and the optimizer for a training loop.

        Raises:
            TypeError: ``wrap`` doesn't return a pair.
        """
        wrapped: object = self.wrap(model, optimizer_class, settings)
        if not (isinstance(wrapped, tuple) and len(wrapped) == 2):
            raise TypeError(
                f"wrap of method {self.name!r} of {self.module} returned {wrapped!r}, wanted what "
                f"is run forward and the optimizer"
            )
        forward, optimizer = wrapped
        attached = None if self.attach is None else self.attach(forward, optimizer)
        theory = None
        if loss is not None and self.expected_drift is not None:
            # After what is attached: hooks run in order of registration, and what that moves before
            # a step isn't the step's.
            theory = self.expected_drift(optimizer, loss)
        return Prepared(forward, optimizer, attached, theory, self.wait)


_METHODS: dict[str, Method] = {}


def register(method: Method) -> Method:
    """Adds a method to those that are compared. A method that its module registers again, as when
    it is reloaded, takes the earlier one's place."""
    for complaint in _complaints(method):
        raise ValueError(f"method {method.name!r} of {method.module} {complaint}")
    Options.from_env({}, **method.options)
    _METHODS[method.name] = method
    return method


def _complaints(method: Method) -> Iterator[str]:
    if method.module == "__main__":
        yield "can't be imported by ranks: put it into a module of its own"
    names = {method.name, method.run_name}
    for name in sorted(names):
        if not NAME.fullmatch(name):
            yield f"has the name {name!r}, wanted letters, digits and any of . _ + - between them"
    if names & set(DEMO_RUNS):
        yield f"has the name of a run of the demo ({', '.join(DEMO_RUNS)}): wanted another name"
    for other in _METHODS.values():
        if _origin(other) != _origin(method) and names & {other.name, other.run_name}:
            yield f"has the name of {other.name!r} of {other.module}: wanted another name"
    if not _importable(method.module):
        yield "isn't importable by ranks; wanted __name__ of a module on PYTHONPATH"


def _origin(method: Method) -> tuple[str, ...]:
    """Identity of a method that a reloaded copy shares; its functions are new objects."""
    wrap = getattr(method.wrap, "__qualname__", repr(method.wrap))
    return method.name, method.run_name, method.module, wrap


def _importable(module: str) -> bool:
    try:
        return module in sys.modules or find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def methods() -> Sequence[Method]:
    """All that are registered, the earliest first."""
    return tuple(_METHODS.values())


def find(name: str, module: str) -> Method:
    import_module(module)
    if name not in _METHODS:
        raise ValueError(f"{module} registers no method {name!r}, only {', '.join(_METHODS)}")
    return _METHODS[name]


def wrap_ddp(
    model: nn.Module, optimizer_class: Callable[..., Optimizer], settings: Mapping[str, Any]
) -> tuple[nn.Module, Optimizer]:
    """DDP's wrapper forward, the optimizer of the model's parameters as it is."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model), optimizer_class(model.parameters(), **settings)


DDP: Final = Method(
    name="ddp",
    module=__name__,
    wrap=wrap_ddp,
    run="lossy",
    summary=(
        "a rank that a mean does not reach continues with its own gradient, so replicas drift "
        "apart for as long as training lasts"
    ),
    colour="tab:red",
    marker="D",
)


PERIOD: Final = 16
"""Steps in which DriftBound brings all parameters together once."""


def attach_drift_bound(forward: nn.Module, optimizer: Optimizer, period: int = PERIOD) -> object:
    """DriftBound, which hooks into the optimizer's step."""
    import lossycoll

    return lossycoll.DriftBound(forward, optimizer, period)


def _drift_of_bound(optimizer: Optimizer, loss: float, period: int = PERIOD) -> Theory:
    """From the replicas' own steps."""
    from .drift_theory import OwnSteps

    return OwnSteps(optimizer, period, loss)


DRIFT_BOUND: Final = Method(
    name="ddp+driftbound",
    module=__name__,
    wrap=wrap_ddp,
    attach=attach_drift_bound,
    run="bounded",
    summary=f"DriftBound brings 1/{PERIOD} of the parameters together after each step",
    expected_drift=_drift_of_bound,
    colour="tab:orange",
)


def wrap_sharded(
    model: nn.Module,
    optimizer_class: Callable[..., Optimizer],
    settings: Mapping[str, Any],
    **how: Any,
) -> tuple[nn.Module, Optimizer]:
    """``how``: options of ShardedOptimizer."""
    import lossycoll

    sharded = lossycoll.ShardedOptimizer(
        model.parameters(), optimizer_class, model=model, **how, **settings
    )
    return model, sharded


def _drift_of_sharded(optimizer: Any, loss: float) -> Theory:
    """From how the owners' values move, and how many were missing."""
    from .drift_theory import OwnersTrail

    del loss  # which says how many packets are lost, and not how many come back
    return OwnersTrail(optimizer)


SHARDED: Final = Method(
    name="sharded",
    module=__name__,
    wrap=wrap_sharded,
    # Parameters travel during the next forward pass, whose modules wait for their own.
    wait=methodcaller("wait_parameters"),
    summary=(
        "parameters are sent, not gradients; a lost packet leaves a value that is a step or two old"
    ),
    expected_drift=_drift_of_sharded,
    colour="tab:purple",
    marker="P",
)


BUILT_IN: Final = (DDP, DRIFT_BOUND, SHARDED)

for _method in BUILT_IN:
    register(_method)
