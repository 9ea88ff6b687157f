"""A torch store that is asked again and again: its failures are typed, and its values may be
sealed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from lossycoll.errors import RendezvousError
from lossycoll.runtime.keys.aead import SealedValues

POLL_SECONDS: Final = (0.001, 0.02)
"""First and longest pause between two looks into the store."""

_Value = TypeVar("_Value")


class Store(Protocol):
    """The part of torch.distributed.Store that is used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def add(self, key: str, value: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class PolledStore:
    """``store``, whose own failures are RendezvousErrors.

    Args:
        store: torch's.
        who: This rank, as errors name it.
        values: What seals all values; None: they are in clear. A value that doesn't open counts as
            one that isn't there.
    """

    def __init__(self, store: Store, who: str, values: SealedValues | None = None) -> None:
        self._store = store
        self._who = who
        self._values = values

    def set(self, key: str, value: str) -> str:
        """Returns a digest of what stands in the store then: :meth:`anothers`."""
        text = value if self._values is None else self._values.seal(key, value)
        self.mark(key, text)
        return _digest(text)

    def set_first(self, key: str, value: str) -> None:
        """Writes a value where there is none, whoever else tries."""
        text = value if self._values is None else self._values.seal(key, value)
        self._try(lambda: self._store.compare_set(key, "", text))

    def get(self, key: str) -> str | None:
        """The value, or None while there is none."""
        found = self._found(key)
        return None if found is None else self._opened(key, found)

    def get_all(self, keys: list[str]) -> list[str] | None:
        """The values, in two questions however many they are; None while one is missing."""
        found = self._try(
            lambda: (
                [_text(value) for value in self._store.multi_get(keys)]
                if self._store.check(keys)
                else None
            )
        )
        if found is None:
            return None
        opened = [self._opened(key, value) for key, value in zip(keys, found, strict=True)]
        values = [value for value in opened if value is not None]
        return values if len(values) == len(keys) else None

    def counts(self, keys: list[str]) -> list[int]:
        """What counters are that :meth:`add` has made, in one question; other values count 0."""
        found = self._try(lambda: self._store.multi_get(keys) if keys else [])
        return [int(value) if value.isdigit() else 0 for value in found]

    def add(self, key: str, value: int) -> int:
        """Adds to a counter, which anybody can read; returns what it is then."""
        return self._try(lambda: self._store.add(key, value))

    def anothers(self, key: str, is_ours: Callable[[str], object]) -> str | None:
        """A digest of what stands under ``key``, if it doesn't open or ``is_ours`` denies it; None:
        it is ours, or nothing is there."""
        found = self._found(key)
        text = None if found is None else self._opened(key, found)
        if found is None or (text is not None and is_ours(text)):
            return None
        return _digest(found)

    def mark(self, key: str, text: str = "1") -> None:
        """Writes what those can read whose secret is another one."""
        self._try(lambda: self._store.set(key, text))

    def is_marked(self, key: str) -> bool:
        """Whether anything stands under ``key``."""
        return self._try(lambda: self._store.check([key]))

    def _found(self, key: str) -> str | None:
        return self._try(lambda: _text(self._store.get(key)) if self._store.check([key]) else None)

    def _opened(self, key: str, found: str) -> str | None:
        return found if self._values is None else self._values.open(key, found)

    def _try(self, use: Callable[[], _Value]) -> _Value:
        try:
            return use()
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RendezvousError(
                f"{self._who}: the store failed in the rendezvous ({reason}); it ends with the "
                f"process that serves it, rank 0 or the launcher: their error came first"
            ) from error


class Pause:
    """Sleeps a little longer each time: quick when all are there, light when one is late."""

    def __init__(self) -> None:
        self._seconds = POLL_SECONDS[0]

    @property
    def is_long(self) -> bool:
        """Whether somebody is late."""
        return self._seconds == POLL_SECONDS[1]

    def __call__(self) -> None:
        time.sleep(self._seconds)
        self._seconds = min(self._seconds * 1.5, POLL_SECONDS[1])


def parsed(text: str) -> Any:
    """A value of JSON; where it is none the text itself, which no form admits."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def overwritten(key: str, value: object) -> str:
    return (
        f"the store's key {key!r} holds {str(value)[:80]!r}, which no rank wrote: something else "
        f"writes to this job's store; give each job a master port of its own"
    )


def is_form(value: Any, **kinds: type) -> bool:
    """Whether ``value`` is a mapping that has these fields, of these types."""
    return isinstance(value, dict) and all(
        isinstance(value.get(name), kind) for name, kind in kinds.items()
    )


def _text(value: bytes) -> str:
    """What a stranger wrote need not be one."""
    return value.decode(errors="replace")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
