"""Devices that a group was asked to serve, and whether a call's tensors lie on one of them.

When a group is made, torch says so only in the keys of its store; later its table has the text.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from lossycoll.errors import UnsupportedError
from lossycoll.runtime.engine.failures import Where

from .delegates import DelegateBackends, Delegated

SERVED = ("cpu", "cuda")
REFUSED = ("xpu", "mps", "hpu", "npu", "mtia", "xla")


def check_device(store: Store, rank: int, size: int) -> None:
    """Refuses a group for tensors on devices that aren't served."""
    device = _device_of(store)
    if device is not None:
        raise UnsupportedError(
            f"rank {rank}/{size}: backend {device}:lossy was asked for, but 'lossy' serves tensors "
            f"on the CPU and on CUDA devices; write init_process_group('lossy') and copy tensors "
            f"with .cpu(), or make a group of another backend for tensors on {device}"
        )


class ServedDevices:
    """The devices of one group's calls.

    ``configured``: what the group was asked for by, such as "cpu:lossy,cuda:nccl"; empty as long as
    torch hasn't noted it. ``others``: the backends of other devices; None: there are none.
    """

    def __init__(
        self, where: Where, configured: Callable[[], str], others: DelegateBackends | None = None
    ) -> None:
        self._where = where
        self._configured = configured
        self._others = others
        self._known: set[str] = set()

    @property
    def configured(self) -> str:
        """What the group was asked for by, as far as it is known."""
        return self._configured()

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
        for device in devices:
            if device.type not in self._known:
                self._check_backend(name, device.type)
        for device in devices:
            if device.type == "cuda" and _is_capturing(device):
                raise UnsupportedError(
                    f"{self._where}: {name} can't be captured in a CUDA graph: packets are sent "
                    f"and received by the host; call it outside of the capture"
                )

    def known_backend_of(self, device: str) -> Any:
        """Another backend that serves a type of device, if it was made by now; or None."""
        name = _other_of(device, self._configured())
        return None if name is None or self._others is None else self._others.made(name)

    def _check_backend(self, name: str, device: str) -> None:
        configured = self._configured()
        other = _other_of(device, configured)
        if other is not None:
            assert self._others is not None
            raise Delegated(self._where, name, self._others.of(other, configured))
        if configured:
            self._known.add(device)


def _other_of(device: str, configured: str) -> str | None:
    """The name of another backend that a group was given for a type of device."""
    for entry in configured.split(","):
        of, _, backend = entry.partition(":")
        if of == device and backend not in ("", "lossy"):
            return backend
    return None


def _is_capturing(device: torch.device) -> bool:
    """Whether the caller's stream there records a graph. Nothing is made on the device for it."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _device_of(store: Store) -> str | None:
    """The device that isn't served and that the store is for; None if that can't be told."""
    if not isinstance(store, PrefixStore):
        return None
    key = f"device-{secrets.token_hex(8)}"
    below = store.underlying_store
    with contextlib.suppress(Exception):  # a store that can't do this says nothing
        store.set(key, "1")
        try:
            # The prefix is "cuda/", and a store joins prefix and key by a slash.
            if not any(below.check([f"{name}//{key}"]) for name in SERVED):
                found = (name for name in REFUSED if below.check([f"{name}//{key}"]))
                return next(found, None)
        finally:
            store.delete_key(key)
    return None
