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

from ..errors import UnsupportedError

OptimizerClass = Callable[..., torch.optim.Optimizer]

SHAPE: Final = (6, 8)
CUTS: Final = (0, 5, 17, 33, 48)
"""Where the matrix is cut, in elements: within rows and across them."""
SCALES: Final = (1.0, 1e-3, 50.0, 1.0)
"""Of the gradients of each step. A large one is for optimizers that clip."""
TOLERANCE: Final = 1e-4
"""Relative. Kernels round differently at the end of a vector; anything else differs by far more."""


def elementwise_state(
    optimizer_class: OptimizerClass,
    options: Mapping[str, Any],
    where: str,
    group: Mapping[str, Any] | None = None,
) -> frozenset[str]:
    """The names of the state that has an entry for each element (``exp_avg``, say).

    ``options``: as ``optimizer_class`` takes them. ``group``: what the parameters' group says
    besides, which may be what the class doesn't know. ``where``: how errors begin. Raises
    UnsupportedError if it isn't element-wise; what its constructor raises passes through. Neither
    the global random state nor ``options`` are touched.
    """
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        values, grads = _inputs()
        whole = Parameter(values.clone())

        def make(parameters: list[Parameter]) -> torch.optim.Optimizer:
            written = copy.deepcopy(dict(group or {}))
            return optimizer_class(
                [{**written, "params": parameters}], **copy.deepcopy(dict(options))
            )

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
    strays = [key for key in optimizer.state if not isinstance(key, Tensor)]
    if strays:
        raise _refusal(where, name, f"it keeps state {strays[0]!r} that is no parameter's")
    joined = torch.cat([fragment.detach() for fragment in fragments]).view(SHAPE)
    if not torch.allclose(joined, whole.detach(), rtol=TOLERANCE, atol=1e-6):
        worst = float((joined - whole.detach()).abs().max())
        raise _refusal(where, name, f"in fragments it steps otherwise, by up to {worst:.3g}")
    return frozenset(
        key
        for key, value in optimizer.state[whole].items()
        if isinstance(value, Tensor) and value.shape == whole.shape
    )


def _inputs() -> tuple[Tensor, list[Tensor]]:
    """A matrix and its gradients; rows of different size, so that norms of rows would show."""
    draws = torch.Generator().manual_seed(20)
    rows = torch.logspace(-1, 1, SHAPE[0]).unsqueeze(1)
    values = torch.randn(SHAPE, generator=draws) * rows
    return values, [torch.randn(SHAPE, generator=draws) * rows * scale for scale in SCALES]


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
