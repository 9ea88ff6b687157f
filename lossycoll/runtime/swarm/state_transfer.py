"""State transfer from a donor to a joiner, in an engine's group of two.

The donor sends its manifest. Then the joiner asks for some chunks, and the donor sends them, until
the joiner asks for none. All of it is reliable and goes by the engine's packets, at the rate that
the path allows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from lossycoll.errors import EngineError, LossyError, MismatchError, OperationTimeout
from lossycoll.plan import Delivery, copies, signature
from lossycoll.runtime.control.schema import Malformed, printable
from lossycoll.runtime.engine.binding import DType, EngineCall, EngineGroup
from lossycoll.runtime.engine.failures import Where

from .paths import Paths, outcome
from .protocol import Transfer
from .state import Bytes, Gathering, Manifest, Snapshot, chosen

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


class Pair:
    """A group of two. ``other``: the address of the other end, for errors."""

    def __init__(
        self, engine: EngineGroup, rank: int, other: str, per_packet: int, schema: str
    ) -> None:
        self.engine: Final = engine
        self._where = Where(rank, 2, addresses=[other, other])
        self._rank = rank
        self._per_packet = per_packet
        self._schema = schema

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
        outcome(self.engine, ticket, self._where)
        self.engine.release(ticket)

    def _submit(self, buffer: Bytes, sender: int) -> int:
        plan = copies.broadcast(2, self._rank, buffer.size, self._per_packet, root=sender)
        call = EngineCall.of(plan).given(
            dtype=DType.BYTES,
            signature=signature("transfer", self._schema, plan.signature),
            timeout=SILENCE_SECONDS,
            delivery=Delivery(reliable=True),
        )
        return self.engine.submit(call, buffer.ctypes.data, buffer.ctypes.data)


def refuse(pair: Pair, reason: str) -> None:
    """Tells the joiner why there is nothing. LossyError: the joiner is lost, or silent."""
    pair.move([np.zeros(1, np.uint64).view(np.uint8)], DONOR)
    said = np.zeros(REASON, np.uint8)
    text = reason.encode(errors="replace")[:REASON]
    said[: len(text)] = np.frombuffer(text, np.uint8)
    pair.move([said], DONOR)


def donate(pair: Pair, snapshot: Snapshot) -> None:
    """Send the joiner the chunks that it asks for. LossyError: the joiner is lost, or silent.
    MismatchError: it asks for what there isn't."""
    packed = np.frombuffer(snapshot.manifest().packed(), np.uint8).copy()
    pair.move([np.array([len(packed)], np.uint64).view(np.uint8)], DONOR)
    pair.move([packed], DONOR)
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


def receive_state(
    pairs: Sequence[Pair],
    own: Snapshot | None,
    most: int,
    timeout: float,
    end: Callable[[Pair], None],
) -> TransferredState:
    """A state, from all donors at once, as of :meth:`StateTransfers.fetch`. ``pairs``: one for each
    donor, one at least. ``end``: ends a pair, so that whoever waits in it hears of that."""
    begin = time.monotonic()
    receiving = _Receiving(own, most)
    threads = [
        threading.Thread(target=receiving.serve, args=(pair,), name="lossycoll-joiner", daemon=True)
        for pair in pairs
    ]
    for thread in threads:
        thread.start()
    try:
        receiving.choose(threads, begin + timeout)
        receiving.wait(threads, begin + timeout)
    finally:
        receiving.over()
        for pair in pairs:
            end(pair)
        for thread in threads:
            thread.join()
    gathering = receiving.gathering
    if receiving.is_newest and own is not None:
        return TransferredState(own, donors=0, bytes=0)
    if gathering is None or not gathering.complete:
        if time.monotonic() - begin >= timeout:
            raise OperationTimeout(f"the others' state hasn't come within {timeout:.1f} s")
        raise receiving.error or EngineError("no donor has all of the state")
    manifest = gathering.manifest
    return TransferredState(
        snapshot=Snapshot(manifest.round, manifest.skeleton, gathering.data, manifest.samples),
        donors=len(receiving.served),
        bytes=receiving.bytes,
    )


class _Receiving:
    """The threads' part of :func:`receive_state`: one for each donor."""

    def __init__(self, own: Snapshot | None, most: int) -> None:
        self._own = own
        self._most = most
        self._changed = threading.Condition()
        self._manifests: list[Manifest] = []
        self.gathering: Gathering | None = None
        self.error: LossyError | None = None
        self._is_over = False
        self.is_newest = False  # the joiner's own state is as new as all others
        self.served: set[int] = set()
        self.bytes = 0

    def choose(self, threads: Sequence[threading.Thread], deadline: float) -> None:
        """Waits for manifests, and says whose state it is to be."""
        first: float | None = None
        with self._changed:
            while any(thread.is_alive() for thread in threads):
                now = time.monotonic()
                if self._manifests and first is None:
                    first = now
                waited = first is not None and now - first > LATE_SECONDS
                if len(self._manifests) == len(threads) or waited or now > deadline:
                    break
                self._changed.wait(0.05)
            manifests = list(self._manifests)
        own = self._own
        if manifests and own is not None and own.samples:
            self.is_newest = (own.samples, own.round) >= chosen(manifests).age
        if manifests and not self.is_newest:
            gathering = Gathering(chosen(manifests), own)
            with self._changed:
                self.gathering = gathering
                self._changed.notify_all()

    def wait(self, threads: Sequence[threading.Thread], deadline: float) -> None:
        """Wait until the state is complete, or can't be. Exhausted donors aren't waited for."""
        if self.is_newest:
            return
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            if self.gathering is not None and self.gathering.complete:
                for thread in threads:  # they say that nothing more is asked for
                    thread.join(ENDING_SECONDS / len(threads))
                return
            with self._changed:
                self._changed.wait(0.05)

    def over(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def serve(self, pair: Pair) -> None:
        """Takes what one donor has."""
        try:
            self._gather(pair, self._manifest(pair))
        except LossyError as error:
            log.info("a donor's state isn't taken, or not all of it: %s", error)
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _manifest(self, pair: Pair) -> Manifest:
        size = np.zeros(1, np.uint64)
        pair.move([size.view(np.uint8)], DONOR)
        if not size[0]:
            reason = np.zeros(REASON, np.uint8)
            pair.move([reason], DONOR)
            said = printable(reason.tobytes().rstrip(b"\0").decode(errors="replace"))
            raise EngineError(f"a donor refuses: {said}")
        if size[0] > MOST_MANIFEST:
            raise MismatchError(f"a manifest of {size[0]} bytes, wanted at most {MOST_MANIFEST}")
        packed = np.empty(int(size[0]), np.uint8)
        pair.move([packed], DONOR)
        try:
            return Manifest.unpack(packed.tobytes(), self._most)
        except Malformed as error:
            raise MismatchError(f"a donor's state can't be taken: {error}") from None

    def _gather(self, pair: Pair, manifest: Manifest) -> None:
        with self._changed:
            self._manifests.append(manifest)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.gathering is not None or self._is_over)
        gathering = self.gathering
        if gathering is None:
            return
        held = {digest: number for number, digest in enumerate(manifest.digests)}
        while True:
            numbers = gathering.take(held, BATCH)
            try:
                self._ask(pair, [held[gathering.manifest.digests[n]] for n in numbers])
                if not numbers:
                    return
                self._receive(pair, gathering, numbers)
            finally:
                gathering.give_back(numbers)

    @staticmethod
    def _ask(pair: Pair, numbers: Sequence[int]) -> None:
        asked = np.full(BATCH, NONE, np.uint32)
        asked[: len(numbers)] = numbers
        pair.move([asked.view(np.uint8)], JOINER)

    def _receive(self, pair: Pair, gathering: Gathering, numbers: Sequence[int]) -> None:
        pair.move([gathering.room(number) for number in numbers], DONOR)
        for number in numbers:
            if not gathering.put(number):
                raise MismatchError(f"chunk {number} of a state isn't what its digest says")
        with self._changed:
            self.served.add(id(pair))
            self.bytes += sum(gathering.room(number).size for number in numbers)


@dataclass(slots=True)
class Offered:
    """State that a peer's joiners get. ``schema``: of its tensors. ``state``: makes it; None: there
    is none."""

    schema: str = ""
    state: Callable[[], Snapshot] | None = None


class StateTransfers:
    """State transfers of one peer, as donor and as joiner, until ``close``."""

    def __init__(self, paths: Paths, per_packet: int, offered: Offered) -> None:
        self._number = paths.number
        self._paths = paths
        self._per_packet = per_packet
        self._offered = offered
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
        pairs: list[Pair] = []
        failed: LossyError | None = None

        def end(pair: Pair) -> None:
            self._paths.end_transfer(pair.engine)

        # All at once, as each looks for a route from when all were told of it, and not for long.
        incarnation = transfers[-1].members[JOINER].incarnation
        donors = [transfer.members[DONOR] for transfer in transfers]
        unreachable = self._paths.admit_all(donors, incarnation, timeout)
        try:
            for transfer, donor in zip(transfers, donors, strict=True):
                try:
                    if donor in unreachable:
                        raise self._paths.no_route(donor)
                    pairs.append(self._made(transfer, JOINER))
                except LossyError as error:  # it can't be reached: others can
                    failed = error
            if not pairs:
                raise failed or EngineError(f"peer {self._number} has no donor")
            return receive_state(pairs, own, most, max(0.0, until - time.monotonic()), end)
        finally:
            for pair in pairs:
                end(pair)

    def donate(self, transfer: Transfer) -> None:
        """Serves a newcomer, on a thread of its own. Those that are too many are told so."""
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            if self._closed:
                return
            state = self._offered.state if len(self._threads) < MOST_DONATIONS else None
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
            self._paths.abort()
            for thread in threads:
                thread.join(0.05)

    def _serve(self, transfer: Transfer, state: Callable[[], Snapshot] | None) -> None:
        joiner = transfer.members[JOINER].number
        try:
            pair = self._pair(transfer, DONOR)
            try:
                self._donate_over(pair, state)
            finally:
                self._paths.end_transfer(pair.engine)
        except LossyError as error:
            log.info("peer %d ends its state transfer to peer %d: %s", self._number, joiner, error)

    def _donate_over(self, pair: Pair, state: Callable[[], Snapshot] | None) -> None:
        if state is None:
            refuse(pair, f"peer {self._number} has no state, or is the donor of {MOST_DONATIONS}")
            return
        try:
            snapshot = state()
        except Exception as error:  # of a training, whatever it is: both ends say so
            log.warning("peer %d can't send its state: %s", self._number, error)
            refuse(pair, f"peer {self._number} can't send its state: {error}")
        else:
            donate(pair, snapshot)

    def _pair(self, transfer: Transfer, rank: int) -> Pair:
        own, other = transfer.members[rank], transfer.members[1 - rank]
        self._paths.admit(other, own.incarnation)
        return self._made(transfer, rank)

    def _made(self, transfer: Transfer, rank: int) -> Pair:
        """The pair of a transfer whose other end is known to the engine."""
        other = transfer.members[1 - rank]
        engine = self._paths.transfer(transfer.number, transfer.members)
        place = f"{other.host}:{other.port}"
        return Pair(engine, rank, place, self._per_packet, self._offered.schema)
