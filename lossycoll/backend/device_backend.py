"""The group as a backend, for parts of torch that ask a group for the backend of a device.

There are two faces of one implementation, which is the group's. From torch 2.14 on it is a Python
``c10d.Backend``, which C++ calls as well; on 2.13 Python can't make one, and what Python asks for
is handed on to the group.

The group itself stays a ProcessGroup in both cases: of a work that a Backend returns, torch hands
its caller a stand-in that can wait and no more, without the error's type, the result, and the rank
that a receive was served by.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch._C._distributed_c10d as c10d
from torch import device as Device
from torch import distributed as dist

from lossycoll.errors import ClosedError

from .devices import DELEGATED, NEWER

_c10d: Any = c10d  # its stub lacks half of what is used here

HAS_BACKENDS: Final = hasattr(_c10d.Backend, "reconfigure")
"""Whether Python can make a backend: torch 2.14 and later."""

FORWARDED: Final = (
    *DELEGATED,
    *NEWER,
    "barrier",
    "monitored_barrier",
    "rank",
    "size",
    "set_timeout",
    "abort",
    "shutdown",
    "get_error",
    "get_reconfigure_handle",
    "reconfigure",
    "registerAbortHook",
    "unregisterAbortHook",
)
"""Methods of a c10d.Backend that are the group's."""


class DeviceBackend:
    """Methods that torch asks of a backend alone; all else is the group's."""

    # Before torch 2.15 no group of the CPU is split, and new_group would hand this to C++.
    supports_splitting = torch.__version__ >= "2.15"
    supports_shrinking = False
    supports_coalescing = False
    supports_time_estimate = _supports_time_estimate = False
    supports_window = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        # The group keeps this, where C++ does.
        self._known = weakref.ref(group)

    @property
    def _group(self) -> Any:
        group = self._known()
        if group is None:
            raise ClosedError("the group of this backend was destroyed; make a new one")
        return group

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group's members can change."""
        return bool(self._group.supports_reconfigure)

    def supports_tensor_alloc(self, device: Device) -> bool:
        """Whether it has memory of its own to offer: no."""
        del device
        return False

    def eager_connect_single_device(self, device: Device) -> None:
        """Connects the ranks, which are connected by now."""

    def getBackendName(self) -> str:
        """The backend's name, as C++ asks for it."""
        return "lossy"

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def start_coalescing(self) -> None:
        """From now on this thread's works are kept."""
        self._group._start_coalescing()

    def end_coalescing(self) -> dist.Work:
        """One work for all of this thread since :meth:`start_coalescing`."""
        work: dist.Work = self._group._end_coalescing()
        return work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def _forwarding(name: str) -> Callable[..., Any]:
    def forward(self: DeviceBackend, *given: Any, **named: Any) -> Any:
        return getattr(self._group, name)(*given, **named)

    forward.__name__ = forward.__qualname__ = name
    return forward


if HAS_BACKENDS:

    class LossyBackend(DeviceBackend, _c10d.Backend):  # type: ignore[misc]
        """The same as a backend of torch's, which C++ may call."""

        def __init__(self, group: dist.ProcessGroup) -> None:
            _c10d.Backend.__init__(self, group.rank(), group.size())
            DeviceBackend.__init__(self, group)

    for _name in FORWARDED:  # torch looks for them in the class
        setattr(LossyBackend, _name, _forwarding(_name))


def backend_of(group: dist.ProcessGroup) -> Any:
    """The group as a backend."""
    return LossyBackend(group) if HAS_BACKENDS else DeviceBackend(group)
