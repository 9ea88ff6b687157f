"""State of a peer in chunks, each known by its digest, as a joiner takes it from donors.

Peers seldom have the same state to the bit, but parts of it. A newcomer chooses one peer's state
and takes each chunk from whoever has it, itself included.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lossycoll.runtime.control.schema import Malformed

CHUNK: Final = 1 << 20  # bytes of all chunks but the last
DIGEST: Final = 16
MOST_SKELETON: Final = 1 << 22
_HEAD: Final = struct.Struct("!QQQQ")

Bytes: TypeAlias = NDArray[np.uint8]


def digest_of(chunk: Bytes) -> bytes:
    return hashlib.sha256(chunk.data).digest()[:DIGEST]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest of a state of ``length`` bytes: the digests of its chunks. ``round``: the latest
    that it has had. ``skeleton``: how whoever made it reads its bytes. ``samples``: that the swarm
    had had when it was its newest."""

    round: int
    skeleton: bytes
    length: int
    digests: tuple[bytes, ...]
    samples: int = 0

    @property
    def age(self) -> tuple[int, int]:
        """Age of a state; the newer one of two has the greater."""
        return self.samples, self.round

    def packed(self) -> bytes:
        head = _HEAD.pack(self.round, self.length, len(self.skeleton), self.samples)
        return head + self.skeleton + b"".join(self.digests)

    @classmethod
    def unpack(cls, packed: bytes, most: int) -> Manifest:
        """Reads what a peer says. ``most``: how long a state may be. Malformed: it is no manifest,
        or one of a longer state."""
        if len(packed) < _HEAD.size:
            raise Malformed(f"{len(packed)} bytes are no manifest")
        number, length, skeleton, samples = _HEAD.unpack_from(packed)
        if number >> 53 or samples >> 53 or length > most or skeleton > MOST_SKELETON:
            raise Malformed(f"a state of {length} bytes, wanted at most {most}")
        begin, count = _HEAD.size + skeleton, -(-length // CHUNK)
        if len(packed) != begin + count * DIGEST:
            raise Malformed(f"a manifest of {len(packed)} bytes, wanted {begin + count * DIGEST}")
        digests = [packed[at : at + DIGEST] for at in range(begin, len(packed), DIGEST)]
        return cls(number, packed[_HEAD.size : begin], length, tuple(digests), samples)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A peer's state between two of its steps, as of :class:`Manifest`. ``data``: shape (n,),
    contiguous."""

    round: int
    skeleton: bytes
    data: Bytes
    samples: int = 0

    def chunks(self) -> list[Bytes]:
        return [self.data[at : at + CHUNK] for at in range(0, len(self.data), CHUNK)]

    def manifest(self) -> Manifest:
        digests = tuple(digest_of(chunk) for chunk in self.chunks())
        return Manifest(self.round, self.skeleton, len(self.data), digests, self.samples)


def chosen(manifests: Sequence[Manifest]) -> Manifest:
    """The state to take: of the newest ones, the one that the others have most of."""
    latest = max(one.age for one in manifests)
    held = [set(one.digests) for one in manifests]

    def shared(one: Manifest) -> int:
        return sum(digest in other for digest in one.digests for other in held)

    return max((one for one in manifests if one.age == latest), key=shared)


@dataclass
class Gathering:
    """Chunks of one state, as they come from several peers, each served by a thread. ``own``: what
    the newcomer has already; None: nothing."""

    manifest: Manifest
    own: Snapshot | None = None
    data: Bytes = field(init=False)
    kept: int = field(init=False, default=0)  # chunks that the newcomer had

    def __post_init__(self) -> None:
        self.data = np.empty(self.manifest.length, np.uint8)
        self._chunks = Snapshot(0, b"", self.data).chunks()
        self._changed = threading.Condition()
        self._flying: set[int] = set()
        held: dict[bytes, Bytes] = {}
        if self.own is not None:
            held = {digest_of(chunk): chunk for chunk in self.own.chunks()}
        self._open: list[int] = []
        for number, digest in enumerate(self.manifest.digests):
            chunk = held.get(digest)
            if chunk is not None and len(chunk) == len(self._chunks[number]):
                self._chunks[number][:] = chunk
                self.kept += 1
            else:
                self._open.append(number)
        self._open.reverse()

    @property
    def complete(self) -> bool:
        with self._changed:
            return not self._open and not self._flying

    def take(self, held: Mapping[bytes, int], most: int) -> list[int]:
        """Chunks to ask a peer for. Waits as long as others may give back what this one has.
        ``held``: digests of what the peer has. Returns their numbers; none: there is nothing left
        for this peer."""
        digests = self.manifest.digests
        with self._changed:
            while True:
                found = [n for n in self._open if digests[n] in held][-most:]
                if found:
                    self._open = [n for n in self._open if n not in set(found)]
                    self._flying.update(found)
                    return found[::-1]
                if not any(digests[n] in held for n in self._flying):
                    return []
                self._changed.wait(1.0)

    def room(self, number: int) -> Bytes:
        """Return the memory of a chunk, for whoever has taken its number."""
        return self._chunks[number]

    def put(self, number: int) -> bool:
        """A chunk is in its room. Returns whether it is what it should be. If not, others can be
        asked (:meth:`give_back`)."""
        if digest_of(self._chunks[number]) != self.manifest.digests[number]:
            return False
        with self._changed:
            self._flying.discard(number)
            self._changed.notify_all()
        return True

    def give_back(self, numbers: Sequence[int]) -> None:
        """These won't come from whoever took them."""
        with self._changed:
            lost = [n for n in numbers if n in self._flying]
            self._flying.difference_update(lost)
            self._open.extend(reversed(lost))
            self._changed.notify_all()
