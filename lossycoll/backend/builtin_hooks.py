"""DDP's builtin hooks, which take results from C++: a future for them on the CPU, a refusal else.

``FP16_COMPRESS`` reads a C++ list of tensors from its future, and a future that Python makes holds
an object. ``ALLREDUCE`` and plain DDP take either.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel

from lossycoll.devices.registry import is_served
from lossycoll.errors import UnsupportedError

Future = torch.futures.Future[Any]
BACKWARD: Final = torch.autograd.graph._engine_run_backward.__code__

# Only TorchScript makes a future of a list of tensors that something else completes. It compiles
# these by their source, with names that it knows. It has no streams, so it won't do for a device.
SOURCE: Final = """
def given(future: Future[int], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(future)
    return tensors

def typed(future: Future[int], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(given, future, tensors)
"""


def asked_by_hook(tensors: list[Tensor]) -> bool:
    """True if the caller's caller is C++ within a backward pass, as DDP's builtin hooks are, and
    the tensors are what ``FP16_COMPRESS`` sends."""
    if not all(one.dtype is torch.float16 and not is_served(one) for one in tensors):
        return False
    asking = sys._getframe(1).f_back  # None: a thread of torch's
    return asking is None or asking.f_code is BACKWARD


def typed(future: Future, tensors: list[Tensor]) -> Future:
    """Future of ``tensors``, complete when ``future`` is; a RuntimeError quotes its error."""
    typed: Future = _compiled().typed(future, tensors)
    return typed


@functools.cache
def _compiled() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.CompilationUnit(SOURCE)


# Neither the group nor its works hear of the hook. A call in float16 may be plain DDP's as well.
_register: Final[Any] = DistributedDataParallel._register_builtin_comm_hook


@functools.wraps(_register)
def _checked(self: DistributedDataParallel, comm_hook_type: BuiltinCommHookType) -> None:
    compresses = comm_hook_type == BuiltinCommHookType.FP16_COMPRESS
    for one in self.parameters() if compresses else ():
        if is_served(one) and self.process_group._get_backend(one.device).name() == "lossy":
            raise UnsupportedError(
                f"DDP's builtin hook FP16_COMPRESS doesn't work over lossy with parameters on "
                f"{one.device}: it reads a C++ list of tensors, and futures of tensors on a "
                f"device hold a Python object; register torch's fp16_compress_hook by "
                f'register_comm_hook, or make the group with lossycoll.Options(wire="bf16")'
            )
    _register(self, comm_hook_type)


setattr(DistributedDataParallel, _register.__name__, _checked)
