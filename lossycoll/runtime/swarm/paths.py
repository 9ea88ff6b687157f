"""Paths of a peer's engine to other peers, and the groups that hold on to them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lossycoll.errors import ClosedError, EngineError, PeerLostError
from lossycoll.options.fields import Options
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.failures import Code, Failure, Where, error_of, place_text
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.engine.reports import Report
from lossycoll.runtime.keys.secret import Secret

from .ice_agent import Route
from .nat_agent import ROUTE_SECONDS, NatAgent
from .protocol import MOST_PEERS, Member

MOST_GONE: Final = 4 * MOST_PEERS
LINGER_SECONDS: Final = 5.0  # time that packets of an ended round stay available to the others
MOST_OVER: Final = 8  # rounds of which such packets are there
FLUSH_SECONDS: Final = 1.0  # the same of the last round, before this peer leaves
Floats: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Over:
    """A group whose round is over here. Others may still ask for packets, out of its buffer."""

    engine: EngineGroup
    buffer: Floats
    numbers: frozenset[int]
    ended: float

    @property
    def lingers(self) -> bool:
        try:
            return self.engine.lingering()[0] > 0
        except ClosedError:
            return False


@dataclass(eq=False)
class Paths:
    """Paths of an engine whose peers come and go. Any thread may call. The engine lets go of a peer
    only when no group has it as a member: groups of rounds that are over, and of transfers, are
    closed for that. ``secret``: the swarm's; None: all is in clear. ``on_unreachable``: told the
    incarnations of those to whom there is none."""

    host: InitVar[Host]
    session: str
    secret: Secret | None
    options: Options
    nat_agent: NatAgent
    on_unreachable: Callable[[Sequence[str]], None]

    def __post_init__(self, host: Host) -> None:
        self._host: Host | None = host
        self.number = host.process
        self._lock = threading.RLock()
        self._known: dict[int, tuple[str, bytes]] = {}
        """Incarnation of each peer, and the salt of its route."""
        self._round: tuple[EngineGroup, Sequence[Member]] | None = None
        """Group of the running round, and its members."""
        self._over: list[_Over] = []
        self._transfers: dict[EngineGroup, tuple[Member, ...]] = {}
        self._gone: dict[str, None] = {}  # incarnations that are over, the latest last

    def no_route(self, member: Member) -> EngineError:
        """An error for one of those whom :meth:`admit_all` returns."""
        places = [(member.host, member.port), *member.others]
        listed = ", ".join(place_text(*one) for one in places)
        return EngineError(
            f"peer {self.number}: no route to peer {member.number} at {listed}: UDP packets "
            f"between the two are lost, both ways or one"
        )

    def admit_all(
        self, members: Sequence[Member], own: str, timeout: float = ROUTE_SECONDS
    ) -> list[Member]:
        """Makes peers known to the engine, unless they are already. The directory hears of those to
        whom there is no route. ``timeout``: seconds to look for routes, up to ROUTE_SECONDS.
        Returns those that aren't known: there is no route to them, or a round with them is on.
        ClosedError: this peer has left the swarm."""
        there = [member for member in members if not self.has_gone(member.incarnation)]
        routes = self.nat_agent.find_routes(there, own, min(timeout, ROUTE_SECONDS))
        unreachable = [member for member in members if member.number not in routes]
        if silent := [
            member.incarnation for member in unreachable if not self.has_gone(member.incarnation)
        ]:
            self.on_unreachable(silent)
        for member in members:
            route = routes.get(member.number)
            if route is None:
                continue
            try:
                self._take(member, own, route)
            except EngineError:  # a transfer with it is on, say: the others go on
                unreachable.append(member)
        return unreachable

    def _take(self, member: Member, own: str, route: Route) -> None:
        """The engine's path to a peer is made anew with each route: keys and numbers, at both ends.
        EngineError: a round with it is on."""
        with self._lock:
            if self._known.get(member.number) == (member.incarnation, route.salt):
                return
            self.close_over(member.number)
            keys = b""
            if self.secret is not None:
                salt = route.salt.hex()
                keys = self.secret.derived("swarm", self.session, own, member.incarnation, salt)
                keys += self.secret.derived("swarm", self.session, member.incarnation, own, salt)
            self._engine().admit(member.number, route.place, keys)
            self._known[member.number] = member.incarnation, route.salt

    def gone(self, incarnation: str) -> None:
        """Note that a peer is lost, or has left: the other ends of its transfers hear that.
        ``incarnation``: the one of its that is over."""
        self.nat_agent.give_up(incarnation)
        with self._lock:
            self._gone[incarnation] = None
            if len(self._gone) > MOST_GONE:
                del self._gone[next(iter(self._gone))]
            self._end_transfers(lambda member: member.incarnation == incarnation)
            engine, members = self._round or (None, ())
            for rank, member in enumerate(members):
                if engine is not None and member.incarnation == incarnation:
                    with contextlib.suppress(ClosedError):  # the round is ended
                        engine.peer_dead(rank)

    def confirm_alive(self, incarnations: Sequence[str]) -> None:
        """Take peers for alive that a directory has: they were reported as gone too early."""
        with self._lock:
            for incarnation in incarnations:
                self._gone.pop(incarnation, None)

    def has_gone(self, incarnation: str) -> bool:
        with self._lock:
            return incarnation in self._gone

    def _forget_gone(self) -> None:
        """Paths to peers that have gone take a share of the others' windows no more."""
        with self._lock:
            for number, (incarnation, _) in list(self._known.items()):
                if incarnation in self._gone:
                    self.close_over(number)
                    self._engine().admit(number, None)
                    self.nat_agent.forget(number)
                    del self._known[number]

    def rank_in(self, members: Sequence[Member]) -> int:
        """This peer's rank in a group. EngineError: it isn't in it."""
        numbers = [member.number for member in members]
        if self.number not in numbers:
            raise EngineError(f"peer {self.number}: not in the group that it was told of")
        return numbers.index(self.number)

    def _group(self, number: int, members: Sequence[Member]) -> EngineGroup:
        """A group of peers that are known, this one among them. EngineError: there is no memory.
        ClosedError: this peer has left the swarm."""
        return EngineGroup(
            self._engine(),
            self.rank_in(members),
            len(members),
            number=number,
            fault_group=number,
            options=self.options,
            members=tuple(member.number for member in members),
        )

    def begin_round(
        self, number: int, members: Sequence[Member]
    ) -> tuple[EngineGroup, list[Member]]:
        """Make the group of a round, until :meth:`end_round`, and its members known to the engine.
        To the round those are lost that have gone, or to whom there is no route. Returns these
        last, too. Errors as of :meth:`admit_all`."""
        self._forget_gone()
        rank = self.rank_in(members)
        others = [member for member in members if member is not members[rank]]
        unreachable = self.admit_all(others, members[rank].incarnation)
        with self._lock:
            engine = self._group(number, members)
            self._round = engine, members
            for peer, member in enumerate(members):
                if member in unreachable or member.incarnation in self._gone:
                    engine.peer_dead(peer)
        return engine, unreachable

    def end_round(self, buffer: Floats) -> None:
        """A round is over here. Others may still ask for its packets, out of ``buffer``."""
        with self._lock:
            assert self._round is not None
            (engine, members), self._round = self._round, None
            numbers = frozenset(member.number for member in members)
            self._over.append(_Over(engine, buffer, numbers, time.monotonic()))

    def transfer(self, number: int, members: Sequence[Member]) -> EngineGroup:
        """Make a group of peers that are known, which ends when one of its members has gone or come
        anew. Until :meth:`end_transfer`. PeerLostError: one has gone already."""
        with self._lock:
            if any(member.incarnation in self._gone for member in members):
                raise PeerLostError(f"the other end of transfer {number} has gone")
            engine = self._group(number, members)
            self._transfers[engine] = tuple(members)
            return engine

    def end_transfer(self, engine: EngineGroup) -> None:
        with self._lock:
            self._transfers.pop(engine, None)
            engine.close()

    def close_over(self, number: int = -1) -> None:
        """Closes groups of earlier rounds whose members have all they need by now, or should; and
        all groups that have a peer of whom another incarnation is there. ``number``: that peer's;
        -1: there is none."""
        with self._lock:
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
            self._end_transfers(lambda member: member.number == number)

    def flush(self) -> None:
        """Returns when others have what they may need of the last round, or should have; at once
        if one is on."""
        end = time.monotonic() + FLUSH_SECONDS
        while self._over and self._round is None and time.monotonic() < end:
            self.close_over()
            time.sleep(0.002)

    def abort(self) -> None:
        """End the transfers, and the running round: whoever waits in one gets ClosedError."""
        with self._lock:
            self._end_transfers(lambda member: True)
            if self._round is not None:
                self._round[0].close()

    def _end_transfers(self, has_gone: Callable[[Member], bool]) -> None:
        with self._lock:
            for engine, members in list(self._transfers.items()):
                if any(map(has_gone, members)):
                    self.end_transfer(engine)

    def close(self) -> None:
        """Closes the engine, when others have what they may need of the last round. Idempotent."""
        self.abort()
        self.flush()
        with self._lock:
            for one in self._over:
                one.engine.close()
            self._over = []
            self.abort()
            host, self._host = self._host, None
        if host is not None:
            host.close()

    def _engine(self) -> Host:
        if self._host is None:
            raise ClosedError(f"peer {self.number} has left the swarm")
        return self._host


def outcome(engine: EngineGroup, ticket: int, where: Where) -> Report:
    """Waits for an operation. Returns what it did. LossyError: it has failed."""
    code: int = Code.PENDING
    while code == Code.PENDING:
        code = engine.wait(ticket, 1.0)
    report, failure = engine.result(ticket)
    if code != Code.OK:
        raise error_of(failure if failure.code else Failure(code), where)
    return report
