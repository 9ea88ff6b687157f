"""A peer: an engine whose processes come and go, and rounds of averaging in small groups."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.errors import ClosedError, EngineError, LossyError
from lossycoll.options.fields import Options
from lossycoll.plan import Plan, signature, transpose
from lossycoll.runtime.engine.binding import DType, Encoded, EngineCall, EngineGroup
from lossycoll.runtime.engine.failures import Code, Failure, Where, error_of
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.net.interfaces import choose
from lossycoll.runtime.net.payload import payload_bytes

from .client import DirectoryClient
from .protocol import PLACES, Group, Here, Member, Serves

MTU: Final = 1500
"""Of all swarms: peers may be anywhere."""
LINGER_SECONDS: Final = 5.0
"""How long packets of a round that is over here are there for the others."""
MOST_OVER: Final = 8
"""Rounds of which such packets are there."""
LEAST_SECONDS: Final = 1.0
"""For the values of a group, however long it took to form."""
FLUSH_SECONDS: Final = 1.0
"""The same of the last round, before this peer leaves."""
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Over:
    """A group whose round is over here. Others may still ask for packets, out of its buffer."""

    engine: EngineGroup
    buffer: Floats
    numbers: frozenset[int]
    ended: float

    @property
    def lingers(self) -> bool:
        """Whether others may still ask."""
        try:
            return self.engine.lingering()[0] > 0
        except ClosedError:
            return False


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What a round did.

    Attributes:
        round: Its number.
        members: Numbers of the peers that began it together, this one's among them.
        missing: Those of them that were lost meanwhile.
        contributions: Of how many peers a value is the mean, on average.
        kept: The share of values that stayed as they were, since no mean of them came, or one that
            can't be.
        waited: Seconds until the group had formed.
        seconds: And from then on.
        failure: Why nothing was averaged; "": something was.
    """

    round: int
    members: tuple[int, ...]
    missing: tuple[int, ...]
    contributions: float
    kept: float
    waited: float
    seconds: float
    failure: str = ""


class SwarmMember:
    """A peer of a swarm, from when it has joined until ``close``.

    Args:
        directories: (host, port) of each that may be asked.
        name: This peer's; no two that live have the same.
        secret: The swarm's; None: all is in clear.
        options: Those of the engine.
        timeout: Seconds to join in.
        own_directory: The directory listens on all of this machine's addresses, for others too.

    Raises:
        RendezvousError: No directory answers, or it refuses this peer.
        EngineError: The socket can't be opened.
    """

    def __init__(
        self,
        directories: Sequence[tuple[str, int]],
        *,
        name: str,
        secret: Secret | None = None,
        options: Options | None = None,
        timeout: float = 30.0,
        own_directory: bool = False,
    ) -> None:
        self._options = options or Options(link="udp")
        self._secret = secret
        self._lock = threading.Lock()
        self._rounds = threading.Lock()
        """One round at a time."""
        self._group: tuple[EngineGroup, list[str]] | None = None
        """Of the round that is on, and the comings of its members."""
        self._over: list[_Over] = []
        self._gone: deque[str] = deque(maxlen=4 * PLACES)
        """Comings that are over, of which this peer was told, the latest."""
        self._known: dict[int, tuple[str, int, str, str]] = {}
        """Of the path to each peer: its address, its coming and this peer's own."""
        self._schema = ""
        self._client = DirectoryClient(directories, name, secret, self._lost)
        self._host: Host | None = None
        try:
            joined = self._client.connect(timeout)
            self.number = joined.number
            self.session = joined.session
            # The directory of this very peer says nothing of the way to others.
            towards = None if own_directory else directories[0][0]
            self.address = choose(self._options.interface, towards).address
            self._open(self.address)
        except BaseException:
            self.close()
            raise

    def _open(self, address: str) -> None:
        payload = payload_bytes(MTU, 6 if ":" in address else 4)
        self._per_packet = payload // 4
        host = Host(self.number, PLACES, address, payload_bytes=payload, options=self._options)
        self._host = host
        if self._secret is not None:
            host.seal(b"", self._secret.filter(self.session))
        place = (address, host.link().port)
        host.start(
            int(self.session, 16),
            [place if number == self.number else None for number in range(PLACES)],
        )
        self._client.say(Here(*place))

    def close(self) -> None:
        """Leaves the swarm; a round that is on ends. Idempotent."""
        self._client.close()
        with self._lock:
            engine = self._group[0] if self._group else None
        if engine is not None:
            engine.close()
        with self._rounds:  # until whoever averages is out
            end = time.monotonic() + FLUSH_SECONDS
            while self._over and time.monotonic() < end:  # others may need the last round's packets
                self._close_over()
                time.sleep(0.002)
            for one in self._over:
                one.engine.close()
            self._over = []
            host, self._host = self._host, None
        if host is not None:
            host.close()

    @property
    def directories(self) -> tuple[tuple[str, int], ...]:
        """Whom this peer turns to in turn."""
        return self._client.directories

    def names(self, timeout: float = 10.0) -> tuple[str, ...]:
        """Of all peers, asked now.

        Raises:
            OperationTimeout: The directory doesn't answer within ``timeout`` seconds.
        """
        return self._client.names(timeout)

    def serves(self, host: str, port: int) -> None:
        """This peer has a directory, for the time after the present one."""
        self._client.say(Serves(host, port))

    def averages(self, schema: str, grid: str = "", timeout: float = 10.0) -> None:
        """Says what this peer averages, before its first round.

        Args:
            schema: 16 to 64 hex digits, equal on all peers that average the same.
            grid: As in ``32x32``; "": it follows the number of peers.
            timeout: Seconds.

        Raises:
            RendezvousError: Others average something else, or the grid is too small.
            OperationTimeout: The directory doesn't answer within ``timeout`` seconds.
        """
        self._client.averages(schema, grid, timeout)
        self._schema = schema

    # ---- a round ----

    def average(self, values: Floats, weight: float = 1.0, timeout: float = 60.0) -> RoundReport:
        """Replaces ``values`` by their mean over a group of peers, in place.

        A value of which nothing comes stays as it was. So do all of them if the group fails; only
        what keeps this peer from taking part at all is an error.

        Args:
            values: Shape (n,), n the same on all peers.
            weight: What this peer's values count, 0 to 1e6.
            timeout: Seconds for the whole of it.

        Raises:
            OperationTimeout: No group forms within ``timeout``.
            RendezvousError: The directory refuses this peer.
        """
        with self._rounds:
            return self._average(values, weight, timeout)

    def _average(self, values: Floats, weight: float, timeout: float) -> RoundReport:
        begin = time.monotonic()
        self._close_over()
        group = self._client.next_group(weight, timeout)
        formed = time.monotonic()
        left = max(LEAST_SECONDS, begin + timeout - formed)
        numbers = tuple(member.number for member in group.members)
        contributions, kept, failure = 1.0, 1.0, ""
        if len(numbers) > 1 and len(values):
            try:
                contributions, kept = self._exchange(group, values, weight, left)
            except LossyError as error:
                failure = str(error)
        with self._lock:
            missing = tuple(one.number for one in group.members if one.coming in self._gone)
        return RoundReport(
            round=group.round,
            members=numbers,
            missing=missing,
            contributions=contributions,
            kept=kept,
            waited=formed - begin,
            seconds=time.monotonic() - formed,
            failure=failure,
        )

    def _exchange(
        self, group: Group, values: Floats, weight: float, timeout: float
    ) -> tuple[float, float]:
        """Returns contributions per value, and the share of values that stayed."""
        members, world = group.members, len(group.members)
        numbers = [member.number for member in members]
        if self.number not in numbers:
            raise EngineError(f"peer {self.number}: not in the group that it was told of")
        rank = numbers.index(self.number)
        self._forget_gone()
        rows = Rows(len(values), self._per_packet, world)
        buffer = rows.filled(values, weight)
        plan = transpose.all_reduce(world, rank, buffer.size, self._per_packet)
        engine = self._engine_of(group.number, members, rank)
        try:
            ticket = engine.submit(Encoded.of(plan), self._call(plan, buffer, timeout))
            code: int = Code.PENDING
            while code == Code.PENDING:
                code = engine.wait(ticket, 1.0)
            report, failure = engine.result(ticket)
            if code != Code.OK:
                places = [f"{member.host}:{member.port}" for member in members]
                raise error_of(
                    failure if failure.code else Failure(code), Where(rank, world, addresses=places)
                )
        finally:
            with self._lock:
                self._group = None
            self._over.append(_Over(engine, buffer, frozenset(numbers), time.monotonic()))
        kept = rows.take(buffer, values) + report.own_filled / len(buffer)
        return report.contributions_mean or 1.0, min(1.0, kept)

    def _call(self, plan: Plan, buffer: Floats, timeout: float) -> EngineCall:
        code, most_parity, missing = self._options.parity
        return EngineCall(
            input=buffer.ctypes.data,
            output=buffer.ctypes.data,
            dtype=DType.F32,
            scale=1.0,
            signature=signature("swarm", self._schema, plan.signature),
            timeout=timeout,
            reliable=False,
            repair=0 if self._options.chooses_rounds else self._options.repair,
            notify=False,
            code=code,
            most_parity=most_parity,
            choose_rounds=self._options.chooses_rounds,
            max_missing=missing,
            lingers=True,
        )

    def _engine_of(self, number: int, members: Sequence[Member], rank: int) -> EngineGroup:
        assert self._host is not None
        unreachable = []
        for other, member in enumerate(members):
            if member.number == self.number:
                continue
            try:
                self._admit(member, members[rank].coming)
            except EngineError:  # an address of another family, say: the others go on
                unreachable.append(other)
        numbers = tuple(member.number for member in members)
        engine = EngineGroup(
            self._host,
            rank,
            len(members),
            number=number,
            fault_group=number,
            options=self._options,
            members=numbers,
        )
        comings = [member.coming for member in members]
        with self._lock:
            self._group = engine, comings
            gone = [i for i, coming in enumerate(comings) if coming in self._gone]
        for peer in {*gone, *unreachable}:
            engine.peer_dead(peer)
        return engine

    def _close_over(self, number: int = -1) -> None:
        """Closes groups of earlier rounds whose members have all they need by now, or should; and
        those that have a peer of whom another coming is there."""
        kept: list[_Over] = []
        spare = len(self._over) - MOST_OVER
        for i, one in enumerate(self._over):
            age = time.monotonic() - one.ended
            done = age > LINGER_SECONDS or not one.lingers
            if number in one.numbers or done or i < spare:
                one.engine.close()
            else:
                kept.append(one)
        self._over = kept

    def _forget_gone(self) -> None:
        """Paths to peers that have gone take a share of the others' windows no more."""
        assert self._host is not None
        for number, (_, _, coming, _) in list(self._known.items()):
            if coming in self._gone:
                self._close_over(number)
                self._host.admit(number, None)
                del self._known[number]

    def _admit(self, member: Member, own: str) -> None:
        """Makes a peer known to the engine, unless it is the same that was known already, to the
        same coming of this one."""
        came = (member.host, member.port, member.coming, own)
        if self._known.get(member.number) == came:
            return
        assert self._host is not None
        self._close_over(member.number)
        keys = b""
        if self._secret is not None:
            other = member.coming
            keys = self._secret.derived("swarm", self.session, own, other)
            keys += self._secret.derived("swarm", self.session, other, own)
        self._host.admit(member.number, (member.host, member.port), keys)
        self._known[member.number] = came

    def _lost(self, coming: str) -> None:
        """By the client's thread."""
        with self._lock:
            self._gone.append(coming)
            engine, comings = self._group or (None, [])
        if engine is not None and coming in comings:
            with contextlib.suppress(ClosedError):  # the round has just ended
                engine.peer_dead(comings.index(coming))


class Rows:
    """Values in rows of a packet each, behind the weight that they count with.

    What a packet brings is the mean of the rows that came, of w x and of w alike, whoever's got
    lost: so the one over the other is the weighted mean of just those.

    Args:
        count: How many values there are.
        per_packet: Elements of a packet.
        world: Members of the group: each reduces as many rows.
    """

    def __init__(self, count: int, per_packet: int, world: int) -> None:
        self._count = count
        self._width = per_packet - 1
        rows = -(-count // self._width)
        self._shape = (-(-rows // world) * world, per_packet)

    def filled(self, values: Floats, weight: float) -> Floats:
        """The rows of a peer, shape (rows, per_packet)."""
        out = np.zeros(self._shape, np.float32)
        padded = np.zeros(self._shape[0] * self._width, np.float32)
        padded[: self._count] = values
        np.multiply(padded.reshape(-1, self._width), np.float32(weight), out=out[:, 1:])
        out[:, 0] = weight
        return out

    def take(self, rows: Floats, values: Floats) -> float:
        """Writes the means to ``values``. Returns the share that stayed as it was: a mean that
        isn't finite, or has no weight, isn't taken."""
        with np.errstate(all="ignore"):
            means = rows[:, 1:] / rows[:, :1]
        good = (rows[:, 0] > 0) & np.isfinite(means).all(axis=1)
        taken = np.repeat(good, self._width)[: self._count]
        values[taken] = means.reshape(-1)[: self._count][taken]
        return 1.0 - float(np.count_nonzero(taken)) / max(1, self._count)
