"""A connection of its own to a TCP store, which can be given up.

torch's client takes the next bytes that come for the answer to its latest question. If an answer
came too late, all later ones would be taken for those of other questions. And where ``get`` and
``multi_get`` wait for a key first, they wait for the store's own timeout, 5 minutes by default.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from lossycoll.runtime.control.descriptors import bound_answers
from lossycoll.runtime.core.exits import start_thread

from . import polled_store
from .polled_store import server_of

_Value = TypeVar("_Value")


class StoreConnection:
    """A :class:`.polled_store.Store` on a clone of a TCP store. After an error it takes another
    clone. A RuntimeError comes within a minute or so, whatever becomes of the store.

    ``store``: whose server it asks. ``seconds``: longest time for an answer."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._of = store
        self._seconds = seconds
        _, self.port = server_of(store)
        self._lock = threading.Lock()
        self._clone: Any = None
        self._connects: _Connecting | None = None

    def set(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._ask(lambda store: bytes(store.get(key)))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._ask(lambda store: [bytes(one) for one in store.multi_get(keys)])

    def add(self, key: str, value: int) -> int:
        return self._ask(lambda store: int(store.add(key, value)))

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda store: bool(store.check(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._ask(lambda store: bytes(store.compare_set(key, expected, desired)))

    def _ask(self, question: Callable[[Any], _Value]) -> _Value:
        with self._lock:
            clone = self._connected()
            try:
                return question(clone)
            except RuntimeError:
                self._clone = None
                raise

    def _connected(self) -> Any:
        if self._clone is None:
            self._connects = self._connects or _Connecting(self._of, self._seconds)
            connects = self._connects
            if not connects.is_over.wait(self._seconds):
                raise RuntimeError("no connection")  # that thread waits on
            self._connects = None
            if connects.failure is not None:
                raise RuntimeError(str(connects.failure)) from connects.failure
            self._clone = connects.clone
        return self._clone


class _Connecting:
    """An attempt to connect, on a thread of its own: a frozen store accepts, and says nothing."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._of = store
        self._seconds = seconds
        self.is_over = threading.Event()
        self.clone: Any = None
        self.failure: OSError | RuntimeError | None = None
        start_thread(self._run, "lossycoll-store")

    def _run(self) -> None:
        try:
            host, port = server_of(self._of)
            # torch's client would try again and again where nobody listens.
            socket.create_connection((host, port or 0), self._seconds).close()
            clone = self._of.clone()
            clone.set_timeout(timedelta(seconds=self._seconds))
            bound_answers(port, self._seconds)
            self.clone = clone
        except (OSError, RuntimeError) as error:
            self.failure = error
        finally:
            self.is_over.set()


def own_connection(store: Any) -> Any:
    """A connection of its own to the store's server; the store itself where it has none."""
    is_served = server_of(store)[1] is not None
    return StoreConnection(store, polled_store.ANSWER_SECONDS) if is_served else store
