"""CUDA's driver, of which torch hands on too little: libcuda, which is there where a GPU is.

Streams, events and contexts are ints here, addresses are of memory. Calls go to the driver itself:
torch's own way to queue a copy on another stream takes ten times as long.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, Final

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

_POINTER = ctypes.POINTER(ctypes.c_void_p)
_ARGUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "cuCtxGetCurrent": (_POINTER,),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (_POINTER,),
    "cuStreamCreateWithPriority": (_POINTER, ctypes.c_uint, ctypes.c_int),
    "cuStreamWaitEvent": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint),
    "cuStreamWaitValue32_v2": (
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_uint32,
        ctypes.c_uint,
    ),
    "cuLaunchHostFunc": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    "cuMemcpyAsync": (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p),
    "cuEventCreate": (_POINTER, ctypes.c_uint),
    "cuEventRecord": (ctypes.c_void_p, ctypes.c_void_p),
    "cuEventQuery": (ctypes.c_void_p,),
    "cuEventSynchronize": (ctypes.c_void_p,),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class Driver:
    """The library's calls in one context."""

    def __init__(self, context: int) -> None:
        self._lib = _library()
        self._waits = _library(releases_gil=True)
        self._context = context
        self._events: list[int] = []

    def _call(self, what: str, function: Any, *arguments: object) -> None:
        """Calls ``function`` while the context is this thread's current one, which it mostly is."""
        current = ctypes.c_void_p()
        code = self._lib.cuCtxGetCurrent(current)
        if not code:
            if current.value == self._context:
                code = function(*arguments)
            else:
                code = self._lib.cuCtxPushCurrent_v2(self._context) or function(*arguments)
                self._lib.cuCtxPopCurrent_v2(current)
        if code:
            raise _error(code, what)

    def new_stream(self) -> int:
        """A stream that is in no pool: none of torch's is the same one."""
        found, make = ctypes.c_void_p(), self._lib.cuStreamCreateWithPriority
        self._call("make a stream", make, found, NON_BLOCKING, HIGHEST)
        return int(found.value or 0)

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
        found = ctypes.c_void_p()
        self._call("make an event", self._lib.cuEventCreate, found, FOR_ORDER)
        return int(found.value or 0)

    def record(self, event: int, stream: int, *, foreign: bool = False) -> None:
        """The event happens when the stream has done what it was given until now.

        ``foreign``: the stream may be full, so that the call waits.
        """
        library = self._waits if foreign else self._lib
        self._call("record an event", library.cuEventRecord, event, stream)

    def wait_event(self, stream: int, event: int, *, foreign: bool = False) -> None:
        """The stream goes on when the event has happened; ``foreign`` as in :meth:`record`."""
        library = self._waits if foreign else self._lib
        self._call("wait for an event", library.cuStreamWaitEvent, stream, event, 0)

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
        self._call("wait for an event", self._waits.cuEventSynchronize, event)


def current_context() -> int:
    """The context of the device that this thread uses, which it has used before."""
    found = ctypes.c_void_p()
    code = _library().cuCtxGetCurrent(found)
    if code:
        raise _error(code, "name its context")
    if not found.value:
        raise DeviceError("CUDA has no context in this thread")
    return int(found.value)


@lru_cache(maxsize=2)
def _library(releases_gil: bool = False) -> Any:
    """The library; its calls keep the GIL, since most take less time than to get it again."""
    try:
        found: Any = (ctypes.CDLL if releases_gil else ctypes.PyDLL)(LIBRARY)
    except OSError as error:
        raise DeviceError(
            f"CUDA tensors need {LIBRARY}, which can't be loaded ({error}); is NVIDIA's driver "
            f"installed, and in the container?"
        ) from error
    for name, arguments in _ARGUMENTS.items():
        try:
            getattr(found, name).argtypes = arguments
        except AttributeError as error:
            raise DeviceError(
                f"{LIBRARY} is too old: it has no {name}; CUDA tensors need a driver of CUDA 12 or "
                f"later"
            ) from error
    return found


def _error(code: int, what: str) -> DeviceError:
    text = ctypes.c_char_p()
    known = _library().cuGetErrorString(code, text) == 0 and text.value
    reason = text.value.decode() if known and text.value else "unknown"
    return DeviceError(f"CUDA can't {what}: {reason} (CUresult {code})")
