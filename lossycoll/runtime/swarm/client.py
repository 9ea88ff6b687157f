"""A peer's connection to the directory: one thread that keeps it up, and what comes over it.

With each connection a peer comes anew, as one that others may have been told is lost: it is another
for them, with keys of its own.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lossycoll.errors import ClosedError, LossyError, OperationTimeout, RendezvousError
from lossycoll.runtime.control.schema import Address, Malformed
from lossycoll.runtime.engine.failures import place_text

from . import protocol
from .directory_list import Begin, DirectoryList, DirectorySearch, delay, next_pass
from .directory_transport import CONNECT_SECONDS, Connection, DirectoryTransport
from .protocol import MOST_PEERS, START, VERSION, Message, pack, unpack

NEXT_SECONDS: Final = 2.0
"""For which each of several directories is tried: enough for a packet that has to come again."""
QUIET_SECONDS: Final = 3.0  # that joining may take before a peer says that it still asks
MOST_DOUBLED: Final = 2  # number of times that the wait for an answer doubles
MOST_UNREACHABLE: Final = 32  # reports of peers to whom there is no route that wait to be told
log: Final = logging.getLogger("lossycoll")


@dataclass(slots=True)
class DirectorySession:
    """A peer's session with one directory. ``said``: messages that were sent over it; ``heard``,
    ``beat``: when something last came, and this peer last sent a heartbeat; ``names``: of peers, of
    which more come. ``incarnation``: this peer's, of this connection alone."""

    connection: Connection
    place: Address
    incarnation: str
    heard: float
    beat: float = 0.0
    answered: bool = False
    ended: bool = False
    redirect: protocol.Redirect | None = None
    names: tuple[str, ...] = ()
    said: list[Message] = field(default_factory=list)


class Listener:
    """Whom a client's thread tells what a directory has said."""

    def joined(self, number: int) -> None:
        """A directory has taken this peer in, and has said nothing else yet. If the number is
        another one than before, where its packets come from is to be said anew."""

    def met(self, incarnations: Sequence[str]) -> None:
        """These are in a group or transfer of which others will hear."""

    def donate(self, transfer: protocol.Transfer) -> None:
        """This peer is to be a donor."""

    def gone(self, incarnation: str) -> None:
        """This incarnation of a peer is over."""


class DirectoryClient:
    """``connect`` first; the thread is there until ``close``. ``directories``: (host, port) of each
    that may be asked, the first that answers is. ``transport``: by which they are reached, the
    client's from then on. ``begin``: its right to begin a swarm; None: it joins one."""

    def __init__(
        self,
        directories: Sequence[Address],
        name: str,
        transport: DirectoryTransport,
        begin: Begin | None = None,
    ) -> None:
        self.directories = DirectoryList(directories, begin)
        self._transport = transport
        self._trouble = ""  # why no directory was reached the last time; "": one was
        self.listener = Listener()
        self._name = name
        self._start = secrets.token_hex(START // 2)
        """The process's part of each incarnation; a connection adds its own."""
        self._broken = threading.Event()  # the connection is to end, and another to be made
        self.joined: protocol.Joined | None = None
        self.peers = 0
        self.due = False  # a round is due by the samples of all peers, and none has begun since
        self._round = 0
        self._epoch = 0
        self._redirected = False  # it was told to turn to the first of them, and isn't there yet
        self._in_round = False
        self._standing: dict[type[Message], Message] = {}
        """Messages that each directory must get from this peer, in order."""
        self._unreachable: deque[protocol.Unreachable] = deque(maxlen=MOST_UNREACHABLE)
        self._pending: dict[type[Message], Message] = {}
        """Requests that nothing has answered yet: each goes over each connection."""
        self._answers: dict[type[Message], Any] = {}  # to the latest request of each kind
        self._asks_agreed = False
        self._transfers: list[protocol.Transfer] = []
        self._partners: dict[int, str] = {}
        """The latest incarnations of those that it has exchanged packets with, by their numbers."""
        self._failure: LossyError | None = None
        self._changed = threading.Condition()
        self._closed = self._over = False
        self.malformed = 0  # number of malformed messages
        self._thread = threading.Thread(target=self._run, name="lossycoll-peer", daemon=True)

    # ---- by callers ----

    def connect(self, timeout: float) -> protocol.Joined:
        """Joins the swarm. RendezvousError: no directory answers in ``timeout`` seconds, or it
        refuses this peer."""
        end = time.monotonic() + timeout
        self._thread.start()
        with self._changed:
            quiet = min(timeout, QUIET_SECONDS)
            is_waiting = not self._changed.wait_for(lambda: self.joined or self._failure, quiet)
        places = self.directories.places
        if is_waiting and timeout > quiet:
            log.warning(
                "peer %r: no directory has a swarm yet at %s%s; it goes on asking for %.0f s",
                self._name,
                _listed(places),
                self._why() if len(places) == 1 else "",  # it is that of the last one
                end - time.monotonic(),
            )
        try:
            left = max(0.0, end - time.monotonic())
            joined: protocol.Joined = self._awaited(lambda: self.joined, left)
        except OperationTimeout:
            raise RendezvousError(
                f"peer {self._name!r}: no directory answers at {_listed(self.directories.places)} "
                f"within {timeout:g} s; is it running, reachable, and of the same "
                f"secret?{self._why()}"
            ) from None
        return joined

    def round_over(self) -> None:
        """End this peer's round: from now on it may follow a redirect to another directory."""
        with self._changed:
            self._in_round = False
        self._nudge()

    def say(self, message: Message) -> None:
        """Tells the directory, and each that takes its place."""
        with self._changed:
            self._standing.pop(type(message), None)
            self._standing[type(message)] = message
        self._nudge()

    def report_unreachable(self, incarnations: Sequence[str]) -> None:
        """Tells the directory to whom there is no route. If it ends meanwhile, it is of no use."""
        with self._changed:
            self._unreachable.append(protocol.Unreachable(tuple(incarnations)))
        self._nudge()

    def renew(self) -> None:
        """Comes anew: whatever others know of the routes to this peer isn't so any more."""
        self._broken.set()
        self._nudge()

    def averages(self, wanted: protocol.Averages, timeout: float) -> None:
        """Says what this peer averages. RendezvousError: others average something else, or on
        another grid. OperationTimeout: the directory doesn't answer within ``timeout`` seconds."""
        with self._changed:
            self._answers.pop(protocol.Averages, None)
            self._asks_agreed = True
        self.say(wanted)
        try:
            reason = self._awaited(lambda: self._answers.get(protocol.Averages), timeout)
        finally:
            self._asks_agreed = False
        if reason:
            with self._changed:
                self._standing.pop(protocol.Averages, None)
            raise self._refused(reason)

    def names(self, timeout: float = 10.0) -> tuple[str, ...]:
        """Return the names of all peers. OperationTimeout: the directory doesn't answer within
        ``timeout`` seconds."""
        found: tuple[str, ...] = self._ask(protocol.Who(), timeout)
        return found

    def transfers(self, donors: int, timeout: float) -> list[protocol.Transfer]:
        """Return the state transfers to this peer, from ``donors`` peers at most; none, if nobody
        has one. OperationTimeout: the directory doesn't answer within ``timeout`` seconds."""
        self._transfers = []
        self._ask(protocol.Seek(donors), timeout)
        return list(self._transfers)

    def next_group(self, weight: float, timeout: float) -> protocol.Group:
        """The group of the next round, in which what this peer has counts ``weight``.
        OperationTimeout: there is none within ``timeout`` seconds. LossyError: the directory
        refuses this peer."""
        try:
            group: protocol.Group = self._ask(protocol.Ready(weight), timeout)
        except BaseException:  # of Ctrl-C, too
            self._broken.set()  # the directory may still take this peer for one that is ready
            self.round_over()
            raise
        return group

    def _ask(self, request: Message, timeout: float) -> Any:
        kind = type(request)
        with self._changed:
            self._answers.pop(kind, None)
            self._pending[kind] = request
        self._nudge()
        try:
            return self._awaited(lambda: self._answers.get(kind), timeout)
        finally:
            with self._changed:
                if self._pending.get(kind) is request:
                    del self._pending[kind]

    def _awaited(self, found: Callable[[], Any], timeout: float) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: found() is not None or self._failure, timeout)
            if found() is not None:
                return found()
        if self._failure is not None:
            raise self._failure.again()
        raise OperationTimeout(
            f"peer {self._name!r}: no answer of a directory for {timeout:g} s; tried: "
            f"{_listed(self.directories.places)}{self._why()}"
        )

    def _why(self) -> str:
        return f" ({self._trouble})" if self._trouble else ""

    def close(self) -> None:
        """Leaves the swarm: whoever waits here raises ClosedError. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._failure = ClosedError(f"peer {self._name!r} has left the swarm")
            self._changed.notify_all()
            self._transport.wake()
        if self._thread.is_alive():
            self._thread.join()
        with self._changed:
            self._over = True
            self._transport.end()

    # ---- the thread ----

    def _nudge(self) -> None:
        with self._changed:
            if not self._over:
                self._transport.wake()

    def _run(self) -> None:
        search = DirectorySearch(self._transport, self.directories)
        while self._failure is None and self.joined is None and self.directories.seeks:
            found = search.turn()
            self._trouble = search.trouble
            if found is None:
                self._transport.wait(max(0.0, search.wakes() - time.monotonic()))
            elif not self._run_session(*found):
                self.directories.tries += 1
                self._pause(time.monotonic() + delay(random.random()))
        search.close()
        self.malformed += search.malformed
        self._fail_over()
        self.due = True  # a round raises why there is none any more

    def _fail_over(self) -> None:
        """Failover: one directory after another, in the order of the directory list, this peer's
        own among them, until the swarm is left."""
        due = time.monotonic()
        was_with = self.joined is not None
        while self._failure is None:
            if was_with or self._pass():
                self.directories.tries = -1
                due = time.monotonic()
            was_with = False
            self.directories.tries += 1
            due = next_pass(due, time.monotonic())
            just_redirected = self._redirected and self.directories.tries == 0
            if self._failure is None and not just_redirected:
                self._pause(due + delay(random.random()))

    def _pass(self) -> bool:
        """One pass over the directory list. Return True if this peer was with one of them."""
        before = self.directories.places
        for at, place in enumerate(before):
            referred = self.directories.places is not before
            if self._failure is not None:
                break
            try:
                is_next = self.directories.is_next(place, at, standby=referred)
            except LossyError as error:
                log.warning("peer %r opens no directory: %s", self._name, error)
                is_next = False
            if is_next and self._run_session(place):
                return True
        return False

    def _pause(self, end: float) -> None:
        while self._failure is None and (left := end - time.monotonic()) > 0:
            self._transport.wait(left)

    def _run_session(self, place: Address, begun: Connection | None = None) -> bool:
        """Run a session until its connection ends. Return True if this peer joined the swarm.
        ``begun``: a connection with the directory; None: it makes one."""
        had = self.joined
        try:
            found = begun or self._transport.reach(place, had.session if had else "")
        except OSError as error:
            self._trouble = str(error)
            return False
        self._trouble = ""
        with contextlib.closing(found) as reached:
            session = DirectorySession(
                reached, place, self._start + secrets.token_hex(8), time.monotonic()
            )
            came = (had.number, had.session) if had else (MOST_PEERS, "0" * 16)
            latest = self._round, self._epoch
            wanted = protocol.Join(VERSION, self._name, session.incarnation, *came, *latest)
            reached.write(pack(wanted))
            self._broken.clear()
            while not (reached.broken or self._broken.is_set() or self._failure or session.ended):
                self._turn(session)
            if session.answered and not reached.broken:
                turns = session.redirect if session.ended else None
                reached.write(pack(turns or protocol.Leave()))
                reached.finish()
            elif not (session.answered or (session.ended and reached.reached)):
                self._trouble = reached.broken or ("" if reached.reached else "timed out")
        return session.answered

    def _turn(self, session: DirectorySession) -> None:
        # Of thousands that come at once the last hear nothing for long: who came again as soon
        # would have to wait behind all others once more.
        patience = CONNECT_SECONDS * 2 ** min(self.directories.tries, MOST_DOUBLED)
        lease = self.joined.lease if self.joined and session.answered else patience
        if not session.connection.reached and len(self.directories.places) > 1:
            lease = min(lease, NEXT_SECONDS)
        self._transport.wait(lease / 4)
        now = time.monotonic()
        for body in session.connection.read():
            session.heard = now
            self._take(session, body)
        # A directory that is silent is none: it answers each heartbeat.
        session.ended |= now - session.heard > lease
        if session.redirect is not None and not self._in_round and not session.ended:
            session.ended = self._redirected = True
            here = [(session.redirect.host, session.redirect.port), session.place]
            self.directories.prefer(*here)
        elif session.answered and not self._broken.is_set():  # else it is for the next connection
            self._say(session)
            if now - session.beat > lease / 4:
                session.beat = now
                session.connection.write(pack(protocol.Heartbeat(self.peers)))

    def _say(self, session: DirectorySession) -> None:
        """Send messages of callers that weren't sent over this connection yet."""
        with self._changed:
            wanted = [*self._standing.values(), *self._unreachable, *self._pending.values()]
            self._unreachable.clear()
        for message in wanted:
            if not any(message is one for one in session.said):
                session.connection.write(pack(message))
        session.said = wanted

    def _take(self, session: DirectorySession, body: bytes) -> None:
        """Long because each kind of message has its effect."""
        try:
            message: Message = unpack(body)
        except Malformed:
            self.malformed += 1
            return
        if isinstance(message, protocol.Group | protocol.Transfer):
            self._partners.update((one.number, one.incarnation) for one in message.members)
            self.listener.met([one.incarnation for one in message.members])
        with self._changed:
            if isinstance(message, protocol.Joined):
                session.answered = True
                self._take_number(session, message)
            elif isinstance(message, protocol.Refused) and self._redirected:
                log.warning("peer %r stays where it was: %s", self._name, message.reason)
                session.ended = True
            elif isinstance(message, protocol.Refused):
                self._fail(self._refused(message.reason))
            elif isinstance(message, protocol.Redirect):
                session.redirect = message
            elif isinstance(message, protocol.Group):
                # One of a call that gave up waiting isn't for the next.
                if not self._broken.is_set() and session.incarnation in {
                    one.incarnation for one in message.members
                }:
                    self._in_round = True
                    self._answer(protocol.Ready, message)
                    # At once: another directory may be told before whoever waits has woken.
                    self._round = message.round + 1
            elif isinstance(message, protocol.Heartbeat):
                self.peers = message.peers
            elif isinstance(message, protocol.Probe):
                session.beat = 0.0  # so that one is due
            elif isinstance(message, protocol.Agreed):
                self._answers[protocol.Averages] = message.reason
                if message.reason and not self._asks_agreed:  # said again, to another directory
                    self._fail(self._refused(message.reason))
            elif isinstance(message, protocol.Peers):
                session.names += message.names
                if not message.more:
                    self._answer(protocol.Who, session.names)
                    session.names = ()
            elif isinstance(message, protocol.Directories):
                self._learn(session, message.addresses)
            elif isinstance(message, protocol.Transfer):
                if message.members[-1].incarnation == session.incarnation:
                    self._transfers.append(message)
            elif isinstance(message, protocol.Found) and protocol.Seek in self._pending:
                self._answer(protocol.Seek, message.transfers)
            elif isinstance(message, protocol.Leave):  # the directory ends, in good order
                session.ended = True
            if isinstance(message, protocol.Due | protocol.Group):
                self.due = isinstance(message, protocol.Due)
            self._changed.notify_all()
        if isinstance(message, protocol.Transfer):
            if message.members[0].incarnation == session.incarnation:
                self.listener.donate(message)
        elif isinstance(message, protocol.Gone):
            self.listener.gone(message.incarnation)
        elif isinstance(message, protocol.Joined):
            try:
                self.listener.joined(message.number)
            except LossyError as error:
                self._fail(error)
        elif isinstance(message, protocol.Present):
            starts = frozenset(message.starts)
            for number, incarnation in list(self._partners.items()):
                if incarnation[:START] not in starts:
                    self.listener.gone(self._partners.pop(number))

    def _answer(self, to: type[Message], answer: Any) -> None:
        self._answers[to] = answer
        self._pending.pop(to, None)

    def _take_number(self, session: DirectorySession, message: protocol.Joined) -> None:
        self.joined, self._redirected = message, False
        self._epoch = max(self._epoch, message.epoch)
        self.directories.prefer(session.place)

    def _learn(self, session: DirectorySession, places: Sequence[Address]) -> None:
        """Take a directory list: the serving one first, then all in the order that other peers
        have. A standby directory names others to ask."""
        first = [session.place] if session.answered else []
        self.directories.learn([*first, *places], serves=session.answered)
        session.ended |= not session.answered

    def _fail(self, error: LossyError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _refused(self, reason: str) -> RendezvousError:
        return RendezvousError(f"peer {self._name!r}: {reason}")


def _listed(places: Sequence[Address]) -> str:
    return ", ".join(place_text(*one) for one in places)
