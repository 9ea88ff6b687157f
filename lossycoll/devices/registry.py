"""Devices that are served: each has a layer, a pool of host memory, and calls that end.

A thread waits for these ends, and gives the calls' memory back. It also has operations noted as
done, or as failed, for which nobody waits. It ends when it has had nothing to do for a while, and
before the interpreter does.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from lossycoll.runtime.core.call import Operation
from lossycoll.runtime.core.exits import start_thread
from lossycoll.runtime.core.logfmt import log

from .bounce import Bounce
from .layer import HostMemory, Lane, Layer

IDLE_SECONDS: Final = 0.5
SWEEP_SECONDS: Final = 0.002

LANE_PIECES: Final = 100
"""Pieces of calls of a lane that may be under way: a stream that is given more waits in the driver.
"""
CALL_PIECES: Final = LANE_PIECES // 2
"""Pieces of a call, at most, so that a second large one is copied while the first is on its way."""

Entry = tuple[Bounce, Sequence[Operation]]

_abandoned: Final[list[Bounce]] = []


class Retirement:
    """One device's calls, in the order in which they were made. The thread looks every now and
    then: were it woken by every call, it would take the GIL from the caller each time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque()
        self._under_way: Counter[int] = Counter()
        self._thread: threading.Thread | None = None
        self._stopped = False
        """The interpreter is about to end: nothing is given back any more."""

    def wait_for_room(self, lane: Lane, pieces: int) -> None:
        """Returns when the lane may be given so many ``pieces``. Others have the GIL meanwhile."""
        while self._under_way[id(lane)] + pieces > LANE_PIECES and not self._stopped:
            time.sleep(SWEEP_SECONDS)

    def add(self, bounce: Bounce, operations: Sequence[Operation]) -> None:
        """Waits for the end of a call."""
        with self._lock:
            self._entries.append((bounce, operations))
            self._under_way[id(bounce.lane)] += len(bounce.pieces)
            if self._thread is None and not self._stopped:
                self._thread = start_thread(self._run, "lossycoll-device", self._stop)

    def _stop(self) -> None:
        self._stopped = True

    def _run(self) -> None:
        pending: list[Entry] = []
        idle_since = time.monotonic()
        while not self._stopped:
            time.sleep(SWEEP_SECONDS)
            with self._lock:
                pending += self._entries
                self._entries.clear()
                if pending:
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > IDLE_SECONDS:
                    self._thread = None
                    return
            pending = self._rest(pending)

    def _rest(self, pending: list[Entry]) -> list[Entry]:
        """Ends what is over; returns the rest. What was queued ahead is over in its order."""
        rest: list[Entry] = []
        stopped: set[int] = set()
        for bounce, operations in pending:
            lane = id(bounce.lane)
            if (not bounce.ahead or lane not in stopped) and _ended(bounce, operations):
                with self._lock:  # callers add to it
                    self._under_way[lane] -= len(bounce.pieces)
                continue
            rest.append((bounce, operations))
            if bounce.ahead:
                stopped.add(lane)
        return rest


def abandon(bounce: Bounce) -> None:
    """Has the memory of a call never used again: nobody hears of its end."""
    _abandoned.append(bounce)


def _ended(bounce: Bounce, operations: Sequence[Operation]) -> bool:
    """True if the call is over; its memory is given back then."""
    try:
        if not bounce.is_over(operations):
            return False
        bounce.release()
    except Exception as error:
        log.error("%s: a copy between host and device failed: %s", bounce.layer.name, error)
        abandon(bounce)
    return True


def _cuda(device: torch.device) -> Layer:
    # Here, so that nobody loads the driver's library who has no tensor there.
    from .cuda import CudaLayer

    return CudaLayer(device)


factories: Final[dict[str, Callable[[torch.device], Layer]]] = {"cuda": _cuda}
"""Factory of each device type's layer. Host memory has none."""


class Device:
    """One device of this process."""

    def __init__(self, layer: Layer) -> None:
        self.layer: Final = layer
        self.pool: Final = HostMemory(layer.memory)
        self.retirement: Final = Retirement()
        self._free: list[Lane] = []

    def take_lane(self) -> Lane:
        """A lane that no other group has, until :meth:`give_back`."""
        with _lock:
            if self._free:
                return self._free.pop()
        return self.layer.new_lane()

    def give_back(self, lane: Lane) -> None:
        """Has a lane used again, by calls that come after those that it was given."""
        with _lock:
            self._free.append(lane)


_devices: Final[dict[torch.device, Device]] = {}
_lock: Final = threading.Lock()


def is_served(tensor: Tensor) -> bool:
    """True if the tensor lies on a device that has a layer."""
    # The short way is that of every call on the CPU.
    return not (tensor.is_cpu and "cpu" not in factories) and tensor.device.type in factories


def device_of(tensor: Tensor) -> Device:
    """The device that a tensor lies on, for which :func:`is_served` holds."""
    key = tensor.device
    found = _devices.get(key)
    if found is None:
        with _lock:
            if key not in _devices:
                _devices[key] = Device(factories[key.type](key))
            found = _devices[key]
    return found
