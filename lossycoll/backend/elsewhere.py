"""Tensors of devices that a group has another backend for: ``"cpu:lossy,cuda:nccl"``.

Of several backends torch keeps the first that is a process group, which is this one, and hands it
the tensors of all devices. So the others are made here, by all ranks at the first call that needs
one, and such calls are handed on to them as they are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from lossycoll.errors import UnsupportedError
from lossycoll.runtime.engine.failures import Where

HANDED_ON: Final = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "send",
    "recv",
    "recv_anysource",
)
"""Methods of a process group that get tensors, by the names that all backends have."""
NEWER: Final = {
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Names that newer torch has for some."""


class Elsewhere(Exception):
    """The call is another backend's.

    Args:
        backend: That backend.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__("the call is another backend's")
        self.backend = backend


class OtherBackends:
    """One group's.

    Args:
        where: The group's rank.
        store: The group's.
        timeout: The group's timeout.
    """

    def __init__(self, where: Where, store: Any, timeout: timedelta) -> None:
        self._where = where
        self._store = store
        self._timeout = timeout
        self._made: dict[str, Any] = {}

    def of(self, backend: str, configured: str) -> Any:
        """A backend, which all ranks make at the same call.

        Args:
            backend: Its name.
            configured: What the group was asked for by, for the error.

        Raises:
            UnsupportedError: This torch doesn't have it, or it isn't one of torch's own.
        """
        if backend not in self._made:
            store = c10d.PrefixStore(f"elsewhere/{backend}", self._store)
            self._made[backend] = self._make(backend, store, configured)
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
        """Ends those that were made, without waiting for others if ``abort``."""
        made, self._made = self._made, {}
        for backend in made.values():
            end = getattr(backend, "abort" if abort else "shutdown", None)
            with contextlib.suppress(RuntimeError):  # it has failed by itself before
                if end is not None:
                    end()


def handing_on(kind: type) -> None:
    """Has methods of a process group's class hand calls on that raise :class:`Elsewhere`."""
    for name in (*HANDED_ON, *NEWER):
        method = getattr(kind, name, None)
        if method is not None:
            setattr(kind, name, _handing_on(method, NEWER.get(name, name)))


def _handing_on(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def served(group: Any, *arguments: Any, **rest: Any) -> Any:
        try:
            return method(group, *arguments, **rest)
        except Elsewhere as found:
            backend = found.backend
        return group._coalescing.add(getattr(backend, name)(*arguments, **rest))

    return served
