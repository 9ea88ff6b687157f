"""Which parameters can be sharded, and what all ranks must have alike of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

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
    """A parameter of the model."""

    parameter: Parameter
    name: str
    """As errors call it."""
    group: int
    """The number of its parameter group."""

    @property
    def spec(self) -> ParameterSpec:
        """How it is laid out."""
        return spec(self.parameter, self.group)


@dataclass(frozen=True, order=True)
class _Span:
    """The memory of a parameter: its first address, and the one after the last."""

    begin: int
    end: int
    name: str
    trained: bool


def check_parameters(
    collectives: Collectives, trained: Sequence[NamedParameter], frozen: Sequence[Parameter]
) -> None:
    """Checks parameters before they are moved into buckets; the UnsupportedError names one.

    No other parameter may share the memory of the frozen ones.
    """
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
    """The lines that all ranks must have alike."""
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
