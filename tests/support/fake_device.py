"""A device without a GPU: CPU tensors, streams that are threads, delays, and poisoned host memory.

The caller's own stream is the calling thread: what is queued there is done at once, and to wait for
an event there is to wait for it. All else happens some time later, as on a GPU; so what reads too
early, or gives memory back too early, reads poison.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lossycoll.devices import registry
from lossycoll.devices.layer import HostMemory, Lane
from lossycoll.plan.codec import LowBit
from lossycoll.runtime.core.exits import start_thread
from tests.oracle import lowbit

POISON: Final = 0xA5
MOST_DELAY: Final = 0.002
WAIT_SECONDS: Final = 60.0

_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


_over: Final = threading.Event()
"""The interpreter is about to end."""


class FakeEvent:
    def __init__(self) -> None:
        self.happened = threading.Event()

    def wait(self) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not self.happened.wait(0.1) and not _over.is_set():
            assert time.monotonic() < end, "a stream of the fake device is stuck"

    def is_done(self) -> bool:
        return self.happened.is_set()


class Here:
    """The caller's stream: the calling thread."""

    def record(self) -> FakeEvent:
        event = FakeEvent()
        event.happened.set()
        return event

    def wait_for(self, event: FakeEvent) -> None:
        event.wait()


class FakeStream:
    """A thread that does what it is given, in order, each after a delay of its own."""

    def __init__(self, name: str, seed: str) -> None:
        self._random = random.Random(f"{name} {seed}")
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        start_thread(self._go_on, f"fake-{name}", self._stop)

    def _stop(self) -> None:
        _over.set()
        self._work.put(_over.set)  # wakes it

    def _go_on(self) -> None:
        while True:
            work = self._work.get()
            if _over.is_set():
                return
            if self._random.random() < 0.3:
                time.sleep(self._random.random() * MOST_DELAY)
            try:
                work()
            except Exception as error:
                self.failure = error
            del work

    def run(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def copy(self, to: Tensor, source: Tensor) -> None:
        def copy() -> None:
            with torch.inference_mode():
                to.detach().reshape(-1).copy_(source.detach().reshape(-1))

        self._work.put(copy)

    def record(self) -> FakeEvent:
        event = FakeEvent()
        self._work.put(event.happened.set)
        return event

    def wait_for(self, event: FakeEvent) -> None:
        self._work.put(event.wait)

    def call(self, function: int, argument: int) -> None:
        self._work.put(lambda: _Function(function)(argument))

    def wait_for_word(self, address: int) -> None:
        word = ctypes.c_uint32.from_address(address)

        def wait() -> None:
            end = time.monotonic() + WAIT_SECONDS
            while not word.value and not _over.is_set():
                assert time.monotonic() < end, "the engine never wrote the word"
                time.sleep(0.0002)

        self._work.put(wait)


class HostCodec:
    """In place of a device's kernels: the codec of the host, packet by packet."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode(
        self,
        values: Tensor,
        packets: Tensor,
        to_bytes: Tensor,
        how: LowBit,
        *,
        most_elements: int,
        key: int = 0,
    ) -> Tensor:
        nans = 0
        x, data = values.numpy(), to_bytes.numpy()
        for first, n, at in packets.tolist():
            assert n <= most_elements
            part = x[first : first + n]
            data[at : at + how.wire_bytes(n)] = lowbit.encode(how, part, key << 32 | first)
            nans += sum(
                not np.isfinite(part[i : i + how.group]).all() for i in range(0, n, how.group)
            )
            self.encoded += n
        return torch.tensor([nans], dtype=torch.int32)

    def decode(
        self,
        from_bytes: Tensor,
        packets: Tensor,
        to_values: Tensor,
        how: LowBit,
        *,
        most_elements: int,
    ) -> None:
        x, data = to_values.numpy(), from_bytes.view(-1).numpy()
        for first, n, at in packets.tolist():
            assert n <= most_elements
            x[first : first + n] = lowbit.decode(how, data[at : at + how.wire_bytes(n)], n)


class FakeLayer:
    """As :class:`lossycoll.devices.layer.Layer`. ``waits_by_stream``: whether its streams can."""

    def __init__(self, *, waits_by_stream: bool, seed: int = 0) -> None:
        self.name = "fake"
        self.waits_by_stream = waits_by_stream
        self.lanes: list[Lane] = []
        self.refuses_memory = False
        self.codec: HostCodec | None = HostCodec()
        self._seed = seed

    def new_lane(self) -> Lane:
        number = f"{self._seed} {len(self.lanes)}"
        self.lanes.append(Lane(*(FakeStream(name, number) for name in Lane._fields)))
        return self.lanes[-1]

    def current(self) -> Here:
        return Here()

    def memory(self, nbytes: int) -> Tensor:
        if self.refuses_memory:
            raise MemoryError(f"the fake device has no {nbytes} bytes")
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def low_bits(self) -> Any:
        return self.codec

    def aside(self, lane: Lane, tensor: Tensor) -> contextlib.AbstractContextManager[None]:
        """The caller's stream is its thread, and nothing can be beside it."""
        del lane, tensor
        return contextlib.nullcontext()

    def future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    @contextlib.contextmanager
    def after(self, lane: Lane, event: FakeEvent | None) -> Iterator[None]:
        del lane
        if event is not None:
            event.wait()
        yield


class PoisonedMemory(HostMemory):
    """What is given back is poisoned: who still reads it reads nonsense."""

    def give_back(self, piece: Tensor) -> None:
        piece.fill_(POISON)
        super().give_back(piece)


def synchronize() -> None:
    """Waits until the fake device, if there is one, has done all that it was given."""
    if "cpu" in registry.factories:
        layer: Any = registry.device_of(torch.empty(0)).layer
        for lane in layer.lanes:
            for stream in lane:
                stream.record().wait()
                assert stream.failure is None, stream.failure


def install(*, waits_by_stream: bool = True, seed: int = 0) -> None:
    """From now on CPU tensors of this process lie on the fake device."""
    registry.HostMemory = PoisonedMemory  # type: ignore[attr-defined]
    registry.factories["cpu"] = lambda _: FakeLayer(waits_by_stream=waits_by_stream, seed=seed)
    registry._devices.clear()
