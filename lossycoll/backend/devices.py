"""Which devices a group was asked to serve: torch says so only in the keys of its store."""

from __future__ import annotations

import contextlib
import secrets

from torch._C._distributed_c10d import PrefixStore, Store

from lossycoll.errors import UnsupportedError

SERVED = ("cpu", "cuda")
REFUSED = ("xpu", "mps", "hpu", "npu", "mtia", "xla")


def check_device(store: Store, rank: int, size: int) -> None:
    """Refuses a group for tensors on devices that aren't served.

    Args:
        store: What torch hands to a backend: below the device's name, as in ``cuda/``.
        rank: This rank in the group, for the error.
        size: The group's ranks, for the error.

    Raises:
        UnsupportedError: The group was asked for by ``xpu:lossy``, say.
    """
    device = _device_of(store)
    if device is not None:
        raise UnsupportedError(
            f"rank {rank}/{size}: backend {device}:lossy was asked for, but 'lossy' serves tensors "
            f"on the CPU and on CUDA devices; write init_process_group('lossy') and copy tensors "
            f"with .cpu(), or make a group of another backend for tensors on {device}"
        )


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
