"""What a group hands to parts of torch that ask it for the backend of a device."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import device as Device
from torch import distributed as dist


class DeviceBackend:
    """The group once more, with what torch asks of a backend alone.

    Args:
        group: The group, which serves every collective.
    """

    supports_splitting = False
    supports_shrinking = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def supports_tensor_alloc(self, device: Device) -> bool:
        """Whether it has memory of its own to offer: no."""
        del device
        return False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)
