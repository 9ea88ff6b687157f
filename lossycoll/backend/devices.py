"""Devices that a group serves, backends that serve others, and the group as torch's backend.

When a group is made, torch says what for only in the keys of its store; later its table has the
text (``ServedDevices``). Of several backends, as in ``"cpu:lossy,cuda:nccl"``, torch keeps the
first that is a process group, which is this one, and hands it the tensors of all devices. So the
others are made here, by all ranks at the first call that needs one (``delegate``).

Parts of torch ask a group for the backend of a device (``DeviceBackend``). From torch 2.14 on that
is a Python ``c10d.Backend``, which C++ calls as well; on 2.13 Python can't make one, and what
Python asks for is handed on to the group. The group itself stays a ProcessGroup: for a work that a
Backend returns, torch hands its caller a stand-in that never tells completion, exception, result,
or the rank that a receive was served by (tests/backend/test_works_of_backends.py).
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch import device as Device
from torch._C._distributed_c10d import PrefixStore, Store

from lossycoll.errors import ClosedError, UnsupportedError
from lossycoll.runtime.engine.failures import Where

from .checks import Delegated
from .overloads import METHODS, c10d
from .tensors import is_plain

SERVED = ("cpu", "cuda")
REFUSED = ("xpu", "mps", "hpu", "npu", "mtia", "xla")


def check_device(store: Store, rank: int, size: int) -> None:
    """Refuses a group for tensors on devices that aren't served, as far as its store tells."""
    if not isinstance(store, PrefixStore):
        return
    device, below, key = None, store.underlying_store, f"device-{secrets.token_hex(8)}"
    # The prefix is "cuda/", and a store joins prefix and key by a slash.
    with contextlib.suppress(Exception):  # a store that can't do this says nothing
        store.set(key, "1")
        try:
            if not any(below.check([f"{name}//{key}"]) for name in SERVED):
                device = next((name for name in REFUSED if below.check([f"{name}//{key}"])), None)
        finally:
            store.delete_key(key)
    if device is not None:
        raise UnsupportedError(
            f"rank {rank}/{size}: backend {device}:lossy was asked for, but 'lossy' serves tensors "
            f"on the CPU and on CUDA devices; write init_process_group('lossy') and copy tensors "
            f"with .cpu(), or make a group of another backend for tensors on {device}"
        )


class ServedDevices:
    """Devices of one group's calls, and other backends, to which it delegates other devices.

    ``configured``: what the group was asked for by, such as "cpu:lossy,cuda:nccl"; empty as long as
    torch hasn't noted it. ``store``, ``timeout``: the group's, for other backends.
    """

    def __init__(
        self, where: Where, configured: Callable[[], str], store: Any, timeout: timedelta
    ) -> None:
        self._where = where
        self.configured: Final = configured
        self._store = store
        self._timeout = timeout
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._made: dict[str, Any] = {}
        self._failed: dict[str, Exception] = {}
        self._closed = False

    def takes_as_is(self, tensors: Sequence[Tensor]) -> bool:
        """True for one tensor with nothing to check."""
        return len(tensors) == 1 and "cpu" in self._known and is_plain(tensors[0])

    def check(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Refuses tensors that this group isn't for, and those of a stream that records a graph."""
        if "cpu" in self._known and all(tensor.is_cpu for tensor in tensors):
            return
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            listed = ", ".join(sorted(str(device) for device in devices))
            raise UnsupportedError(
                f"{self._where}: {name} got tensors on {listed}, but takes those of one device at "
                f"a time"
            )
        for device in devices:  # one, or none
            if device.type not in self._known:
                configured = self.configured()
                other = _other_of(device.type, configured)
                if other is not None:
                    raise Delegated(self._where, name, self.delegate(other, configured))
                if configured:
                    self._known.add(device.type)
            if device.type == "cuda" and _is_capturing(device):
                raise UnsupportedError(
                    f"{self._where}: {name} can't be captured in a CUDA graph: packets are sent "
                    f"and received by the host; call it outside of the capture"
                )

    def known_backend_of(self, device: str) -> Any:
        """Another backend that serves a type of device, if it was made by now; or None."""
        name = _other_of(device, self.configured())
        return None if name is None else self._made.get(name)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of other backends' calls, also of those that are made later."""
        with self._lock:
            self._timeout = timeout
            for backend in self._made.values():
                backend._set_default_timeout(timeout)

    def delegate(self, backend: str, configured: str) -> Any:
        """Another backend, which all ranks make at the same call."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._where}: the group has ended, and its {backend!r} too")
            if backend in self._failed:
                raise self._failed[backend]
            if backend not in self._made:
                store = c10d.PrefixStore(f"delegate/{backend}", self._store)
                try:
                    self._made[backend] = self._make(backend, store, configured)
                except Exception as error:
                    # Ranks that tried again would pair with others' first try.
                    self._failed[backend] = error
                    raise
            return self._made[backend]

    def _make(self, backend: str, store: Any, configured: str) -> Any:
        rank, size = self._where.rank, self._where.world
        if backend == "gloo" and dist.is_gloo_available():
            return dist.ProcessGroupGloo(store, rank, size, timeout=self._timeout)
        if backend == "nccl" and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, rank, size, options)
        raise UnsupportedError(
            f"{self._where}: the group was asked for by {configured!r}, and torch hands all of its "
            f"tensors to 'lossy', which can hand on to 'gloo' and 'nccl', if torch has them, but "
            f"not to {backend!r}; make a group of {backend!r} alone for these tensors"
        )

    def close(self, *, abort: bool = False) -> None:
        """Ends backends that were made, without waiting for other ranks if ``abort``."""
        self._closed = True
        made, self._made = self._made, {}
        for backend in made.values():
            end = getattr(backend, "abort" if abort else "shutdown", None)
            with contextlib.suppress(RuntimeError):  # it has failed by itself before
                if end is not None:
                    end()


def _other_of(device: str, configured: str) -> str | None:
    """The name of another backend that a group was given for a type of device."""
    for entry in configured.split(","):
        of, _, backend = entry.partition(":")
        if of == device and backend not in ("", "lossy"):
            return backend
    return None


def _is_capturing(device: torch.device) -> bool:
    """True if the caller's stream there records a graph. Nothing is made on the device for it."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


HAS_BACKENDS: Final = hasattr(c10d.Backend, "reconfigure")
"""Whether Python can make a backend: torch 2.14 and later."""

_SAME: Final = (
    *METHODS,
    *(method.also for method in METHODS.values() if method.also),
    "monitored_barrier",
    "rank",
    "size",
    "abort",
    "shutdown",
    "get_error",
    "get_reconfigure_handle",
    "reconfigure",
    "registerAbortHook",
    "set_timeout",
    "unregisterAbortHook",
)
FORWARDED: Final = {name: name for name in _SAME} | {
    "_set_default_timeout": "set_timeout",
    "start_coalescing": "_start_coalescing",
    "end_coalescing": "_end_coalescing",
}
"""Methods of a c10d.Backend that are the group's, and the group's names of them."""


_Backend: Any = c10d.Backend if HAS_BACKENDS else object


class DeviceBackend(_Backend):  # type: ignore[misc]
    """Methods that torch asks of a backend alone; all else is the group's."""

    # Before torch 2.15 no group of the CPU is split, and new_group would hand this to C++.
    supports_splitting = torch.__version__ >= "2.15"
    supports_shrinking = False
    supports_coalescing = False
    supports_time_estimate = _supports_time_estimate = False
    supports_window = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        if HAS_BACKENDS:
            super().__init__(group.rank(), group.size())
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
        return bool(self._group.supports_reconfigure)

    def supports_tensor_alloc(self, device: Device) -> bool:
        """False: the backend has no memory of its own to offer."""
        del device
        return False

    def getBackendName(self) -> str:  # also asked before there is a group
        return "lossy"

    def eager_connect_single_device(self, device: Device) -> None:
        """Connects the ranks, which are connected by now."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    if HAS_BACKENDS:

        @property
        def options(self) -> Any:
            """Options of the group, which torch's flight recorder asks for.

            torch's own property asks the class of the object for them, which is this one, and so
            itself without end: the stack overflows on Python 3.12 and later.
            """
            group = self._group
            made = c10d.Backend.Options(group.name(), group._timeout)
            made.global_ranks_in_group = list(group._global_ranks)
            made.group_name = group._name
            return made


def _forwarding(name: str, of_group: str) -> Callable[..., Any]:
    def forward(self: DeviceBackend, *given: Any, **named: Any) -> Any:
        return getattr(self._group, of_group)(*given, **named)

    forward.__name__ = forward.__qualname__ = name
    return forward


for _names in FORWARDED.items():  # torch looks for them in the class
    setattr(DeviceBackend, _names[0], _forwarding(*_names))
