"""Lets tests that have a GPU for each rank run on a machine with one, which all ranks share.

torch's suite counts GPUs, and leaves a test out where there are fewer than ranks; the tests name
devices by the rank's number. Here the suite sees as many GPUs as ranks, and every device that a
test names is GPU 0. What then goes wrong by itself goes wrong for gloo too, which runs beside.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NAMES_A_DEVICE = re.compile(r"^cuda(:\d+)?$")
_ABOUT_GPUS = re.compile(r"cuda|gpu", re.IGNORECASE)


class _Instead:
    """An object but for some of its attributes."""

    def __init__(self, real: Any, **changed: Any) -> None:
        self.__dict__.update(changed, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def here(device: Any) -> Any:
    """GPU 0, for whatever names a GPU; anything else as it is."""
    if isinstance(device, int) and not isinstance(device, bool):
        return 0
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cuda", 0)
    if isinstance(device, str) and _NAMES_A_DEVICE.match(device):
        return "cuda:0"
    return device


class OnGpu0(TorchFunctionMode):
    """While it is entered, tensors that were to be on any GPU are on GPU 0."""

    _MOVES = (torch.Tensor.cuda, torch.Tensor.to)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = here(kwargs["device"])
        if func in self._MOVES:
            args = (args[0], *(here(one) for one in args[1:]))
        return func(*args, **kwargs)


def share(modules: list[ModuleType], world: int) -> None:
    """Makes ``modules``, those of the suite, see a GPU for each of ``world`` ranks."""
    import torch.cuda
    import torch.nn.parallel.distributed as parallel

    seen = _Instead(torch, cuda=_Instead(torch.cuda, device_count=lambda: world))
    for module in modules:
        module.torch = seen  # type: ignore[attr-defined]
    for module in (torch.cuda, parallel):
        module._get_device_index = _of_gpu_0(module._get_device_index)


def _of_gpu_0(index_of: Callable[..., int]) -> Callable[..., int]:
    """torch's own function from a device to its number, which is 0 for every GPU."""

    def index(device: Any, *args: Any, **rest: Any) -> int:
        return min(index_of(device, *args, **rest), 0)

    return index


def is_about_gpus(test: Any) -> bool:
    """Whether a test, or what decides if it is run, names GPUs."""
    return bool(_ABOUT_GPUS.search(inspect.getsource(inspect.unwrap(test))))
