"""Backend of a device, for parts of torch that ask a group for one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as _c10d
from torch import device as Device
from torch import distributed as dist


class DeviceBackend:
    """The group once more, with what torch asks of a backend alone.

    Args:
        group: The group, which serves every collective.
    """

    # Before torch 2.15 no group of the CPU is split, and new_group would hand this to C++.
    supports_splitting = torch.__version__ >= "2.15"
    supports_shrinking = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def supports_tensor_alloc(self, device: Device) -> bool:
        """Whether it has memory of its own to offer: no."""
        del device
        return False

    def eager_connect_single_device(self, device: Device) -> None:
        """Connects the ranks, which are connected by now."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class _Placeholder(_c10d.Backend):
    def getBackendName(self) -> str:
        return "lossy"


def placeholder(rank: int, size: int) -> _c10d.Backend | None:
    """What a group registers with torch as the backend of its CPU tensors.

    The group's own methods serve every collective, so this refuses them all. But when torch 2.15
    makes a group, it asks the backend of each device for its name, and refuses a group without.

    Args:
        rank: This rank in the group.
        size: The group's ranks.

    Returns:
        The backend; None with torch 2.13, where Python can't make one and torch asks for none.
    """
    try:
        return _Placeholder(rank, size)
    except TypeError:
        return None
