"""Delegate backends, to which a group hands tensors of some devices: ``"cpu:lossy,cuda:nccl"``.

Of several backends torch keeps the first that is a process group, which is this one, and hands it
the tensors of all devices. So the others are made here, by all ranks at the first call that needs
one, and such calls are handed on to them as they are.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from lossycoll.errors import ClosedError, UnsupportedError
from lossycoll.runtime.engine.failures import Where

DELEGATED: Final = (
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
    "recvAnysource",
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


class Delegated(UnsupportedError):
    """The call is another backend's. Who makes it by a method of torch's never sees this."""

    def __init__(self, where: Where, name: str, backend: Any) -> None:
        super().__init__(
            f"{where}: {name} got tensors that the group has another backend for, "
            f"{type(backend).__name__}, which has no such call; use a group of 'lossy' alone"
        )
        self.backend = backend


class DelegateBackends:
    """Backends to which one group delegates the tensors of other devices."""

    def __init__(self, where: Where, store: Any, timeout: timedelta) -> None:
        self._where = where
        self._store = store
        self._timeout = timeout
        self._lock = threading.Lock()
        self._made: dict[str, Any] = {}
        self._failed: dict[str, Exception] = {}
        self._closed = False

    def made(self, backend: str) -> Any:
        """A backend, if it was made by now; or None."""
        return self._made.get(backend)

    def of(self, backend: str, configured: str) -> Any:
        """A backend, which all ranks make at the same call."""
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
        """Ends those that were made, without waiting for others if ``abort``."""
        self._closed = True
        made, self._made = self._made, {}
        for backend in made.values():
            end = getattr(backend, "abort" if abort else "shutdown", None)
            with contextlib.suppress(RuntimeError):  # it has failed by itself before
                if end is not None:
                    end()


def delegating(kind: type) -> None:
    """Has methods of a process group's class hand calls on that raise :class:`Delegated`."""
    for name in (*DELEGATED, *NEWER):
        method = getattr(kind, name, None)
        if method is not None:
            setattr(kind, name, _handing_on(method, NEWER.get(name, name)))


def _handing_on(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def served(group: Any, *arguments: Any, **rest: Any) -> Any:
        try:
            return method(group, *arguments, **rest)
        except Delegated as found:
            call = getattr(found.backend, name, None)
            if call is None:
                raise
        return group._coalescing.add(call(*arguments, **rest))

    return served
