"""ICE agent: finds routes to other peers, as a state machine without sockets. It follows the idea
of ICE (RFC 8445) with messages of its own. Both ends of a pair send connectivity checks to every
candidate address of the other at the same time: a NAT lets in what comes from where something was
sent to. The end with the lower number nominates the first route by which an answer comes, and the
other confirms it.

Only fresh messages are believed: each end draws a nonce for a try, and an answer, a NOMINATE and a
NOMINATED repeat the receiver's. Both nonces go into the keys of the path: no two tries have the
same.

A connectivity message is an out-of-band datagram, by which peers also learn their reflexive
addresses (docs/swarm-messages.md has the table). All have the same size, so that no answer is
larger than its question. The tag is of a key that the swarm's secret and session make; without a
secret, of the session alone."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import secrets
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final, TypeAlias

from lossycoll.runtime.control.schema import Address, Malformed
from lossycoll.runtime.engine.host import MARK
from lossycoll.runtime.keys.secret import Secret

from .protocol import MOST_PEERS, Member

CONNECTIVITY_VERSION: Final = 1
DIRECTORY: Final = 0xFFFF  # the directory's number
NONCE: Final = 16
NOTHING: Final = bytes(NONCE)  # no nonce
INCARNATION: Final = 8
NOBODY: Final = bytes(INCARNATION)
_BODY: Final = struct.Struct("!4sBBHHH8s16s16s16s")
_TAG: Final = 16
CONNECTIVITY_BYTES: Final = _BODY.size + _TAG
FIRST_AGAIN, MOST_AGAIN, SLOWER = 0.05, 0.25, 1.5
"""Seconds after which a check is repeated: at first, at last, and how they grow."""
MOST_PEER_REFLEXIVE: Final = 2
"""Peer-reflexive candidates that are tried: sources of checks that nobody has told of."""
CHALLENGE_SECONDS: Final = 1.0  # between two challenges to a peer that may want a new route
QUIET: Final = 3.5  # intervals of KEEPALIVE without one after which a route isn't trusted


class Kind(IntEnum):
    CHECK = 1  # connectivity check: is somebody there?
    ANSWER = 2  # answer to a check, with the address that the check came from
    NOMINATE = 3  # nomination of the route by which this comes
    NOMINATED = 4  # confirmation of a nomination
    KEEPALIVE = 5  # keepalive for the NATs on a route


class Forged(Malformed):
    """Message of another secret or session, or one that was changed on the way."""


@dataclass(frozen=True, slots=True)
class ConnectivityMessage:
    """One connectivity message. ``incarnation``: the sender's, as :func:`short` has it; NOBODY if
    it doesn't matter. ``nonce``: the sender's in this try. ``echo``: the receiver's.
    ``reflexive``: the source of a check that is answered."""

    kind: Kind
    sender: int
    receiver: int
    incarnation: bytes = NOBODY
    nonce: bytes = NOTHING
    echo: bytes = NOTHING
    reflexive: Address | None = None


def short(incarnation: str) -> bytes:
    """Return the part of an incarnation that messages carry: its end, as all of a process begin
    alike."""
    return bytes.fromhex(incarnation)[-INCARNATION:]


def key_of(secret: Secret | None, session: str) -> bytes:
    """Derive the key that authenticates a swarm's connectivity messages."""
    if secret is not None:
        return secret.derived("connectivity", session)
    return hashlib.sha256(f"connectivity/{session}".encode()).digest()


def pack(message: ConnectivityMessage, key: bytes) -> bytes:
    address, port = bytes(16), 0
    if message.reflexive is not None:
        address, port = _mapped(message.reflexive[0]), message.reflexive[1]
    numbers = MARK, CONNECTIVITY_VERSION, message.kind, message.sender, message.receiver, port
    body = _BODY.pack(*numbers, message.incarnation, address, message.nonce, message.echo)
    return body + _tag(key, body)


def unpack(data: bytes, key: bytes) -> ConnectivityMessage:
    """Read a datagram. Forged: nobody of this swarm has made it so. Malformed: it is none."""
    if len(data) != CONNECTIVITY_BYTES:
        raise Malformed(f"{len(data)} bytes are no connectivity message")
    body, tag = data[: _BODY.size], data[_BODY.size :]
    if not hmac.compare_digest(tag, _tag(key, body)):
        raise Forged("a connectivity message of another swarm")
    mark, version, kind, sender, receiver, port, incarnation, address, nonce, echo = _BODY.unpack(
        body
    )
    if mark != MARK or version != CONNECTIVITY_VERSION or kind not in set(Kind):
        raise Malformed(
            f"a connectivity message of version {version} and kind {kind}, wanted version "
            f"{CONNECTIVITY_VERSION}"
        )
    if any(number >= MOST_PEERS and number != DIRECTORY for number in (sender, receiver)):
        raise Malformed(f"a connectivity message from {sender} to {receiver}: no peers")
    return ConnectivityMessage(
        Kind(kind), sender, receiver, incarnation, nonce, echo, _place(address, port)
    )


def _tag(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, body, hashlib.sha256)[:_TAG]


def _mapped(host: str) -> bytes:
    address = ipaddress.ip_address(host.partition("%")[0])
    return (b"" if address.version == 6 else bytes(10) + b"\xff\xff") + address.packed


def _place(address: bytes, port: int) -> Address | None:
    found = ipaddress.IPv6Address(address)
    return (str(found.ipv4_mapped or found), port) if port else None


Sends: TypeAlias = list[tuple[Address, ConnectivityMessage]]


@dataclass(slots=True)
class Route:
    """Nominated route to a peer. ``salt``: the nonces of both, the lower number's first. ``heard``:
    when the peer last was. ``challenge``: the nonce by which the peer is to prove that it wants a
    new one, and when it was sent."""

    incarnation: str
    own: str
    place: Address
    salt: bytes
    heard: float
    doubted: bool = False
    challenge: tuple[bytes, float] = NOTHING, -math.inf


@dataclass(slots=True)
class _Attempt:
    """Attempt to find a route to a peer. ``nominated``: the address that was nominated, and the
    nonce there."""

    incarnation: str
    own: str
    nonce: bytes
    candidates: list[Address]
    due: float
    again: float = FIRST_AGAIN
    learnt: int = 0
    nominated: tuple[Address, bytes] | None = None


@dataclass
class IceAgent:
    """ICE agent of one peer. ``draw``: makes a nonce of so many bytes. ``counts``: messages that
    changed nothing; foreign: for another peer, or of no peer that is wanted; stale: of an earlier
    try, or repeated by somebody."""

    number: int
    clock: Callable[[], float]
    interval: float
    draw: Callable[[int], bytes] = secrets.token_bytes
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._attempts: dict[int, _Attempt] = {}
        self._routes: dict[int, Route] = {}

    # ---- what the peer wants ----

    def begin(self, member: Member, own: str) -> Sends:
        """Begin to look for a route to a peer, unless its incarnation and ours have one."""
        number, now = member.number, self.clock()
        if self.route(member, own) is not None:
            return []
        self._routes.pop(number, None)
        found = self._attempts.get(number)
        if found is not None and (found.incarnation, found.own) == (member.incarnation, own):
            return []
        places = list(dict.fromkeys([(member.host, member.port), *member.others]))
        self._attempts[number] = _Attempt(member.incarnation, own, self.draw(NONCE), places, now)
        return self.due()

    def route(self, member: Member, own: str) -> Route | None:
        """The route to a peer; None: there is none, or it isn't trusted any more."""
        route = self._routes.get(member.number)
        fits = route and (route.incarnation, route.own) == (member.incarnation, own)
        if route is None or not fits or route.doubted:
            return None
        return route if self.clock() - route.heard <= QUIET * self.interval else None

    def is_trying(self, member: Member) -> bool:
        one = self._attempts.get(member.number)
        return one is not None and one.incarnation == member.incarnation

    def give_up(self, incarnation: str) -> None:
        """Stop looking for a route: the peer is unreachable, or has gone."""
        self._attempts = {
            n: one for n, one in self._attempts.items() if one.incarnation != incarnation
        }

    def forget(self, number: int) -> None:
        self._attempts.pop(number, None)
        self._routes.pop(number, None)

    def keepalives(self) -> Sends:
        kind, own, routes = Kind.KEEPALIVE, self.number, self._routes.items()
        return [(to.place, ConnectivityMessage(kind, own, n, short(to.own))) for n, to in routes]

    def due(self) -> Sends:
        now, out = self.clock(), []
        for number, one in self._attempts.items():
            if one.due > now:
                continue
            one.due, one.again = now + one.again, min(MOST_AGAIN, SLOWER * one.again)
            places = one.candidates if one.nominated is None else [one.nominated[0]]
            out += [(place, self._request(number, one)) for place in places]
        return out

    def wakes(self) -> float | None:
        """When :meth:`due` may say something new."""
        return min((one.due for one in self._attempts.values()), default=None)

    # ---- what others say ----

    def heard(self, message: ConnectivityMessage, source: Address) -> Sends:
        """Take a message that a peer of the swarm has made. Returns the messages to send."""
        if message.receiver != self.number or message.sender == self.number:
            self.counts["foreign"] += 1
            return []
        handlers = {
            Kind.CHECK: self._check_received,
            Kind.ANSWER: self._answer_received,
            Kind.NOMINATE: self._nominate_received,
            Kind.NOMINATED: self._nominated_received,
            Kind.KEEPALIVE: self._keepalive_received,
        }
        return handlers[message.kind](message, source)

    def _check_received(self, message: ConnectivityMessage, source: Address) -> Sends:
        """Answer a check in any case: to open a route to here is up to its sender."""
        number, one = message.sender, self._attempts.get(message.sender)
        answer = ConnectivityMessage(
            Kind.ANSWER, self.number, number, echo=message.nonce, reflexive=source
        )
        if one is None or short(one.incarnation) != message.incarnation:
            self.counts["foreign"] += number not in self._routes
            return [(source, answer), *self._challenge(message, source)]
        answer = replace(answer, incarnation=short(one.own), nonce=one.nonce)
        is_known = source in one.candidates
        out = [(source, answer), *self._learn_candidate(number, one, source)]
        if is_known and self.number < number and not one.nominated:
            out.append((source, self._request(number, one)))  # it has begun: no need to wait
        return out

    def _learn_candidate(self, number: int, one: _Attempt, source: Address) -> Sends:
        if source in one.candidates or one.learnt >= MOST_PEER_REFLEXIVE:
            return []
        one.learnt += 1
        one.candidates.append(source)
        return [] if one.nominated else [(source, self._request(number, one))]

    def _challenge(self, message: ConnectivityMessage, source: Address) -> Sends:
        """Challenge a peer that sends checks though there is a route to it. It may want a new
        route, or somebody repeats an old message: its answer tells."""
        route, now = self._routes.get(message.sender), self.clock()
        if route is None or short(route.incarnation) != message.incarnation:
            return []
        if message.nonce in _halves(route.salt):
            return []
        if now - route.challenge[1] < CHALLENGE_SECONDS:
            return []
        nonce = self.draw(NONCE)
        route.challenge = nonce, now
        asks = ConnectivityMessage(Kind.CHECK, self.number, message.sender, short(route.own), nonce)
        return [(source, asks)]

    def _answer_received(self, message: ConnectivityMessage, source: Address) -> Sends:
        number, one = message.sender, self._attempts.get(message.sender)
        route = self._routes.get(number)
        if route is not None and route.challenge[0] == message.echo != NOTHING:
            route.doubted |= message.nonce != NOTHING and message.nonce not in _halves(route.salt)
            return []
        if one is None or message.echo != one.nonce:
            return self._stale()
        if message.nonce == NOTHING or message.incarnation != short(one.incarnation):
            return []  # it looks for no route to this peer, or not yet
        if source not in one.candidates:
            return self._learn_candidate(number, one, source)
        if self.number > number or (one.nominated and one.nominated[1] == message.nonce):
            return []
        one.nominated = source, message.nonce
        return [(source, self._request(number, one))]

    def _nominate_received(self, message: ConnectivityMessage, source: Address) -> Sends:
        number, one = message.sender, self._attempts.get(message.sender)
        salt = message.nonce + message.echo
        fits = one and (message.echo, message.incarnation) == (one.nonce, short(one.incarnation))
        if one is not None and fits and number < self.number:
            self._connect(number, one, source, salt)
        # Of one that is repeated, what was said before was lost.
        route = self._routes.get(number)
        if route is None or (route.salt, route.place) != (salt, source):
            return self._stale()
        said = ConnectivityMessage(
            Kind.NOMINATED, self.number, number, nonce=message.echo, echo=message.nonce
        )
        return [(source, said)]

    def _nominated_received(self, message: ConnectivityMessage, source: Address) -> Sends:
        number, one = message.sender, self._attempts.get(message.sender)
        if one is None or message.echo != one.nonce or one.nominated != (source, message.nonce):
            return self._stale()
        self._connect(number, one, source, one.nonce + message.nonce)
        return []

    def _keepalive_received(self, message: ConnectivityMessage, source: Address) -> Sends:
        route, said = self._routes.get(message.sender), message.incarnation
        if route is None or (route.place, short(route.incarnation)) != (source, said):
            return self._stale()
        route.heard = self.clock()
        return []

    def _stale(self) -> Sends:
        self.counts["stale"] += 1
        return []

    def _connect(self, number: int, one: _Attempt, place: Address, salt: bytes) -> None:
        self._routes[number] = Route(one.incarnation, one.own, place, salt, self.clock())
        self._attempts.pop(number)

    def _request(self, number: int, one: _Attempt) -> ConnectivityMessage:
        incarnation = short(one.own)
        if one.nominated is None:
            return ConnectivityMessage(Kind.CHECK, self.number, number, incarnation, one.nonce)
        return ConnectivityMessage(
            Kind.NOMINATE, self.number, number, incarnation, one.nonce, one.nominated[1]
        )


def _halves(salt: bytes) -> tuple[bytes, bytes]:
    return salt[:NONCE], salt[NONCE:]
