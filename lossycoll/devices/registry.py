"""Which devices are served: each has a layer, a pool of host memory, and calls that end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar, Final

import torch
from torch import Tensor

from .host_memory import HostMemory
from .layer import Lane, Layer
from .retirement import Retirement


def _cuda(device: torch.device) -> Layer:
    # Here, so that nobody loads the driver's library who has no tensor there.
    from .cuda import CudaLayer

    return CudaLayer(device)


factories: Final[dict[str, Callable[[torch.device], Layer]]] = {"cuda": _cuda}
"""By type of device: what makes the layer of one. Host memory has none."""


class Device:
    """One device of this process.

    Attributes:
        layer: The same.
        pool: Host memory that it reaches.
        retirement: Its calls until their end.
    """

    pool_type: ClassVar[type[HostMemory]] = HostMemory

    def __init__(self, layer: Layer) -> None:
        self.layer: Final = layer
        self.pool: Final = self.pool_type(layer.memory)
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
    """Whether the tensor lies on a device that has a layer."""
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


def layer_of(tensor: Tensor) -> Layer:
    """The layer of :func:`device_of`."""
    return device_of(tensor).layer


def forget() -> None:
    """Has all devices made anew."""
    _devices.clear()
