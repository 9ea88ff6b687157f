"""Whether an optimizer is element-wise, found out by trying.

A rank steps fragments of parameters, flat and cut anywhere. That gives what stepping the whole
parameter gives only if each element's step depends on that element's values alone. Adam's does;
what uses norms (LAMB), rows and columns (Adafactor), matrices (Muon) or line searches (LBFGS) does
not. So a small matrix is stepped as a whole and in fragments, and the two compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from lossycoll.errors import UnsupportedError

OptimizerClass = Callable[..., torch.optim.Optimizer]

SHAPE: Final = (6, 8)
CUTS: Final = (0, 5, 17, 33, 48)
"""Where the matrix is cut, in elements: within rows and across them."""
SCALES: Final = (1.0, 1e-3, 50.0, 1.0)
"""Of the gradients of each step. A large one is for optimizers that clip."""
TOLERANCE: Final = 1e-4
"""Of how far an element is moved. Kernels round differently at the end of a vector; anything else
differs by far more."""
FLOOR: Final = 1e-2
"""Of TOLERANCE, for elements that hardly move: this share of the largest move."""
STILL: Final = 1e-7
"""Moves up to this share of the largest value are too near the rounding of doubles."""
TRIAL_RATE: Final = 1e-2
"""The learning rate of another trial where nothing moved: a warm-up begins at or near 0."""


def elementwise_state(
    optimizer_class: OptimizerClass,
    options: Mapping[str, Any],
    where: str,
    group: Mapping[str, Any] | None = None,
) -> frozenset[str]:
    """The names of the state that has an entry for each element (``exp_avg``, say).

    Neither the global random state nor ``options`` are touched. What the optimizer's constructor
    raises passes through. ``group`` is what the parameters' group says besides ``options``, maybe
    unknown to the class. UnsupportedError: it isn't element-wise.
    """
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        written = dict(group or {})
        whole, joined, optimizer = _trial(optimizer_class, options, written, where, name)
        rate = optimizer.param_groups[0].get("lr")
        if _still(whole) and isinstance(rate, float | int | Tensor):
            written["lr"] = rate * 0 + TRIAL_RATE
            whole, joined, optimizer = _trial(optimizer_class, options, written, where, name)
    strays = [key for key in optimizer.state if not isinstance(key, Tensor)]
    if strays:
        raise _refusal(where, name, f"it keeps state {strays[0]!r} that is no parameter's")
    if _still(whole):
        raise _refusal(where, name, "it moves nothing, so that nothing can be told")
    largest = float(whole.abs().max())
    if not torch.allclose(joined, whole, rtol=TOLERANCE, atol=FLOOR * TOLERANCE * largest):
        worst = float((joined - whole).abs().max()) / largest
        what = f"in fragments it steps otherwise, by up to {worst:.3g} of its largest step"
        raise _refusal(where, name, what)
    (parameter,) = optimizer.param_groups[0]["params"]
    return frozenset(
        key
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    )


def _trial(
    optimizer_class: OptimizerClass,
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    where: str,
    name: str,
) -> tuple[Tensor, Tensor, torch.optim.Optimizer]:
    """How far each element moved in matrix and fragments, both SHAPE, and the optimizer."""

    def make(parameters: list[Parameter]) -> torch.optim.Optimizer:
        written = copy.deepcopy(dict(group))
        return optimizer_class([{**written, "params": parameters}], **copy.deepcopy(dict(options)))

    torch.default_generator.manual_seed(0)  # the CPU's alone: those of devices aren't put back
    values, grads = _inputs()
    whole = Parameter(values.clone())
    optimizer = make([whole])
    try:
        _run(optimizer, [whole], [[grad] for grad in grads])
    except Exception as error:
        raise _refusal(where, name, f"a plain step() of it raises: {error}") from error
    cuts = list(pairwise(CUTS))
    fragments = [Parameter(values.flatten()[begin:end].clone()) for begin, end in cuts]
    try:
        for some in (slice(0, 2), slice(2, None)):  # as two ranks, each with its own
            other = make(fragments[some])
            steps = [[g.flatten()[a:b] for a, b in cuts[some]] for g in grads]
            _run(other, fragments[some], steps)
    except Exception as error:
        raise _refusal(where, name, f"it doesn't take flat fragments: {error}") from error
    joined = torch.cat([fragment.detach() for fragment in fragments]).view(SHAPE)
    return whole.detach() - values, joined - values, optimizer


def _still(moved: Tensor) -> bool:
    values, _ = _inputs()
    return bool(moved.abs().max() <= STILL * values.abs().max())


def _inputs() -> tuple[Tensor, list[Tensor]]:
    """A matrix and its gradients; rows of different size, so that norms of rows would show. In
    doubles, in which a small step of a large value isn't lost."""
    draws = torch.Generator().manual_seed(20)
    rows = torch.logspace(-1, 1, SHAPE[0], dtype=torch.float64).unsqueeze(1)

    def drawn() -> Tensor:
        return torch.randn(SHAPE, generator=draws, dtype=torch.float64) * rows

    values = drawn()
    return values, [drawn() * scale for scale in SCALES]


def _run(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Parameter],
    steps: Sequence[Sequence[Tensor]],
) -> None:
    for grads in steps:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()


def _refusal(where: str, name: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: {name} is not element-wise, as far as a trial on a small matrix shows: {what}. "
        f"ShardedOptimizer has each rank step flat fragments of parameters, which is the same only "
        f"if each element's step depends on that element alone (SGD, Adam, AdamW, ... do); use "
        f"such an optimizer, or DistributedDataParallel with this one"
    )
