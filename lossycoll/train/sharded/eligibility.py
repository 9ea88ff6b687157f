"""Optimizers and parameters that can be sharded, and what all ranks must have alike of them.

A rank steps fragments of parameters, flat and cut anywhere. That gives what stepping the whole
parameter gives only if each element's step depends on that element's values alone. Adam's does;
what uses norms (LAMB), rows and columns (Adafactor), matrices (Muon) or line searches (LBFGS) does
not. So a small matrix is stepped as a whole and in fragments, and the two are compared. With
``whole`` no parameter is cut, and two matrices are stepped together and each for itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from lossycoll.backend.tensors import DTYPES
from lossycoll.devices.registry import is_served
from lossycoll.errors import UnsupportedError
from lossycoll.train.common.collectives import Collectives
from lossycoll.train.common.consistency import Agreement, as_lines
from lossycoll.train.common.layout import ParameterSpec, contiguous, is_dense


@dataclass(frozen=True, eq=False)
class NamedParameter:
    parameter: Parameter
    name: str  # name in errors
    group: int  # the number of its parameter group

    @property
    def spec(self) -> ParameterSpec:
        return spec(self.parameter, self.group)


@dataclass(frozen=True, order=True)
class _Span:
    """A parameter's memory: its first address, and the one after the last."""

    begin: int
    end: int
    name: str
    trained: bool


def check_parameters(
    collectives: Collectives, trained: Sequence[NamedParameter], frozen: Sequence[Parameter]
) -> None:
    """Refuses, by UnsupportedError, parameters that can't be moved into buckets."""
    for each in trained:
        reason = _why_not(each.parameter, lossy=collectives.lossy is not None)
        if reason:
            raise UnsupportedError(f"{collectives}: {each.name} {reason}")
    for one, other in pairwise(sorted(_spans(trained, frozen))):
        if other.begin < one.end and (one.trained or other.trained):
            raise UnsupportedError(
                f"{collectives}: {one.name} and {other.name} share memory but are two parameters, "
                f"and would be separated; tie them by using one Parameter object in both places"
            )


def _spans(trained: Sequence[NamedParameter], frozen: Sequence[Parameter]) -> Iterator[_Span]:
    for each in trained:
        if each.parameter.numel():
            yield _span(each.parameter, each.name, trained=True)
    for parameter in frozen:
        if not _why_not(parameter, lossy=False) and parameter.numel():
            name = f"a frozen one of shape {tuple(parameter.shape)}"
            yield _span(parameter, name, trained=False)


def _span(parameter: Tensor, name: str, *, trained: bool) -> _Span:
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    reach = sum((length - 1) * step for length, step in steps) + 1
    begin = parameter.data_ptr()
    return _Span(begin, begin + reach * parameter.element_size(), name, trained)


def _why_not(parameter: Tensor, *, lossy: bool) -> str:
    if is_lazy(parameter):
        return "isn't initialised yet; run the model once on a batch before making the optimizer"
    if type(parameter.data) is not Tensor:
        kind = type(parameter.data).__name__
        return f"is a {kind}; only plain tensors can be sharded, not what is sharded already"
    if parameter.layout is not torch.strided or parameter.dtype not in DTYPES:
        wanted = ", ".join(str(dtype) for dtype in DTYPES)
        return f"is {parameter.layout} of {parameter.dtype}, wanted dense of {wanted}"
    if lossy and not (parameter.is_cpu or is_served(parameter)):
        return (
            f"is on {parameter.device}, but backend 'lossy' serves tensors on the CPU and on CUDA "
            f"devices; move the model to one of these, or pass a group of a backend that serves "
            f"that device"
        )
    return ""


def spec(parameter: Tensor, group: int) -> ParameterSpec:
    """A parameter as data for the layout; numbered parameter groups share no bucket."""
    key = (group, parameter.dtype, parameter.device)
    return ParameterSpec(tuple(parameter.shape), parameter.stride(), parameter.element_size(), key)


def agreement(
    collectives: Collectives, settings: Mapping[str, Any], trained: Sequence[NamedParameter]
) -> Agreement:
    lines = as_lines(settings)
    device = torch.device("cpu")
    for each in trained:
        entry, device = each.spec, each.parameter.device
        dense = is_dense(entry.shape, entry.stride)
        stride = entry.stride if dense else contiguous(entry.shape)
        lines.append(
            f"{each.name}: {each.parameter.dtype}, shape {entry.shape}, strides {stride}, "
            f"group {each.group}"
        )
    return Agreement(collectives, lines, device)


OptimizerClass = Callable[..., torch.optim.Optimizer]

SHAPE: Final = (6, 8)
CUTS: Final = (0, 5, 17, 33, 48)  # cuts of the matrix, in elements: within rows and across them
SCALES: Final = (1.0, 1e-3, 50.0, 1.0)
"""Scale of each step's gradients. A large one is for optimizers that clip."""
TOLERANCE: Final = 1e-4
"""Of how far an element is moved. Kernels round differently at the end of a vector; anything else
differs by far more."""
FLOOR: Final = 1e-2
"""Factor of TOLERANCE for elements that hardly move, relative to the largest move."""
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
    raises passes through. UnsupportedError: it isn't element-wise.
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
    return _shaped(optimizer, parameter)


def whole_state(
    optimizer_class: OptimizerClass,
    options: Mapping[str, Any],
    where: str,
    group: Mapping[str, Any] | None = None,
) -> frozenset[str]:
    """As :func:`elementwise_state`, of an optimizer that is to step whole parameters."""
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    values, grads = _inputs()
    cut = SHAPE[0] // 2
    pieces = [slice(0, cut), slice(cut, None)]

    def moved(some: Sequence[slice]) -> tuple[list[Tensor], torch.optim.Optimizer]:
        torch.default_generator.manual_seed(0)
        parameters = [Parameter(values[piece].clone()) for piece in some]
        written, defaults = _on_host(group or {}, options)
        made = optimizer_class([{**written, "params": parameters}], **defaults)
        try:
            _run(made, parameters, [[grad[piece] for piece in some] for grad in grads])
        except Exception as error:
            raise UnsupportedError(f"{where}: a plain step() of {name} raises: {error}") from error
        return [each.detach() for each in parameters], made

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        together, optimizer = moved(pieces)
        alone = [moved([piece])[0][0] for piece in pieces]
    if not all(torch.allclose(a, b, rtol=TOLERANCE) for a, b in zip(together, alone, strict=True)):
        raise UnsupportedError(
            f"{where}: {name} steps two matrices otherwise than each for itself, so ranks can't "
            f"share them out; use DistributedDataParallel with this optimizer"
        )
    return _shaped(optimizer, optimizer.param_groups[0]["params"][0])


def _shaped(optimizer: torch.optim.Optimizer, parameter: Tensor) -> frozenset[str]:
    return frozenset(
        key
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    )


def _on_host(*options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Copies of options for a trial in host memory, whatever device the model is on: there is no
    CUDA graph to capture there, and without one torch doesn't take tensors for all numbers."""
    captured = any(each.get("capturable") for each in options)
    for each in options:
        pairs = copy.deepcopy(dict(each)).items()
        found = {key: _moved(value, as_number=captured) for key, value in pairs}
        yield {**found, "capturable": False} if "capturable" in found else found


def _moved(value: Any, *, as_number: bool) -> Any:
    if isinstance(value, Tensor):
        return value.item() if as_number and value.numel() == 1 else value.detach().cpu()
    if type(value) in (tuple, list):
        return type(value)(_moved(each, as_number=as_number) for each in value)
    return value


def _trial(
    optimizer_class: OptimizerClass,
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    where: str,
    name: str,
) -> tuple[Tensor, Tensor, torch.optim.Optimizer]:
    """Moves of each element in matrix and fragments, both SHAPE, and the optimizer."""

    def make(parameters: list[Parameter]) -> torch.optim.Optimizer:
        written, defaults = _on_host(group, options)
        return optimizer_class([{**written, "params": parameters}], **defaults)

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
    rows = torch.logspace(-1, 1, SHAPE[0], dtype=torch.float64, device="cpu").unsqueeze(1)

    def drawn() -> Tensor:
        return torch.randn(SHAPE, generator=draws, dtype=torch.float64, device="cpu") * rows

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
        f"such an optimizer, whole=True, which deals whole parameters to ranks, or "
        f"DistributedDataParallel with this one"
    )
