"""How a peer finds routes to others: a state machine without sockets.

Both ends of a pair that is to meet knock at each other at the same time, at every place where the
other may be: what lies between lets in what comes from where something was sent to. The end with
the lower number takes the first route by which an answer comes, and the other takes the same.

Nothing is believed but what is fresh: each end draws a nonce for a try, and an answer, a TAKE and
a TAKEN repeat the receiver's. Both nonces go into the keys of the path: no two tries have the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from lossycoll.runtime.engine.out_of_band import Place

from .knock import NONCE, NOTHING, Kind, Knock, short
from .protocol import Member

FIRST_AGAIN, MOST_AGAIN, SLOWER = 0.05, 0.25, 1.5
"""Seconds after which a knock is repeated: at first, at last, and how they grow."""
LEARNT: Final = 2
"""Places from which a peer knocks, and that nobody has told of it, that are tried too."""
CHECK_SECONDS: Final = 1.0
"""Between two checks whether a peer wants to meet anew."""
QUIET: Final = 3.5
"""Intervals of ALIVE without one after which a route isn't trusted."""

Sends: TypeAlias = list[tuple[Place, Knock]]


@dataclass(slots=True)
class Route:
    """To a peer; both ends have taken it. ``salt``: the nonces of both, the lower number's first.
    ``heard``: when the peer last was."""

    coming: str
    own: str
    place: Place
    salt: bytes
    heard: float
    doubted: bool = False


@dataclass(slots=True)
class _Try:
    """To meet a peer. ``took``: the place of the route that is to be taken, and the nonce there."""

    coming: str
    own: str
    nonce: bytes
    places: list[Place]
    due: float
    again: float = FIRST_AGAIN
    learnt: int = 0
    took: tuple[Place, bytes] | None = None


@dataclass(slots=True)
class Counts:
    """Knocks that changed nothing, by why. ``foreign``: for another peer, or of no peer that is to
    be met; ``stale``: of an earlier try, or repeated by somebody."""

    foreign: int = 0
    stale: int = 0


@dataclass
class Meetings:
    """Those of one peer.

    Args:
        number: The peer's.
        clock: In seconds.
        interval: Seconds between two ALIVE.
        draw: Makes a nonce of so many bytes.
    """

    number: int
    clock: Callable[[], float]
    interval: float
    draw: Callable[[int], bytes] = secrets.token_bytes
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._tries: dict[int, _Try] = {}
        self._routes: dict[int, Route] = {}
        self._checks: dict[int, tuple[bytes, float]] = {}
        """Nonces by which peers prove that they want to meet anew, and when they were asked."""

    # ---- what the peer wants ----

    def begin(self, member: Member, own: str) -> Sends:
        """A peer is to be met, unless there is a route between its coming and ours.

        Args:
            member: The peer.
            own: Our coming.
        """
        number, now = member.number, self.clock()
        if self.route(member, own) is not None:
            return []
        self._routes.pop(number, None)
        found = self._tries.get(number)
        if found is not None and (found.coming, found.own) == (member.coming, own):
            return []
        places = list(dict.fromkeys([(member.host, member.port), *member.others]))
        self._tries[number] = _Try(member.coming, own, self.draw(NONCE), places, now)
        return self.due()

    def route(self, member: Member, own: str) -> Route | None:
        """The route to a peer; None: there is none, or it isn't trusted any more."""
        route = self._routes.get(member.number)
        if route is None or (route.coming, route.own) != (member.coming, own) or route.doubted:
            return None
        return route if self.clock() - route.heard <= QUIET * self.interval else None

    def tries(self, member: Member) -> bool:
        """Whether a peer may still be met."""
        one = self._tries.get(member.number)
        return one is not None and one.coming == member.coming

    def give_up(self, coming: str) -> None:
        """A peer can't be met, or has gone."""
        self._tries = {n: one for n, one in self._tries.items() if one.coming != coming}

    def forget(self, number: int) -> None:
        """A peer has gone."""
        for table in (self._tries, self._routes, self._checks):
            table.pop(number, None)

    def alive(self) -> Sends:
        """What keeps all routes open."""
        return [
            (route.place, Knock(Kind.ALIVE, self.number, number, short(route.own)))
            for number, route in self._routes.items()
        ]

    def due(self) -> Sends:
        """What is to be said again by now."""
        now, out = self.clock(), []
        for number, one in self._tries.items():
            if one.due > now:
                continue
            one.due, one.again = now + one.again, min(MOST_AGAIN, SLOWER * one.again)
            places = one.places if one.took is None else [one.took[0]]
            out += [(place, self._asks(number, one)) for place in places]
        return out

    def wakes(self) -> float | None:
        """When :meth:`due` may say something new."""
        return min((one.due for one in self._tries.values()), default=None)

    # ---- what others say ----

    def heard(self, knock: Knock, source: Place) -> Sends:
        """One came that somebody of the swarm has made. Returns what is to be said to it."""
        if knock.receiver != self.number or knock.sender == self.number:
            self.counts.foreign += 1
            return []
        match knock.kind:
            case Kind.KNOCK:
                return self._knocked(knock, source)
            case Kind.ANSWER:
                return self._answered(knock, source)
            case Kind.TAKE:
                return self._take(knock, source)
            case Kind.TAKEN:
                self._taken(knock, source)
            case Kind.ALIVE:
                self._is_alive(knock, source)
        return []

    def _knocked(self, knock: Knock, source: Place) -> Sends:
        """It is answered in any case: to open a route to here is up to whoever knocks."""
        number, one = knock.sender, self._tries.get(knock.sender)
        fits = one is not None and short(one.coming) == knock.coming
        answer = Knock(Kind.ANSWER, self.number, number, echo=knock.nonce, seen=source)
        if one is None or not fits:
            self.counts.foreign += number not in self._routes
            return [(source, answer), *self._check(knock, source)]
        answer = Knock(
            Kind.ANSWER,
            self.number,
            number,
            short(one.own),
            one.nonce,
            knock.nonce,
            source,
        )
        out = [(source, answer), *self._learn(number, one, source)]
        if len(out) == 1 and self.number < number and source in one.places and not one.took:
            out.append((source, self._asks(number, one)))  # it has begun: not to wait for the time
        return out

    def _learn(self, number: int, one: _Try, source: Place) -> Sends:
        if source in one.places or one.learnt >= LEARNT:
            return []
        one.learnt += 1
        one.places.append(source)
        return [] if one.took else [(source, self._asks(number, one))]

    def _check(self, knock: Knock, source: Place) -> Sends:
        """A peer to which there is a route knocks. It may want to meet anew, or somebody repeats
        what it once said: its answer tells."""
        route, now = self._routes.get(knock.sender), self.clock()
        if (
            route is None
            or short(route.coming) != knock.coming
            or knock.nonce in _halves(route.salt)
        ):
            return []
        _, asked = self._checks.get(knock.sender, (NOTHING, -CHECK_SECONDS))
        if now - asked < CHECK_SECONDS:
            return []
        nonce = self.draw(NONCE)
        self._checks[knock.sender] = nonce, now
        asks = Knock(Kind.KNOCK, self.number, knock.sender, short(route.own), nonce)
        return [(source, asks)]

    def _answered(self, knock: Knock, source: Place) -> Sends:
        number, one = knock.sender, self._tries.get(knock.sender)
        check, _ = self._checks.get(number, (NOTHING, 0.0))
        route = self._routes.get(number)
        if route is not None and check == knock.echo != NOTHING:
            route.doubted |= knock.nonce != NOTHING and knock.nonce not in _halves(route.salt)
            return []
        if one is None or knock.echo != one.nonce:
            self.counts.stale += 1
            return []
        if knock.nonce == NOTHING or knock.coming != short(one.coming):
            return []  # it doesn't want to meet this peer, or not yet
        if source not in one.places:
            return self._learn(number, one, source)
        if self.number > number or (one.took is not None and one.took[1] == knock.nonce):
            return []
        one.took = source, knock.nonce
        return [(source, self._asks(number, one))]

    def _take(self, knock: Knock, source: Place) -> Sends:
        number, one = knock.sender, self._tries.get(knock.sender)
        said = Knock(Kind.TAKEN, self.number, number, nonce=knock.echo, echo=knock.nonce)
        if (
            one is not None
            and number < self.number
            and knock.echo == one.nonce
            and knock.coming == short(one.coming)
        ):
            self._meet(number, one, source, knock.nonce + one.nonce)
            return [(source, said)]
        route = self._routes.get(number)
        if route is not None and route.salt == knock.nonce + knock.echo and route.place == source:
            return [(source, said)]  # what was said before was lost
        self.counts.stale += 1
        return []

    def _taken(self, knock: Knock, source: Place) -> None:
        number, one = knock.sender, self._tries.get(knock.sender)
        if one is None or knock.echo != one.nonce or one.took != (source, knock.nonce):
            self.counts.stale += 1
            return
        self._meet(number, one, source, one.nonce + knock.nonce)

    def _is_alive(self, knock: Knock, source: Place) -> None:
        route = self._routes.get(knock.sender)
        if route is None or route.place != source or short(route.coming) != knock.coming:
            self.counts.stale += 1
            return
        route.heard = self.clock()

    def _meet(self, number: int, one: _Try, place: Place, salt: bytes) -> None:
        self._routes[number] = Route(one.coming, one.own, place, salt, self.clock())
        self._tries.pop(number)
        self._checks.pop(number, None)

    def _asks(self, number: int, one: _Try) -> Knock:
        coming = short(one.own)
        if one.took is None:
            return Knock(Kind.KNOCK, self.number, number, coming, one.nonce)
        return Knock(Kind.TAKE, self.number, number, coming, one.nonce, one.took[1])


def _halves(salt: bytes) -> tuple[bytes, bytes]:
    return salt[:NONCE], salt[NONCE:]
