"""CUDA as a layer: streams and events of the driver, and torch's pinned memory.

Where torch's sanitizer watches (TORCH_CUDA_SANITIZER), streams and events are torch's, whose every
copy and every wait it sees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lossycoll.plan.lowbit import LowBit
from lossycoll.runtime.core.logfmt import log
from lossycoll.runtime.engine.failures import Code

from .driver import Driver, current_context
from .layer import DeviceError, Event, Lane, LowBits, Stream


class CudaEvent:
    """An event of the driver's, which is used again when nobody refers to it any more."""

    def __init__(self, driver: Driver, stream: int, *, foreign: bool = False) -> None:
        self._driver = driver
        self.handle: Final = driver.take_event()
        driver.record(self.handle, stream, foreign=foreign)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._driver.give_back(self.handle)

    def wait(self) -> None:
        self._driver.synchronize(self.handle)

    def is_done(self) -> bool:
        return self._driver.has_happened(self.handle)


class CudaStream:
    """A stream by its handle."""

    def __init__(
        self, driver: Driver, handle: int, device: torch.device, *, foreign: bool = False
    ) -> None:
        self._driver = driver
        self._foreign = foreign
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
        nbytes = source.numel() * source.element_size()
        if nbytes:
            self._driver.copy(to.data_ptr(), source.data_ptr(), nbytes, self._handle)

    def record(self) -> CudaEvent:
        return CudaEvent(self._driver, self._handle, foreign=self._foreign)

    def wait_for(self, event: CudaEvent) -> None:
        self._driver.wait_event(self._handle, event.handle, foreign=self._foreign)

    def call(self, function: int, argument: int) -> None:
        self._driver.call_on_host(self._handle, function, argument)

    def wait_for_word(self, address: int) -> None:
        self._driver.wait_value(self._handle, address)


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
        self._watched = _is_watched()
        self._stream_type = WatchedStream if self._watched else CudaStream
        self.waits_by_stream = self._can_wait(self._new_stream())

    def _new_stream(self) -> CudaStream:
        return self._stream_type(self._driver, self._driver.new_stream(), self._device)

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
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise DeviceError(
                f"{self.name}: {nbytes} bytes of pinned memory can't be had: {error}; raise "
                f"ulimit -l, or free memory of this host",
                code=Code.MEMORY,
            ) from error

    def low_bits(self) -> LowBits | None:
        """Triton's kernels, which are tried once."""
        return self._kernels

    @cached_property
    def _kernels(self) -> LowBits | None:
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


def _try(low_bits: LowBits, device: torch.device) -> None:
    """Raises DeviceError if the kernels make other bits than the reference does."""
    how, n = LowBit(4, 32), 200
    values = torch.linspace(-3, 5, n)
    want = how.encode(values.numpy())
    there, packets = values.to(device), torch.tensor([[0, n, 0]], device=device)
    made = torch.empty(len(want), dtype=torch.uint8, device=device)
    low_bits.encode(there, packets, made, how, most_elements=n)
    low_bits.decode(made, packets, there, how, most_elements=n)
    good = np.array_equal(made.cpu().numpy(), want)
    if not good or not np.array_equal(there.cpu().numpy(), how.decode(want, n)):
        raise DeviceError("the kernels make other bits than the codec")


def _is_watched() -> bool:
    from torch.cuda import _sanitizer

    return bool(_sanitizer.cuda_sanitizer.enabled)
