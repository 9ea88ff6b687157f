"""Which parameters can be sharded, and what all ranks have to mean alike by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from lossycoll.backend.tensors import DTYPES
from lossycoll.errors import UnsupportedError
from lossycoll.train.common.collectives import Exchange
from lossycoll.train.common.consistency import Meant, as_lines
from lossycoll.train.common.layout import Spec, contiguous, is_dense


def check_parameters(
    exchange: Exchange,
    model: Sequence[Parameter],
    names: Sequence[str],
    frozen: Sequence[Parameter],
) -> None:
    """Raises UnsupportedError, naming the first parameter that can't be sharded. ``frozen``: those
    that aren't to be, and with whose memory no other may part."""
    for parameter, name in zip(model, names, strict=True):
        reason = _why_not(parameter, lossy=exchange.lossy is not None)
        if reason:
            raise UnsupportedError(f"{exchange}: {name} {reason}")
    spans = [
        (*_span(parameter), name, True)
        for parameter, name in zip(model, names, strict=True)
        if parameter.numel()
    ] + [
        (*_span(parameter), f"a frozen one of shape {tuple(parameter.shape)}", False)
        for parameter in frozen
        if not _why_not(parameter, lossy=False) and parameter.numel()
    ]
    for (_, end, name, trained), (begin, _, other, also) in pairwise(sorted(spans)):
        if begin < end and (trained or also):
            raise UnsupportedError(
                f"{exchange}: {name} and {other} share memory but are two parameters, and would be "
                f"torn apart; tie them by using one Parameter object in both places"
            )


def _why_not(parameter: Tensor, *, lossy: bool) -> str:
    if is_lazy(parameter):
        return "isn't initialised yet; run the model once on a batch before making the optimizer"
    if type(parameter.data) is not Tensor:
        kind = type(parameter.data).__name__
        return f"is a {kind}; only plain tensors can be sharded, not what is sharded already"
    if parameter.layout is not torch.strided or parameter.dtype not in DTYPES:
        wanted = ", ".join(str(dtype) for dtype in DTYPES)
        return f"is {parameter.layout} of {parameter.dtype}, wanted dense of {wanted}"
    if lossy and parameter.device.type != "cpu":
        return (
            f"is on {parameter.device}, but backend 'lossy' serves CPU tensors only so far; keep "
            f"the model on the CPU, or pass a group of a backend that serves that device"
        )
    return ""


def _span(parameter: Tensor) -> tuple[int, int]:
    """First address of its elements, and the one after the last."""
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    reach = sum((length - 1) * step for length, step in steps) + 1
    return parameter.data_ptr(), parameter.data_ptr() + reach * parameter.element_size()


def spec(parameter: Tensor, group: int) -> Spec:
    """``group``: the number of its parameter group."""
    key = (group, parameter.dtype, parameter.device)
    return Spec(tuple(parameter.shape), parameter.stride(), parameter.element_size(), key)


def meant(
    exchange: Exchange,
    settings: Mapping[str, Any],
    specs: Sequence[Spec],
    names: Sequence[str],
) -> Meant:
    """What all ranks have to have alike: these settings, and parameters."""
    lines = as_lines(settings)
    device = torch.device("cpu")
    for entry, name in zip(specs, names, strict=True):
        dense = is_dense(entry.shape, entry.stride)
        stride = entry.stride if dense else contiguous(entry.shape)
        group, dtype, device = cast("tuple[int, torch.dtype, torch.device]", entry.key)
        lines.append(f"{name}: {dtype}, shape {entry.shape}, strides {stride}, group {group}")
    return Meant(exchange.group, lines, device)
