"""Futures of tensors for callers in C++, whose value is a list of tensors to them.

A future that Python makes holds an object; torch's ``FP16_COMPRESS`` reads a list of tensors from
it and fails. Only TorchScript makes a future of that type that something else completes.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from typing import Any, Final

import torch

Future = torch.futures.Future[Any]
BACKWARD: Final = torch.autograd.graph._engine_run_backward.__code__

# TorchScript compiles these by their source, with names that it knows.
SOURCE: Final = """
def given(future: Future[int], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(future)
    return tensors

def typed(future: Future[int], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(given, future, tensors)
"""


def asked_by_hook(tensors: list[torch.Tensor]) -> bool:
    """Whether the caller's caller is C++ within a backward pass, as DDP's builtin hooks are, and
    the tensors are what ``FP16_COMPRESS`` sends.
    """
    if not all(one.dtype is torch.float16 and one.device.type == "cpu" for one in tensors):
        return False
    asking = sys._getframe(1).f_back  # None: torch's thread for a device
    return asking is None or asking.f_code is BACKWARD


def typed(future: Future, tensors: list[torch.Tensor]) -> Future:
    """Return a future of ``tensors``, complete when ``future`` is; an error is a RuntimeError that
    quotes it.
    """
    typed: Future = _compiled().typed(future, tensors)
    return typed


@cache
def _compiled() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.CompilationUnit(SOURCE)
