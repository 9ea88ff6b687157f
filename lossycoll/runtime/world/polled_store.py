"""A torch store that is asked again and again: its failures are typed, its values may be sealed,
and each question and answer fits a small packet.

Routers between a rank and the store may carry less than the interfaces, and not say so. Large TCP
segments would vanish for ever, and the job would hang as it starts. So a long value stands in the
store in pieces, compressed, and many values are asked for a few at a time.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from lossycoll.errors import RendezvousError
from lossycoll.runtime.control.descriptors import bound_answers
from lossycoll.runtime.core.exits import start_thread
from lossycoll.runtime.keys.aead import SealedValues
from lossycoll.runtime.keys.secret import Secret

POLL_SECONDS: Final = (0.001, 0.02)
"""First and longest pause between two looks into the store."""
PIECE_BYTES: Final = 1000
"""Largest value, question or answer. With what torch adds it fits a TCP segment of 1,200 bytes,
which every path of IPv6 carries."""
KEY_BYTES: Final = 64
"""Bytes that a key takes in a question beside its name: torch's prefixes."""
ANSWER_SECONDS: Final = 30.0
"""Longest time for an answer. The store waits for nobody before it answers."""
_MOST_PIECES: Final = 1 << 12
_LONGEST: Final = 1 << 24
"""Characters of a value that is in pieces."""
_IN_PIECES: Final = re.compile(r"(\d{1,4}) pieces ([0-9a-f]{16})")

_Value = TypeVar("_Value")


class Store(Protocol):
    """The part of torch.distributed.Store that is used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def add(self, key: str, value: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class PolledStore:
    """``store``, whose own failures are RendezvousErrors. ``secret``: all values are sealed with
    it; None: they are in clear. A value that doesn't open counts as one that isn't there."""

    def __init__(self, store: Store, who: str, secret: Secret | None = None) -> None:
        self._store = store
        self._who = who
        self._values = None if secret is None else SealedValues(secret)
        bound_answers(server_of(store)[1], ANSWER_SECONDS)

    def set(self, key: str, value: str) -> str:
        """Returns a digest of what stands in the store then: :meth:`anothers`."""
        text = value if self._values is None else self._values.seal(key, value)
        self.mark(key, text)
        return _digest(text)

    def set_first(self, key: str, value: str) -> None:
        text = value if self._values is None else self._values.seal(key, value)
        self._try(lambda: self._store.compare_set(key, "", text))

    def get(self, key: str) -> str | None:
        found = self.get_all([key])
        return None if found is None else found[0]

    def get_all(self, keys: list[str], each: int = PIECE_BYTES) -> list[str] | None:
        """The values; None while one is missing. ``each``: about as many bytes as one takes."""
        whole = self._found(keys, each if self._values is None else each * 4 // 3 + 64)
        if whole is None:
            return None
        opened = [self._opened(key, value) for key, value in zip(keys, whole, strict=True)]
        values = [value for value in opened if value is not None]
        return values if len(values) == len(keys) else None

    def counts(self, keys: list[str]) -> list[int]:
        """Values of counters that :meth:`add` has made; other values count 0."""
        found = self._many(keys, 8)
        return [int(value) if value.isdigit() else 0 for value in found]

    def add(self, key: str, value: int) -> int:
        """Adds to a counter, which anybody can read; returns what it is then."""
        return self._try(lambda: self._store.add(key, value))

    def anothers(self, key: str, is_ours: Callable[[str], object]) -> str | None:
        """A digest of what stands under ``key``, if it doesn't open or ``is_ours`` denies it; None:
        it is ours, or nothing is there."""
        found = self._found([key], PIECE_BYTES)
        text = self._opened(key, found[0]) if found else None
        return None if not found or (text is not None and is_ours(text)) else _digest(found[0])

    def mark(self, key: str, text: str = "1") -> None:
        """Writes what those can read whose secret is another one."""
        short = text if len(text) <= PIECE_BYTES else self._in_pieces(key, text)
        self._try(lambda: self._store.set(key, short))

    def is_marked(self, key: str) -> bool:
        return self._try(lambda: self._store.check([key]))

    def _found(self, keys: list[str], each: int) -> list[str] | None:
        """What stands in the store, whole; None while one is missing."""
        if not self._are_there(keys):
            return None
        pairs = zip(keys, self._many(keys, each), strict=True)
        return [self._whole(key, value.decode(errors="replace")) for key, value in pairs]

    def _in_pieces(self, key: str, text: str) -> str:
        """Writes the pieces of a long value; returns what stands for it."""
        packed = base64.b85encode(zlib.compress(text.encode())).decode()
        digest = _digest(text)
        pieces = [packed[at : at + PIECE_BYTES] for at in range(0, len(packed), PIECE_BYTES)]
        for i, piece in enumerate(pieces):
            self._try(partial(self._store.set, f"{key}/{digest}/{i}", piece))
        return f"{len(pieces)} pieces {digest}"

    def _whole(self, key: str, found: str) -> str:
        """The value of which ``found`` stands in the store; ``found`` where it can't be read."""
        form = _IN_PIECES.fullmatch(found)
        if form is None or not 0 < int(form[1]) <= _MOST_PIECES:
            return found
        keys = [f"{key}/{form[2]}/{i}" for i in range(int(form[1]))]
        if not self._are_there(keys):
            return found
        unpack = zlib.decompressobj()
        try:
            packed = base64.b85decode(b"".join(self._many(keys, PIECE_BYTES)))
            text = unpack.decompress(packed, _LONGEST).decode()
        except (ValueError, zlib.error):
            return found
        return text if _digest(text) == form[2] else found

    def _are_there(self, keys: list[str]) -> bool:
        some_at_once = _some_at_once(keys, 0)
        return all(self._try(partial(self._store.check, some)) for some in some_at_once)

    def _many(self, keys: list[str], each: int) -> list[bytes]:
        """Values that are there, each of about ``each`` bytes."""
        found: list[bytes] = []
        for some in _some_at_once(keys, each):
            found += self._try(partial(self._store.multi_get, some))
        return found

    def _opened(self, key: str, found: str) -> str | None:
        return found if self._values is None else self._values.open(key, found)

    def _try(self, use: Callable[[], _Value]) -> _Value:
        begin, port = time.monotonic(), server_of(self._store)[1]
        try:
            return use()
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if time.monotonic() - begin >= ANSWER_SECONDS:
                raise RendezvousError(
                    f"{self._who}: the store at port {port} gave no answer for "
                    f"{ANSWER_SECONDS:g} s ({reason}); its process is stopped, or the path to it "
                    f"drops packets, perhaps large ones only: check the firewall, and set sysctl "
                    f"net.ipv4.tcp_mtu_probing=1 on all hosts or the interfaces' MTU to the path's"
                ) from error
            raise RendezvousError(
                f"{self._who}: the store failed in the rendezvous ({reason}); it ends with the "
                f"process that serves it, rank 0 or the launcher: their error came first"
            ) from error


class StoreConnection:
    """A connection of its own to a TCP store, which can be given up: a :class:`Store`. A
    RuntimeError comes within a minute or so, whatever becomes of the store; the next question goes
    over another connection. ``seconds``: longest time for an answer.

    torch's client takes the next bytes that come for the answer to its latest question. If an
    answer came too late, all later ones would be taken for those of other questions. And where
    ``get`` and ``multi_get`` wait for a key first, they wait for the store's own timeout, 5 minutes
    by default.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        self._of = store
        self._seconds = seconds
        self.port = server_of(store)[1]
        self._lock = threading.Lock()
        self._clone: Any = None
        self._connects: Future[Any] | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in vars(Store):
            raise AttributeError(name)
        return lambda *values: self._ask(name, *values)

    def _ask(self, question: str, *values: Any) -> Any:
        with self._lock:
            clone = self._connected()
            try:
                return getattr(clone, question)(*values)
            except RuntimeError:
                self._clone = None
                raise

    def _connected(self) -> Any:
        if self._clone is None:
            if self._connects is None:
                # On a thread of its own: a frozen store accepts, and says nothing.
                self._connects = Future()
                start_thread(partial(self._connect, self._connects), "lossycoll-store")
            connects = self._connects
            if not wait([connects], self._seconds).done:
                raise RuntimeError("no connection")  # that thread waits on
            self._connects = None
            if (failure := connects.exception()) is not None:
                raise RuntimeError(str(failure)) from failure
            self._clone = connects.result()
        return self._clone

    def _connect(self, made: Future[Any]) -> None:
        try:
            host, port = server_of(self._of)
            # torch's client would try again and again where nobody listens.
            socket.create_connection((host, port or 0), self._seconds).close()
            clone = self._of.clone()
            clone.set_timeout(timedelta(seconds=self._seconds))
            bound_answers(port, self._seconds)
            made.set_result(clone)
        except Exception as error:  # whatever it is, whoever waits hears of it
            made.set_exception(error)


def own_connection(store: Any) -> Any:
    """A connection of its own to the store's server; the store itself where it has none."""
    return store if server_of(store)[1] is None else StoreConnection(store, ANSWER_SECONDS)


class Pause:
    """Sleeps a little longer each time: quick when all are there, light when one is late."""

    _seconds = POLL_SECONDS[0]

    @property
    def is_long(self) -> bool:
        """True if somebody is late."""
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
    """True if ``value`` is a mapping that has these fields, of these types."""
    return isinstance(value, dict) and all(
        isinstance(value.get(name), kind) for name, kind in kinds.items()
    )


def server_of(store: Any) -> tuple[str, int | None]:
    """Host and port of the server of a TCP store; None: the store is of another kind."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", ""), getattr(store, "port", None)
    return str(host), port if isinstance(port, int) else None


def _some_at_once(keys: Sequence[str], each: int) -> Iterator[list[str]]:
    """The keys, as many at a time as question and answer have room for."""
    if not keys:
        return
    count = max(1, PIECE_BYTES // max(each + 8, KEY_BYTES + max(map(len, keys))))
    for at in range(0, len(keys), count):
        yield list(keys[at : at + count])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
