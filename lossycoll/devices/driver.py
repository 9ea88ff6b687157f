"""The few calls of CUDA's driver that torch doesn't have: libcuda, which is there where a GPU is.

Contexts are torch's: a caller has made its device the current one, and has used it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from cffi import FFI

from .layer import DeviceError

LIBRARY: Final = "libcuda.so.1"
NON_BLOCKING: Final = 1
"""CU_STREAM_NON_BLOCKING: no order with the legacy default stream."""
AT_LEAST: Final = 0
"""CU_STREAM_WAIT_VALUE_GEQ."""
HIGHEST: Final = -5
"""A priority above what any device has; the driver takes its highest one."""

_DECLARATIONS = """
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority);
int cuStreamWaitValue32_v2(void *stream, unsigned long long place, uint32_t value, unsigned how);
int cuLaunchHostFunc(void *stream, void *function, void *argument);
int cuGetErrorString(int error, const char **text);
"""
_ffi = FFI()
_ffi.cdef(_DECLARATIONS)


@lru_cache(maxsize=1)
def _library() -> Any:
    try:
        return _ffi.dlopen(LIBRARY)
    except OSError as error:
        raise DeviceError(
            f"CUDA tensors need {LIBRARY}, which can't be loaded ({error}); is NVIDIA's driver "
            f"installed, and in the container?"
        ) from error


def new_stream() -> int:
    """A stream of the current device that is in no pool: none of torch's is the same one.

    Raises:
        DeviceError: The driver refuses it.
    """
    found = _ffi.new("void **")
    _check(_function("cuStreamCreateWithPriority")(found, NON_BLOCKING, HIGHEST), "make a stream")
    return int(_ffi.cast("uintptr_t", found[0]))


def wait_value(stream: int, address: int) -> None:
    """Has a stream wait until 32 bits of pinned host memory are 1 or more.

    Args:
        stream: The driver's handle.
        address: Of the 32 bits, which the device knows by the same address.

    Raises:
        DeviceError: The driver, or the device, can't.
    """
    code = _function("cuStreamWaitValue32_v2")(_pointer(stream), address, 1, AT_LEAST)
    _check(code, "wait for a word of memory")


def call_on_host(stream: int, function: int, argument: int) -> None:
    """Has a stream call a C function in one of the driver's threads.

    Args:
        stream: The driver's handle.
        function: Address of ``void function(void *)``.
        argument: What it is called with.

    Raises:
        DeviceError: The driver can't.
    """
    code = _function("cuLaunchHostFunc")(_pointer(stream), _pointer(function), _pointer(argument))
    _check(code, "call a function of the host")


def _pointer(address: int) -> Any:
    return _ffi.cast("void *", address)


def _function(name: str) -> Any:
    try:
        return getattr(_library(), name)
    except AttributeError as error:
        raise DeviceError(
            f"this driver's {LIBRARY} has no {name}; CUDA tensors need a driver of CUDA 12 or later"
        ) from error


def _check(code: int, what: str) -> None:
    if code:
        text = _ffi.new("const char **")
        known = _function("cuGetErrorString")(code, text) == 0 and text[0] != _ffi.NULL
        reason = _ffi.string(text[0]).decode() if known else "unknown"
        raise DeviceError(f"CUDA can't {what}: {reason} (CUresult {code})")
