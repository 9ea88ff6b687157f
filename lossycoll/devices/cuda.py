"""CUDA as a layer: streams and events of the driver, and torch's pinned memory.

Calls go to libcuda itself, of which torch hands on too little: torch's own way to queue a copy on
another stream takes ten times as long. Streams, events and contexts are ints there.

Where torch's sanitizer watches (TORCH_CUDA_SANITIZER), streams and events are torch's, whose every
copy and every wait it sees.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.cuda import _sanitizer

from lossycoll.plan.codec import LowBit
from lossycoll.runtime.core.logfmt import log
from lossycoll.runtime.engine import codecs
from lossycoll.runtime.engine.failures import Code

from .layer import DeviceError, Event, Lane, Stream

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
        self.lib: Final = _library()
        self.waits: Final = _library(releases_gil=True)
        self._context = context
        self._events: list[int] = []

    def call(self, what: str, function: Any, *arguments: object) -> None:
        """Calls ``function`` while the context is this thread's current one, which it mostly is."""
        current = ctypes.c_void_p()
        code = self.lib.cuCtxGetCurrent(current)
        if not code:
            if current.value == self._context:
                code = function(*arguments)
            else:
                code = self.lib.cuCtxPushCurrent_v2(self._context) or function(*arguments)
                self.lib.cuCtxPopCurrent_v2(current)
        if code:
            raise _error(code, what)

    def make(self, what: str, function: Any, *how: int) -> int:
        """What ``function`` makes: a handle."""
        found = ctypes.c_void_p()
        self.call(f"make {what}", function, found, *how)
        return int(found.value or 0)

    def take_event(self) -> int:
        """An event that is for order alone: one that was given back, or a new one."""
        try:
            return self._events.pop()
        except IndexError:  # as long as calls take more than they give back
            return self.make("an event", self.lib.cuEventCreate, FOR_ORDER)

    def give_back(self, event: int) -> None:
        """Has it taken again. Who waits for it waits for what it was when the wait was queued."""
        self._events.append(event)


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


class CudaEvent:
    """An event of the driver's, which is used again when nobody refers to it any more."""

    def __init__(self, driver: Driver, library: Any, stream: int) -> None:
        self._driver = driver
        self.handle: Final = driver.take_event()
        driver.call("record an event", library.cuEventRecord, self.handle, stream)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._driver.give_back(self.handle)

    def wait(self) -> None:
        wait = self._driver.waits.cuEventSynchronize  # without a core
        self._driver.call("wait for an event", wait, self.handle)

    def is_done(self) -> bool:
        code = int(self._driver.lib.cuEventQuery(self.handle))
        if code not in (0, NOT_READY):
            raise _error(code, "ask for an event")
        return not code


class CudaStream:
    """A stream by its handle. ``foreign``: it isn't ours, and may be full, so that calls wait."""

    def __init__(
        self, driver: Driver, handle: int, device: torch.device, *, foreign: bool = False
    ) -> None:
        self._driver = driver
        self._lib = driver.waits if foreign else driver.lib
        self._handle = handle
        self._device = device

    @cached_property
    def external(self) -> Any:
        """The same as torch's."""
        made: Any = torch.cuda.ExternalStream
        return made(self._handle, device=self._device)

    def run(self, work: Callable[[], None]) -> None:
        """Calls ``work`` at once, whose kernels are queued here."""
        with torch.cuda.stream(self.external):
            work()

    def copy(self, to: Tensor, source: Tensor) -> None:
        if source.nbytes:
            addresses, copy = (to.data_ptr(), source.data_ptr()), self._lib.cuMemcpyAsync
            self._driver.call("copy", copy, *addresses, source.nbytes, self._handle)

    def record(self) -> CudaEvent:
        return CudaEvent(self._driver, self._lib, self._handle)

    def wait_for(self, event: CudaEvent) -> None:
        wait = self._lib.cuStreamWaitEvent
        self._driver.call("wait for an event", wait, self._handle, event.handle, 0)

    def call(self, function: int, argument: int) -> None:
        call = self._lib.cuLaunchHostFunc
        self._driver.call("call a function of the host", call, self._handle, function, argument)

    def wait_for_word(self, address: int) -> None:
        wait = self._lib.cuStreamWaitValue32_v2
        self._driver.call("wait for a word of memory", wait, self._handle, address, 1, AT_LEAST)


class WatchedEvent:
    """An event of torch's."""

    def __init__(self, event: Any) -> None:
        self.event: Final = event

    def wait(self) -> None:
        self.event.synchronize()

    def is_done(self) -> bool:
        return bool(self.event.query())


class WatchedStream(CudaStream):
    """The same, by torch's calls where the sanitizer is to see them."""

    def copy(self, to: Tensor, source: Tensor) -> None:

        def copy() -> None:
            with torch.inference_mode():
                to.detach().reshape(-1).copy_(source.detach().reshape(-1), non_blocking=True)

        self.run(copy)

    def record(self) -> Any:
        event: Any = torch.cuda.Event
        made = event(blocking=True)
        made.record(self.external)
        return WatchedEvent(made)

    def wait_for(self, event: Any) -> None:
        self.external.wait_event(event.event)


class CudaLayer:
    """One GPU."""

    def __init__(self, device: torch.device) -> None:
        self.name = str(device)
        self._device = device
        self._index = device.index
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the context, and the thread's current one
            self._driver = Driver(current_context())
        self._watched = bool(_sanitizer.cuda_sanitizer.enabled)
        self._stream_type = WatchedStream if self._watched else CudaStream
        self.waits_by_stream = self._can_wait(self._new_stream())

    def _new_stream(self) -> CudaStream:
        """A stream that is in no pool: none of torch's is the same one."""
        made = self._driver.lib.cuStreamCreateWithPriority
        handle = self._driver.make("a stream", made, NON_BLOCKING, HIGHEST)
        return self._stream_type(self._driver, handle, self._device)

    def _can_wait(self, stream: CudaStream) -> bool:
        """Tries it with a word that isn't 0; logs why not."""
        word = self.memory(64).fill_(1)
        try:
            stream.wait_for_word(word.data_ptr())
            stream.record().wait()
        except DeviceError as error:
            log.warning("%s: wait() blocks the host: %s", self.name, error)
            return False
        return True

    def new_lane(self) -> Lane:
        return Lane(*(self._new_stream() for _ in Lane._fields))

    def current(self) -> Stream:
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        found = self._stream_type(self._driver, handle, self._device, foreign=True)
        if self._watched:
            found.external = torch.cuda.current_stream(self._device)
        return found

    def memory(self, nbytes: int) -> Tensor:
        """Pinned memory."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise DeviceError(
                f"{self.name}: {nbytes} bytes of pinned memory can't be had: {error}; raise "
                f"ulimit -l, or free memory of this host",
                code=Code.MEMORY,
            ) from error

    def low_bits(self) -> Any:
        """Triton's kernels, which are tried once."""
        return self._kernels

    @cached_property
    def _kernels(self) -> Any:
        try:
            from . import lowbit_kernels

            _try(lowbit_kernels, self._device)
        except Exception as error:  # whatever Triton, its compiler or the driver raise
            reason = str(error).partition("\n")[0]
            log.warning("%s: floats are encoded on the host: %s", self.name, reason)
            return None
        return lowbit_kernels

    @contextlib.contextmanager
    def aside(self, lane: Lane, tensor: Tensor) -> Iterator[None]:
        # Not that of futures, which mustn't stand behind a later call's wait for the network.
        stream = lane.at_end
        stream.wait_for(self.current().record())
        with torch.cuda.stream(stream.external):
            tensor.record_stream(stream.external)
            yield

    def future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=[self._device])

    @contextlib.contextmanager
    def after(self, lane: Lane, event: Event | None) -> Iterator[None]:
        if event is not None:
            lane.futures.wait_for(event)
        with torch.cuda.stream(lane.futures.external):
            yield


def _try(low_bits: Any, device: torch.device) -> None:
    """Raises DeviceError if the kernels make other bits than the engine does."""
    how, n = LowBit(4, 32), 200
    values = torch.linspace(-3, 5, n, dtype=torch.float32, device="cpu")
    want, back = np.empty(how.wire_bytes(n), np.uint8), np.empty(n, np.float32)
    codecs.encode(how, values.numpy(), want)
    codecs.decode(how, want, back)
    there, packets = values.to(device), torch.tensor([[0, n, 0]], device=device)
    made = torch.empty(len(want), dtype=torch.uint8, device=device)
    low_bits.encode(there, packets, made, how, most_elements=n)
    low_bits.decode(made, packets, there, how, most_elements=n)
    good = np.array_equal(made.cpu().numpy(), want)
    if not good or not np.array_equal(there.cpu().numpy(), back):
        raise DeviceError("the kernels make other bits than the engine's codec")
