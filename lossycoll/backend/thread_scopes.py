"""Scopes in threads of autograd's, which compute gradients on devices for who called backward().

torch hands them what it calls thread-local state, and with it objects that were stashed there.
"""

from __future__ import annotations

import threading
from typing import Any, Final, cast

import torch

from lossycoll.options.scopes import Scope

KEY: Final = "lossycoll_scope"

_torch: Any = torch._C  # its stub lacks these


class ByTorch:
    """A :class:`lossycoll.options.scopes.Carrier` by torch's thread-local state."""

    def put(self, scope: Scope | None) -> None:
        """Hands a scope to threads that work for this one from now on."""
        _torch._stash_obj_in_tls(KEY, scope)

    def get(self) -> Scope | None:
        """The scope of the thread that this one works for; None in threads that Python has started.
        Those have contexts of their own: what is stashed there may be of another task."""
        if not _torch._is_key_in_tls(KEY):
            return None
        if not isinstance(threading.current_thread(), threading._DummyThread):
            return None
        return cast("Scope | None", _torch._get_obj_in_tls(KEY))
