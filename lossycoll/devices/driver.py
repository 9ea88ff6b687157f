"""CUDA's driver, of which torch hands on too little: libcuda, which is there where a GPU is.

Streams, events and contexts are ints here, addresses are of memory. Calls go to the driver itself:
torch's own way to queue a copy on another stream takes ten times as long.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any, Final

from cffi import FFI

from .layer import DeviceError

LIBRARY: Final = "libcuda.so.1"
NON_BLOCKING: Final = 1
"""CU_STREAM_NON_BLOCKING: no order with the legacy default stream."""
HIGHEST: Final = -5
"""A priority above what any device has; the driver takes its highest one."""
FOR_ORDER: Final = 3
"""CU_EVENT_BLOCKING_SYNC and CU_EVENT_DISABLE_TIMING: who waits sleeps, and nobody asks when."""
AT_LEAST: Final = 0
"""CU_STREAM_WAIT_VALUE_GEQ."""
NOT_READY: Final = 600
"""CUDA_ERROR_NOT_READY."""

_DECLARATIONS = """
int cuCtxGetCurrent(uintptr_t *context);
int cuCtxPushCurrent_v2(uintptr_t context);
int cuCtxPopCurrent_v2(uintptr_t *context);
int cuStreamCreateWithPriority(uintptr_t *stream, unsigned flags, int priority);
int cuStreamWaitEvent(uintptr_t stream, uintptr_t event, unsigned flags);
int cuStreamWaitValue32_v2(uintptr_t stream, uint64_t place, uint32_t value, unsigned how);
int cuLaunchHostFunc(uintptr_t stream, uintptr_t function, uintptr_t argument);
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t nbytes, uintptr_t stream);
int cuEventCreate(uintptr_t *event, unsigned flags);
int cuEventRecord(uintptr_t event, uintptr_t stream);
int cuEventQuery(uintptr_t event);
int cuEventSynchronize(uintptr_t event);
int cuGetErrorString(int error, const char **text);
"""
_ffi = FFI()
_ffi.cdef(_DECLARATIONS)


class Driver:
    """The library's calls in one context.

    Args:
        context: That of a device, by :func:`current_context`.
    """

    def __init__(self, context: int) -> None:
        self._lib = _library()
        self._context = context
        self._thread = threading.local()
        self._events: list[int] = []

    def _call(self, what: str, function: Any, *arguments: object) -> None:
        """Calls ``function`` while the context is this thread's current one, which it mostly is."""
        current = getattr(self._thread, "current", None)
        if current is None:
            current = self._thread.current = _ffi.new("uintptr_t *")
        code = self._lib.cuCtxGetCurrent(current)
        if not code:
            if current[0] == self._context:
                code = function(*arguments)
            else:
                code = self._lib.cuCtxPushCurrent_v2(self._context) or function(*arguments)
                self._lib.cuCtxPopCurrent_v2(current)
        if code:
            raise _error(code, what)

    def new_stream(self) -> int:
        """A stream that is in no pool: none of torch's is the same one."""
        found, make = _ffi.new("uintptr_t *"), self._lib.cuStreamCreateWithPriority
        self._call("make a stream", make, found, NON_BLOCKING, HIGHEST)
        return int(found[0])

    def take_event(self) -> int:
        """An event that is for order alone: one that was given back, or a new one."""
        try:
            return self._events.pop()
        except IndexError:  # as long as calls take more than they give back
            return self._new_event()

    def give_back(self, event: int) -> None:
        """Has it taken again. Who waits for it waits for what it was when the wait was queued."""
        self._events.append(event)

    def _new_event(self) -> int:
        found = _ffi.new("uintptr_t *")
        self._call("make an event", self._lib.cuEventCreate, found, FOR_ORDER)
        return int(found[0])

    def record(self, event: int, stream: int) -> None:
        """The event happens when the stream has done what it was given until now."""
        self._call("record an event", self._lib.cuEventRecord, event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        """The stream goes on when the event has happened."""
        self._call("wait for an event", self._lib.cuStreamWaitEvent, stream, event, 0)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copies from address to address, either of which may be on the device."""
        self._call("copy", self._lib.cuMemcpyAsync, to, source, nbytes, stream)

    def wait_value(self, stream: int, address: int) -> None:
        """The stream goes on when 32 bits of pinned memory, which the device knows by the same
        address, are 1 or more."""
        wait = self._lib.cuStreamWaitValue32_v2
        self._call("wait for a word of memory", wait, stream, address, 1, AT_LEAST)

    def call_on_host(self, stream: int, function: int, argument: int) -> None:
        """The stream calls ``void function(void *)``, in a thread of the driver's."""
        call = self._lib.cuLaunchHostFunc
        self._call("call a function of the host", call, stream, function, argument)

    def has_happened(self, event: int) -> bool:
        """Whether the event has."""
        code = int(self._lib.cuEventQuery(event))
        if code not in (0, NOT_READY):
            raise _error(code, "ask for an event")
        return not code

    def synchronize(self, event: int) -> None:
        """Waits until the event has happened, without the GIL and without a core."""
        self._call("wait for an event", self._lib.cuEventSynchronize, event)


def current_context() -> int:
    """The context of the device that this thread uses, which it has used before.

    Raises:
        DeviceError: There is none, or no driver.
    """
    found = _ffi.new("uintptr_t *")
    code = _library().cuCtxGetCurrent(found)
    if code:
        raise _error(code, "name its context")
    if not found[0]:
        raise DeviceError("CUDA has no context in this thread")
    return int(found[0])


@lru_cache(maxsize=1)
def _library() -> Any:
    try:
        found = _ffi.dlopen(LIBRARY)
    except OSError as error:
        raise DeviceError(
            f"CUDA tensors need {LIBRARY}, which can't be loaded ({error}); is NVIDIA's driver "
            f"installed, and in the container?"
        ) from error
    try:
        _ = found.cuStreamWaitValue32_v2, found.cuLaunchHostFunc
    except AttributeError as error:
        raise DeviceError(
            f"{LIBRARY} is too old ({error}); CUDA tensors need a driver of CUDA 12 or later"
        ) from error
    return found


def _error(code: int, what: str) -> DeviceError:
    text = _ffi.new("const char **")
    known = _library().cuGetErrorString(code, text) == 0 and text[0] != _ffi.NULL
    reason = _ffi.string(text[0]).decode() if known else "unknown"
    return DeviceError(f"CUDA can't {what}: {reason} (CUresult {code})")
