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
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from lossycoll.backend.tensors import DTYPES
from lossycoll.devices.registry import is_served
from lossycoll.errors import UnsupportedError
from lossycoll.train.common.collectives import Collectives
from lossycoll.train.common.layout import ParameterSpec, is_dense


@dataclass(frozen=True, eq=False)
class NamedParameter:
    parameter: Parameter
    name: str  # name in errors
    group: int  # the number of its parameter group

    @property
    def spec(self) -> ParameterSpec:
        return spec(self.parameter, self.group)

    def __str__(self) -> str:
        """What all ranks must have alike of it."""
        own = self.spec
        return (
            f"{self.name}: {self.parameter.dtype}, shape {own.shape}, strides {own.stride}, "
            f"group {self.group}"
        )


def check_parameters(
    collectives: Collectives, trained: Sequence[NamedParameter], frozen: Sequence[Parameter]
) -> None:
    """Refuses, by UnsupportedError, parameters that can't be moved into buckets."""
    memory: list[tuple[int, int, str, bool]] = []  # begin, end, name, and whether it is trained
    for each in trained:
        reason = _why_not(each.parameter, lossy=collectives.lossy is not None)
        if reason:
            raise UnsupportedError(f"{collectives}: {each.name} {reason}")
        memory.append((*_addresses(each.parameter), each.name, True))
    for parameter in frozen:
        if not _why_not(parameter, lossy=False):
            name = f"a frozen one of shape {tuple(parameter.shape)}"
            memory.append((*_addresses(parameter), name, False))
    filled = sorted(entry for entry in memory if entry[0] < entry[1])
    for (_, end, name, is_trained), (begin, _, other, other_trained) in pairwise(filled):
        if begin < end and (is_trained or other_trained):
            raise UnsupportedError(
                f"{collectives}: {name} and {other} share memory but are two parameters, and would "
                f"be separated; tie them by using one Parameter object in both places"
            )


def _addresses(parameter: Tensor) -> tuple[int, int]:
    """The first address of a parameter's memory, and the one after the last."""
    begin = parameter.data_ptr()
    if not parameter.numel():
        return begin, begin
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    reach = sum((length - 1) * step for length, step in steps) + 1
    return begin, begin + reach * parameter.element_size()


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
    shape, stride = tuple(parameter.shape), parameter.stride()
    if not is_dense(parameter):
        stride = torch.empty(shape, device="meta").stride()
    key = (group, parameter.dtype, parameter.device)
    return ParameterSpec(shape, stride, parameter.element_size(), key)


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


class _StepError(Exception):
    """An optimizer's step has raised."""


@dataclass
class Trial:
    """Trial of an optimizer on parts of a small matrix in host memory: how may it be sharded?

    Neither the global random state nor ``options`` are touched. What the optimizer's constructor
    raises passes through.
    """

    optimizer_class: Callable[..., torch.optim.Optimizer]
    options: Mapping[str, Any]
    where: str  # begins errors
    group: Mapping[str, Any] = field(default_factory=dict)  # a parameter group's options

    def elementwise_state(self) -> frozenset[str]:
        """The names of the state that has an entry for each element (``exp_avg``, say).
        UnsupportedError: the optimizer isn't element-wise.
        """
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            whole, joined, optimizer = self._cut()
            rate = optimizer.param_groups[0].get("lr")
            if _is_still(whole) and isinstance(rate, float | int | Tensor):
                self.group = {**self.group, "lr": rate * 0 + TRIAL_RATE}
                whole, joined, optimizer = self._cut()
        strays = [key for key in optimizer.state if not isinstance(key, Tensor)]
        if strays:
            raise self._refusal(f"it keeps state {strays[0]!r} that is no parameter's")
        if _is_still(whole):
            raise self._refusal("it moves nothing, so that nothing can be told")
        largest = float(whole.abs().max())
        if not torch.allclose(joined, whole, rtol=TOLERANCE, atol=FLOOR * TOLERANCE * largest):
            worst = float((joined - whole).abs().max()) / largest
            what = f"in fragments it steps otherwise, by up to {worst:.3g} of its largest step"
            raise self._refusal(what)
        return _shaped(optimizer)

    def whole_state(self) -> frozenset[str]:
        """The same of an optimizer that is to step whole parameters."""
        cut = SHAPE[0] // 2
        halves = [lambda matrix: matrix[:cut], lambda matrix: matrix[cut:]]
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                together, optimizer = self._stepped(halves)
                alone = [self._stepped([half])[0][0] for half in halves]
        except _StepError as error:
            raise UnsupportedError(f"{self._who}: {error}") from error
        pairs = zip(together, alone, strict=True)
        if not all(torch.allclose(one, other, rtol=TOLERANCE) for one, other in pairs):
            raise UnsupportedError(
                f"{self._who} steps two matrices otherwise than each for itself, "
                f"so ranks can't share them out; use DistributedDataParallel with this optimizer"
            )
        return _shaped(optimizer)

    def _cut(self) -> tuple[Tensor, Tensor, torch.optim.Optimizer]:
        """Moves of each element in matrix and fragments, and the optimizer of the former."""
        values, _ = _inputs()
        try:
            (whole,), optimizer = self._stepped([lambda matrix: matrix])
        except _StepError as error:
            raise self._refusal(str(error)) from error
        cuts = [lambda matrix, a=a, b=b: matrix.flatten()[a:b] for a, b in pairwise(CUTS)]
        try:  # as two ranks, each with its own
            fragments = [part for some in (cuts[:2], cuts[2:]) for part in self._stepped(some)[0]]
        except Exception as error:
            what = f"it doesn't take flat fragments: {error.__cause__ or error}"
            raise self._refusal(what) from error
        return whole - values, torch.cat(fragments).view(SHAPE) - values, optimizer

    def _stepped(
        self, parts: Sequence[Callable[[Tensor], Tensor]]
    ) -> tuple[list[Tensor], torch.optim.Optimizer]:
        """Parts of the matrix after all steps, and the optimizer that has made these."""
        torch.default_generator.manual_seed(0)  # the CPU's alone: those of devices aren't put back
        values, grads = _inputs()
        parameters = [Parameter(part(values).clone()) for part in parts]
        written, defaults = _on_host(self.group, self.options)
        optimizer = self.optimizer_class([{**written, "params": parameters}], **defaults)
        try:
            for grad in grads:
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.grad = part(grad).clone()
                optimizer.step()
        except Exception as error:
            raise _StepError(f"a plain step() of it raises: {error}") from error
        return [each.detach() for each in parameters], optimizer

    @property
    def _who(self) -> str:
        name = getattr(self.optimizer_class, "__name__", str(self.optimizer_class))
        return f"{self.where}: {name}"

    def _refusal(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self._who} is not element-wise, as far as a trial on a small matrix "
            f"shows: {what}. ShardedOptimizer has each rank step flat fragments of parameters, "
            f"which is the same only if each element's step depends on that element alone (SGD, "
            f"Adam, AdamW, ... do); use such an optimizer, whole=True, which deals whole "
            f"parameters to ranks, or DistributedDataParallel with this one"
        )


def _is_still(moves: Tensor) -> bool:
    return bool(moves.abs().max() <= STILL * _inputs()[0].abs().max())


def _shaped(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    parameter = optimizer.param_groups[0]["params"][0]
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


def _inputs() -> tuple[Tensor, list[Tensor]]:
    """A matrix and its gradients; rows of different size, so that norms of rows would show. In
    doubles, in which a small step of a large value isn't lost."""
    draws = torch.Generator().manual_seed(20)
    rows = torch.logspace(-1, 1, SHAPE[0], dtype=torch.float64, device="cpu").unsqueeze(1)

    def drawn() -> Tensor:
        return torch.randn(SHAPE, generator=draws, dtype=torch.float64, device="cpu") * rows

    values = drawn()
    return values, [drawn() * scale for scale in SCALES]
