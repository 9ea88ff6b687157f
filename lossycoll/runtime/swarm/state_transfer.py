"""State transfer from donors to a joiner, in an engine's group of two for each donor.

Peers seldom have the same state to the bit, but parts of it. So a state travels in chunks, each
known by its digest: a newcomer chooses one peer's state and takes each chunk from whoever has it,
itself included. A donor sends its manifest. Then the joiner asks for some chunks, and the donor
sends them, until the joiner asks for none. All of it is reliable.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lossycoll.errors import EngineError, LossyError, MismatchError, OperationTimeout
from lossycoll.plan import Delivery, copies, signature
from lossycoll.runtime.control.schema import Malformed, printable
from lossycoll.runtime.engine.binding import DType, EngineCall, EngineGroup
from lossycoll.runtime.engine.failures import Where, place_text

from .paths import Paths, outcome
from .protocol import Transfer

CHUNK: Final = 1 << 20  # bytes of all chunks but the last
DIGEST: Final = 16
MOST_SKELETON: Final = 1 << 22
DONOR, JOINER = 0, 1
BATCH: Final = 8  # chunks that are asked for at a time
NONE: Final = 0xFFFFFFFF
WINDOW: Final = 4  # chunks on their way at a time
REASON: Final = 256  # bytes of a refusal's reason
SILENCE_SECONDS: Final = 60.0
"""Time that one end waits for the other's next step, and for the chunks on their way."""
MOST_MANIFEST: Final = 1 << 25
ENDING_SECONDS: Final = 1.0  # time for telling donors that nothing more is wanted
LATE_SECONDS: Final = 1.0  # time to wait for other donors' manifests, after the first
MOST_DONATIONS: Final = 4  # newcomers that are served at a time
log: Final = logging.getLogger("lossycoll")
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
    the newcomer has already; None: nothing. ``chunks``: their memory."""

    manifest: Manifest
    own: Snapshot | None = None
    data: Bytes = field(init=False)

    def __post_init__(self) -> None:
        self.data = np.empty(self.manifest.length, np.uint8)
        self.chunks = Snapshot(0, b"", self.data).chunks()
        self._changed = threading.Condition()
        self._flying: set[int] = set()
        held: dict[bytes, Bytes] = {}
        if self.own is not None:
            held = {digest_of(chunk): chunk for chunk in self.own.chunks()}
        self._open: list[int] = []
        for number, digest in enumerate(self.manifest.digests):
            chunk = held.get(digest)
            if chunk is not None and len(chunk) == len(self.chunks[number]):
                self.chunks[number][:] = chunk
            else:
                self._open.append(number)

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
                found = [n for n in self._open if digests[n] in held][:most]
                if found:
                    self._open = [n for n in self._open if n not in set(found)]
                    self._flying.update(found)
                    return found
                if not any(digests[n] in held for n in self._flying):
                    return []
                self._changed.wait(1.0)

    def put(self, number: int) -> bool:
        """A chunk has come. Returns whether it is what it should be. If not, others can be
        asked (:meth:`give_back`)."""
        if digest_of(self.chunks[number]) != self.manifest.digests[number]:
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
            self._open[:0] = lost
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Pair:
    """A group of two. ``other``: the address of the other end, for errors. ``schema``: of both
    ends' tensors."""

    engine: EngineGroup
    rank: int
    other: str
    per_packet: int
    schema: str

    def move(self, buffers: Sequence[Bytes], sender: int) -> None:
        """Moves what ``buffers`` hold at one end into those of the other, of the same sizes.
        LossyError: the other end is lost, or silent for SILENCE_SECONDS."""
        tickets: deque[int] = deque()
        try:
            for one in buffers:
                if len(tickets) == WINDOW:
                    self._end(tickets.popleft())
                if one.size:
                    tickets.append(self._submit(one, sender))
            while tickets:
                self._end(tickets.popleft())
        except LossyError:
            # Until its end the engine uses a buffer.
            self.engine.close()
            raise

    def _end(self, ticket: int) -> None:
        outcome(self.engine, ticket, Where(self.rank, 2, addresses=[self.other, self.other]))
        self.engine.release(ticket)

    def _submit(self, buffer: Bytes, sender: int) -> int:
        plan = copies.broadcast(2, self.rank, buffer.size, self.per_packet, root=sender)
        call = EngineCall.of(plan).given(
            dtype=DType.BYTES,
            signature=signature("transfer", self.schema, plan.signature),
            timeout=SILENCE_SECONDS,
            delivery=Delivery(reliable=True),
        )
        return self.engine.submit(call, buffer.ctypes.data, buffer.ctypes.data)


def say(pair: Pair, said: bytes, *, refuses: bool) -> None:
    """Tell the joiner a donor's manifest, or why it refuses. LossyError: the joiner is lost, or
    silent."""
    head = np.array([len(said), refuses], np.uint64)
    pair.move([head.view(np.uint8), np.frombuffer(said, np.uint8).copy()], DONOR)


def donate(pair: Pair, snapshot: Snapshot) -> None:
    """Send the joiner the chunks that it asks for. LossyError: the joiner is lost, or silent.
    MismatchError: it asks for what there isn't."""
    say(pair, snapshot.manifest().packed(), refuses=False)
    chunks = snapshot.chunks()
    while True:
        asked = np.empty(BATCH, np.uint32)
        pair.move([asked.view(np.uint8)], JOINER)
        numbers = [int(number) for number in asked if number != NONE]
        if not numbers:
            return
        if max(numbers) >= len(chunks):
            raise MismatchError(f"chunk {max(numbers)} is asked for, and there are {len(chunks)}")
        pair.move([chunks[number] for number in numbers], DONOR)


@dataclass(frozen=True, slots=True)
class TransferredState:
    """State that a joiner has received, or its own one, if that is as new as all others.
    ``donors``: of how many peers chunks came. ``bytes``: that came, without what this peer had."""

    snapshot: Snapshot
    donors: int
    bytes: int


@dataclass(eq=False)
class _Receiving:
    """State that comes from donors, each served by a thread. ``own``: what the joiner has already;
    None: nothing. ``most``: bytes that a state may have."""

    own: Snapshot | None
    most: int

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = 0  # donors of whom something may come
        self._manifests: list[Manifest] = []
        self._gathering: Gathering | None = None
        self._error: LossyError | None = None
        self._is_over = False
        self._served: set[int] = set()
        self._bytes = 0

    def begin(self, pairs: Sequence[Pair]) -> list[threading.Thread]:
        self._busy = len(pairs)
        threads = [
            threading.Thread(target=self._serve, args=(one,), name="lossycoll-joiner", daemon=True)
            for one in pairs
        ]
        for thread in threads:
            thread.start()
        return threads

    def received(self, timeout: float) -> TransferredState:
        """The state, as of :meth:`StateTransfers.fetch`. Exhausted donors aren't waited for."""
        deadline, own = time.monotonic() + timeout, self.own
        with self._changed:
            self._changed.wait_for(lambda: self._manifests or not self._busy, timeout)
            late = min(LATE_SECONDS, deadline - time.monotonic())
            self._changed.wait_for(lambda: len(self._manifests) >= self._busy, max(0.0, late))
            manifests = list(self._manifests)
        if manifests:
            manifest = chosen(manifests)
            if own is not None and own.samples and (own.samples, own.round) >= manifest.age:
                return TransferredState(own, donors=0, bytes=0)
            gathering = Gathering(manifest, own)
            with self._changed:
                self._gathering = gathering
                self._changed.notify_all()
                left = max(0.0, deadline - time.monotonic())
                self._changed.wait_for(lambda: gathering.complete or not self._busy, left)
                if gathering.complete:  # they say that nothing more is asked for
                    self._changed.wait_for(lambda: not self._busy, ENDING_SECONDS)
                    whole = Snapshot(
                        manifest.round, manifest.skeleton, gathering.data, manifest.samples
                    )
                    return TransferredState(whole, len(self._served), self._bytes)
        if time.monotonic() >= deadline:
            raise OperationTimeout(f"the others' state hasn't come within {timeout:.1f} s")
        raise self._error or EngineError("no donor has all of the state")

    def over(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _serve(self, pair: Pair) -> None:
        error = None
        try:
            self._gather(pair, self._manifest(pair))
        except LossyError as found:
            log.info("a donor's state isn't taken, or not all of it: %s", found)
            error = found
        finally:
            with self._changed:
                self._error = error or self._error
                self._busy -= 1
                self._changed.notify_all()

    def _manifest(self, pair: Pair) -> Manifest:
        head = np.zeros(2, np.uint64)
        pair.move([head.view(np.uint8)], DONOR)
        size, refuses = int(head[0]), bool(head[1])
        most = REASON if refuses else MOST_MANIFEST
        if size > most:
            raise MismatchError(f"a manifest of {size} bytes, wanted at most {most}")
        said = np.empty(size, np.uint8)
        pair.move([said], DONOR)
        if refuses:
            reason = printable(said.tobytes().decode(errors="replace"))
            raise EngineError(f"a donor refuses: {reason}")
        try:
            return Manifest.unpack(said.tobytes(), self.most)
        except Malformed as error:
            raise MismatchError(f"a donor's state can't be taken: {error}") from None

    def _gather(self, pair: Pair, manifest: Manifest) -> None:
        with self._changed:
            self._manifests.append(manifest)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._gathering is not None or self._is_over)
        gathering = self._gathering
        if gathering is None:
            return
        held = {digest: number for number, digest in enumerate(manifest.digests)}
        while True:
            numbers = gathering.take(held, BATCH)
            rooms = [gathering.chunks[number] for number in numbers]
            asked = np.full(BATCH, NONE, np.uint32)
            asked[: len(numbers)] = [held[gathering.manifest.digests[n]] for n in numbers]
            try:
                pair.move([asked.view(np.uint8)], JOINER)
                if not numbers:
                    return
                pair.move(rooms, DONOR)
                for number in numbers:
                    if not gathering.put(number):
                        raise MismatchError(f"chunk {number} of a state isn't what its digest says")
            finally:
                gathering.give_back(numbers)
            with self._changed:
                self._served.add(id(pair))
                self._bytes += sum(room.size for room in rooms)
                self._changed.notify_all()


@dataclass(slots=True)
class Offered:
    """State that a peer's joiners get. ``schema``: of its tensors. ``state``: makes it; None: there
    is none."""

    schema: str = ""
    state: Callable[[], Snapshot] | None = None


@dataclass(eq=False)
class StateTransfers:
    """State transfers of one peer, as donor and as joiner, until ``close``."""

    paths: Paths
    per_packet: int
    offered: Offered

    def __post_init__(self) -> None:
        self._number = self.paths.number
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def fetch(
        self, transfers: Sequence[Transfer], own: Snapshot | None, most: int, timeout: float
    ) -> TransferredState:
        """Take a state from all donors, one at least; with ``own`` itself for a snapshot if none is
        newer. ``own``: what this peer has already; None: nothing. ``most``: bytes that a state may
        have. OperationTimeout: it hasn't come within ``timeout``. LossyError: no donor has all of
        it, or none is there any more."""
        until = time.monotonic() + timeout
        receiving = _Receiving(own, most)
        pairs: list[Pair] = []
        threads: list[threading.Thread] = []
        failed: LossyError | None = None
        # All at once, as each looks for a route from when all were told of it, and not for long.
        incarnation = transfers[-1].members[JOINER].incarnation
        donors = [transfer.members[DONOR] for transfer in transfers]
        unreachable = self.paths.admit_all(donors, incarnation, timeout)
        try:
            for transfer, donor in zip(transfers, donors, strict=True):
                try:
                    if donor in unreachable:
                        raise self.paths.no_route(donor)
                    pairs.append(self._made(transfer, JOINER))
                except LossyError as error:  # it can't be reached: others can
                    failed = error
            if not pairs:
                raise failed or EngineError(f"peer {self._number} has no donor")
            threads = receiving.begin(pairs)
            return receiving.received(max(0.0, until - time.monotonic()))
        finally:
            receiving.over()
            for pair in pairs:
                self.paths.end_transfer(pair.engine)
            for thread in threads:
                thread.join()

    def donate(self, transfer: Transfer) -> None:
        """Serves a newcomer, on a thread of its own. Those that are too many are told so."""
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            if self._closed:
                return
            state = self.offered.state if len(self._threads) < MOST_DONATIONS else None
            thread = threading.Thread(
                target=self._serve, args=(transfer, state), name="lossycoll-donor", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        while any(thread.is_alive() for thread in threads):
            self.paths.abort()
            for thread in threads:
                thread.join(0.05)

    def _serve(self, transfer: Transfer, state: Callable[[], Snapshot] | None) -> None:
        joiner = transfer.members[JOINER].number
        try:
            pair = self._pair(transfer, DONOR)
            try:
                snapshot = None
                reason = f"peer {self._number} has no state, or is the donor of {MOST_DONATIONS}"
                try:
                    snapshot = state() if state is not None else None
                except Exception as error:  # of a training, whatever it is: both ends say so
                    log.warning("peer %d can't send its state: %s", self._number, error)
                    reason = f"peer {self._number} can't send its state: {error}"
                if snapshot is None:
                    say(pair, reason.encode(errors="replace")[:REASON], refuses=True)
                else:
                    donate(pair, snapshot)
            finally:
                self.paths.end_transfer(pair.engine)
        except LossyError as error:
            log.info("peer %d ends its state transfer to peer %d: %s", self._number, joiner, error)

    def _pair(self, transfer: Transfer, rank: int) -> Pair:
        own, other = transfer.members[rank], transfer.members[1 - rank]
        if self.paths.admit_all([other], own.incarnation):
            raise self.paths.no_route(other)
        return self._made(transfer, rank)

    def _made(self, transfer: Transfer, rank: int) -> Pair:
        """The pair of a transfer whose other end is known to the engine."""
        other = transfer.members[1 - rank]
        engine = self.paths.transfer(transfer.number, transfer.members)
        place = place_text(other.host, other.port)
        return Pair(engine, rank, place, self.per_packet, self.offered.schema)
