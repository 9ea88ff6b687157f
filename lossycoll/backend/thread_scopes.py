"""Scopes in threads of autograd's, which compute gradients on devices for who called backward().

torch hands them what it calls thread-local state, and with it objects that were stashed there.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from functools import cache
from typing import Any, Final, cast

import torch

from lossycoll.options.scopes import Scope

KEY: Final = "lossycoll_scope"

_torch: Any = torch._C  # its stub lacks these


def _stash(thing: object) -> None:
    if _steals():
        _keep(thing)
    _torch._stash_obj_in_tls(KEY, thing)


def _keep(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@cache
def _steals() -> bool:
    """True if torch gives back a reference to what is stashed that it has never taken (2.11 does):
    then objects are freed while they are in use."""
    thing = object()
    before = sys.getrefcount(thing)
    _torch._stash_obj_in_tls(KEY, thing)
    steals = sys.getrefcount(thing) == before
    if steals:
        _keep(thing)
    return steals


class ByTorch:
    """A :class:`lossycoll.options.scopes.Carrier` by torch's thread-local state."""

    def put(self, scope: Scope | None) -> None:
        """Hands a scope to threads that work for this one from now on."""
        _stash(scope)

    def get(self) -> Scope | None:
        """The scope of the thread that this one works for; None in threads that Python has started.
        Those have contexts of their own: what is stashed there may be of another task."""
        if not _torch._is_key_in_tls(KEY):
            return None
        if not isinstance(threading.current_thread(), threading._DummyThread):
            return None
        return cast("Scope | None", _torch._get_obj_in_tls(KEY))
