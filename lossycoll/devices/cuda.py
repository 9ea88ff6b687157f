"""CUDA as a layer: torch's streams, events and pinned memory, and what the driver adds to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from lossycoll.runtime.core.logfmt import log

from . import driver
from .layer import DeviceError, Lane


class CudaEvent:
    """An event of torch's."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event: Final = event

    def wait(self) -> None:
        """Waits without holding the GIL, and without a core."""
        self.event.synchronize()

    def is_done(self) -> bool:
        """Whether the stream has come to it."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaStream:
    """A stream of torch's.

    Args:
        stream: Which.
    """

    def __init__(self, stream: Any) -> None:
        self.stream: Final = stream

    def run(self, work: Callable[[], None]) -> None:
        """Calls ``work`` at once, whose kernels and copies are queued here."""
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> CudaEvent:
        """As :meth:`lossycoll.devices.layer.Stream.record`."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return CudaEvent(event)

    def wait_for(self, event: CudaEvent) -> None:
        """As :meth:`lossycoll.devices.layer.Stream.wait_for`."""
        self.stream.wait_event(event.event)

    def call(self, function: int, argument: int) -> None:
        """As :meth:`lossycoll.devices.layer.Stream.call`."""
        with torch.cuda.device(self.stream.device):
            driver.call_on_host(self.stream.cuda_stream, function, argument)

    def wait_for_word(self, address: int) -> None:
        """As :meth:`lossycoll.devices.layer.Stream.wait_for_word`."""
        with torch.cuda.device(self.stream.device):
            driver.wait_value(self.stream.cuda_stream, address)


class CudaLayer:
    """One GPU.

    Args:
        device: Which.

    Raises:
        DeviceError: The driver lacks what it takes.
    """

    def __init__(self, device: torch.device) -> None:
        self.name = str(device)
        self._device = device
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the context, and the thread's current one
            self._futures = self._stream()
            self.waits_by_stream = self._can_wait()

    def _stream(self) -> CudaStream:
        made: Any = torch.cuda.ExternalStream
        return CudaStream(made(driver.new_stream(), device=self._device))

    def _can_wait(self) -> bool:
        """Tries it with a word that isn't 0; logs why not."""
        word, stream = self.memory(64).fill_(1), self._futures
        try:
            stream.wait_for_word(word.data_ptr())
            stream.record().wait()
        except DeviceError as error:
            log.warning("%s: wait() blocks the host: %s", self.name, error)
            return False
        return True

    def new_lane(self) -> Lane:
        """As :meth:`lossycoll.devices.layer.Layer.new_lane`."""
        with torch.cuda.device(self._device):
            return Lane(self._stream(), self._stream())

    def current(self) -> CudaStream:
        """As :meth:`lossycoll.devices.layer.Layer.current`."""
        return CudaStream(torch.cuda.current_stream(self._device))

    def is_capturing(self) -> bool:
        """As :meth:`lossycoll.devices.layer.Layer.is_capturing`."""
        return torch.cuda.is_current_stream_capturing()

    def memory(self, nbytes: int) -> Tensor:
        """As :meth:`lossycoll.devices.layer.Layer.memory`: pinned."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise DeviceError(
                f"{self.name}: {nbytes} bytes of pinned memory can't be had: {error}; raise "
                f"ulimit -l, or free memory of this host"
            ) from error

    def future(self) -> torch.futures.Future[Any]:
        """As :meth:`lossycoll.devices.layer.Layer.future`."""
        return torch.futures.Future(devices=[self._device])

    @contextlib.contextmanager
    def after(self, event: CudaEvent | None) -> Iterator[None]:
        """As :meth:`lossycoll.devices.layer.Layer.after`."""
        if event is not None:
            self._futures.wait_for(event)
        with torch.cuda.stream(self._futures.stream):
            yield
