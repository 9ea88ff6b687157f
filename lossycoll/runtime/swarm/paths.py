"""Whom a peer's engine knows, and the groups that hold on to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lossycoll.errors import ClosedError, EngineError, PeerLostError
from lossycoll.options.fields import Options
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.failures import Code, Failure, Where, error_of
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.engine.reports import Report
from lossycoll.runtime.keys.secret import Secret

from .knocker import Knocker
from .meetings import Route
from .protocol import PLACES, Member

MOST_GONE: Final = 4 * PLACES
LINGER_SECONDS: Final = 5.0
"""How long packets of a round that is over here are there for the others."""
MOST_OVER: Final = 8
"""Rounds of which such packets are there."""
FLUSH_SECONDS: Final = 1.0
"""The same of the last round, before this peer leaves."""
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
        """Whether others may still ask."""
        try:
            return self.engine.lingering()[0] > 0
        except ClosedError:
            return False


class Paths:
    """Of an engine whose peers come and go. Any thread may call.

    The engine lets go of a peer only when no group has it as a member: groups of rounds that are
    over, and of loans, are closed for that.

    Args:
        host: The engine.
        number: This peer's.
        session: The swarm's.
        secret: The swarm's; None: all is in clear.
        options: Those of the engine.
        knocker: Finds routes to others.
        unmet: Told the comings of those to whom there is none.
    """

    def __init__(
        self,
        host: Host,
        number: int,
        session: str,
        secret: Secret | None,
        options: Options,
        knocker: Knocker,
        unmet: Callable[[Sequence[str]], None],
    ) -> None:
        self._host: Host | None = host
        self.number: Final = number
        self._session = session
        self._secret = secret
        self._options = options
        self._knocker = knocker
        self._unmet = unmet
        self._lock = threading.RLock()
        self._known: dict[int, tuple[str, bytes]] = {}
        """Of the path to each peer: its coming, and the salt of the route."""
        self._over: list[_Over] = []
        self._loans: dict[EngineGroup, tuple[Member, ...]] = {}
        self._gone: dict[str, None] = {}
        """Comings that are over, the latest last."""

    def admit(self, member: Member, own: str) -> None:
        """Makes a peer known to the engine, unless it is already.

        Args:
            member: The peer.
            own: This peer's coming.

        Raises:
            EngineError: There is no route to it, or a round with it is on.
            ClosedError: This peer has left the swarm.
        """
        if self.admit_all([member], own):
            raise EngineError(
                f"peer {self.number}: no route to peer {member.number} at {_listed(member)}: UDP "
                f"packets between the two are lost, both ways or one"
            )

    def admit_all(self, members: Sequence[Member], own: str) -> list[Member]:
        """Makes peers known to the engine, unless they are already. The directory hears of those to
        whom there is no route.

        Args:
            members: The peers.
            own: This peer's coming.

        Returns:
            Those that aren't known: there is no route to them, or a round with them is on.

        Raises:
            ClosedError: This peer has left the swarm.
        """
        there = [member for member in members if not self.has_gone(member.coming)]
        routes = self._knocker.meet(there, own)
        unmet = [member for member in members if member.number not in routes]
        if silent := [member.coming for member in unmet if not self.has_gone(member.coming)]:
            self._unmet(silent)
        for member in members:
            route = routes.get(member.number)
            if route is None:
                continue
            try:
                self._take(member, own, route)
            except EngineError:  # a loan with it is on, say: the others go on
                unmet.append(member)
        return unmet

    def _take(self, member: Member, own: str, route: Route) -> None:
        """The engine's path to a peer is made anew with each route: keys and numbers, at both ends.

        Raises:
            EngineError: A round with it is on.
        """
        with self._lock:
            if self._known.get(member.number) == (member.coming, route.salt):
                return
            self.close_over(member.number)
            keys = b""
            if self._secret is not None:
                salt = route.salt.hex()
                keys = self._secret.derived("swarm", self._session, own, member.coming, salt)
                keys += self._secret.derived("swarm", self._session, member.coming, own, salt)
            self._engine().admit(member.number, route.place, keys)
            self._known[member.number] = member.coming, route.salt

    def gone(self, coming: str) -> None:
        """A peer is lost, or has left: whoever lends it a state, or takes its, hears that.

        Args:
            coming: The one of its that is over.
        """
        self._knocker.give_up(coming)
        with self._lock:
            self._gone[coming] = None
            if len(self._gone) > MOST_GONE:
                del self._gone[next(iter(self._gone))]
            self._end_loans(lambda member: member.coming == coming)

    def met(self, comings: Sequence[str]) -> None:
        """A directory has these peers: whoever said that one is lost had but lost sight of it.

        Args:
            comings: Of the peers.
        """
        with self._lock:
            for coming in comings:
                self._gone.pop(coming, None)

    def has_gone(self, coming: str) -> bool:
        """Whether a peer was said to be lost.

        Args:
            coming: Of the peer.
        """
        with self._lock:
            return coming in self._gone

    def forget_gone(self) -> None:
        """Paths to peers that have gone take a share of the others' windows no more."""
        with self._lock:
            for number, (coming, _) in list(self._known.items()):
                if coming in self._gone:
                    self.close_over(number)
                    self._engine().admit(number, None)
                    self._knocker.forget(number)
                    del self._known[number]

    def group(self, number: int, members: Sequence[Member]) -> EngineGroup:
        """A group of peers that are known, this one among them.

        Args:
            number: The group's.
            members: In order of their ranks.

        Raises:
            EngineError: There is no memory.
            ClosedError: This peer has left the swarm.
        """
        numbers = tuple(member.number for member in members)
        if self.number not in numbers:
            raise EngineError(f"peer {self.number}: not in the group that it was told of")
        with self._lock:
            return EngineGroup(
                self._engine(),
                numbers.index(self.number),
                len(members),
                number=number,
                fault_group=number,
                options=self._options,
                members=numbers,
            )

    def loan(self, number: int, members: Sequence[Member]) -> EngineGroup:
        """As :meth:`group`, which ends when one of its members has gone or come anew. Until
        :meth:`end_loan`.

        Raises:
            PeerLostError: One has gone already.
        """
        with self._lock:
            if any(member.coming in self._gone for member in members):
                raise PeerLostError(f"the other end of loan {number} has gone")
            engine = self.group(number, members)
            self._loans[engine] = tuple(members)
            return engine

    def end_loan(self, engine: EngineGroup) -> None:
        """Closes the group of a loan. Idempotent."""
        with self._lock:
            self._loans.pop(engine, None)
            engine.close()

    def keep(self, engine: EngineGroup, buffer: Floats, members: Sequence[Member]) -> None:
        """A round is over here. Others may still ask for its packets.

        Args:
            engine: Its group.
            buffer: What they are packets of.
            members: The group's.
        """
        numbers = frozenset(member.number for member in members)
        with self._lock:
            self._over.append(_Over(engine, buffer, numbers, time.monotonic()))

    def close_over(self, number: int = -1) -> None:
        """Closes groups of earlier rounds whose members have all they need by now, or should; and
        all groups that have a peer of whom another coming is there.

        Args:
            number: That peer's; -1: there is none.
        """
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
            self._end_loans(lambda member: member.number == number)

    def flush(self) -> None:
        """Returns when others have what they may need of the last round, or should have."""
        end = time.monotonic() + FLUSH_SECONDS
        while self._over and time.monotonic() < end:
            self.close_over()
            time.sleep(0.002)

    def end_loans(self) -> None:
        """Whoever lends or takes hears that it is over."""
        self._end_loans(lambda member: True)

    def _end_loans(self, has_gone: Callable[[Member], bool]) -> None:
        with self._lock:
            for engine, members in list(self._loans.items()):
                if any(map(has_gone, members)):
                    self.end_loan(engine)

    def close(self) -> None:
        """Closes the engine, when others have what they may need of the last round. Idempotent."""
        self.end_loans()
        self.flush()
        with self._lock:
            for one in self._over:
                one.engine.close()
            self._over = []
            self.end_loans()
            host, self._host = self._host, None
        if host is not None:
            host.close()

    def _engine(self) -> Host:
        if self._host is None:
            raise ClosedError(f"peer {self.number} has left the swarm")
        return self._host


def outcome(engine: EngineGroup, ticket: int, where: Where) -> Report:
    """Waits for an operation.

    Args:
        engine: Its group.
        ticket: Of the operation.
        where: The group's ranks, for errors.

    Returns:
        What it did.

    Raises:
        LossyError: It has failed.
    """
    code: int = Code.PENDING
    while code == Code.PENDING:
        code = engine.wait(ticket, 1.0)
    report, failure = engine.result(ticket)
    if code != Code.OK:
        raise error_of(failure if failure.code else Failure(code), where)
    return report


def _listed(member: Member) -> str:
    places = [(member.host, member.port), *member.others]
    return ", ".join(f"{host}:{port}" for host, port in places)
