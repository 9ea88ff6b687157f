"""A peer's connection to the directory: one thread that keeps it up, and what comes over it.

With each connection a peer comes anew, as one that others may have been told is lost: it is another
for them, with keys of its own.

Long because a connection, what each directory is to hear and what callers wait for are one state.
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
from typing import Any, Final

from lossycoll.errors import ClosedError, LossyError, OperationTimeout, RendezvousError
from lossycoll.runtime.membership.messages import Malformed

from .protocol import (
    PLACES,
    START,
    VERSION,
    Agreed,
    Averages,
    Beat,
    Directories,
    Due,
    Found,
    Gone,
    Group,
    Here,
    Join,
    Joined,
    Leave,
    Loan,
    Message,
    Offers,
    Peers,
    Present,
    Ready,
    Refused,
    Seek,
    Serves,
    Spare,
    Turn,
    Unmet,
    Who,
    pack,
    unpack,
)
from .talk import Talk
from .ways import CONNECT_SECONDS, Way
from .whereabouts import Place, Whereabouts

NEXT_SECONDS: Final = 2.0
"""For which each of several directories is tried: enough for a packet that has to come again."""
AGAIN_SECONDS: Final = 0.5
"""Between two tries to reach a directory, on average: thousands don't come at the same time."""
MOST_DOUBLED: Final = 2
"""How often the time for an answer doubles, while there is none."""
MOST_UNMET: Final = 32
"""Reports of peers to whom there is no route that wait to be told."""
log: Final = logging.getLogger("lossycoll")


class DirectoryClient:
    """``connect`` first; the thread is there until ``close``.

    Args:
        directories: (host, port) of each that may be asked, the first that answers is.
        name: The peer's.
        way: By which they are reached, the client's from then on.
        on_gone: Called by the thread when a peer has gone, with the coming that is over.
        on_loan: Called by the thread when this peer is to lend its state.
        on_joined: Called by the thread when a directory has taken this peer in, before it says
            anything else. If its number is another one than before, where its packets come from is
            to be said anew.
        on_met: Called by the thread with the comings of a group or loan, before others hear of it.
    """

    def __init__(
        self,
        directories: Sequence[Place],
        name: str,
        way: Way,
        on_gone: Callable[[str], None],
        on_loan: Callable[[Loan], None],
        on_joined: Callable[[Joined], None] = lambda joined: None,
        on_met: Callable[[Sequence[str]], None] = lambda comings: None,
    ) -> None:
        self._where = Whereabouts(directories)
        self._way = way
        self._trouble = ""
        """Why no directory was reached the last time; "": one was."""
        self._on_gone = on_gone
        self._on_loan = on_loan
        self._on_joined = on_joined
        self._on_met = on_met
        self._name = name
        self._start = secrets.token_hex(START // 2)
        self._broken = threading.Event()
        """The connection is to end, and another to be made."""
        self.joined: Joined | None = None
        self.peers = 0
        self.due = False
        """A round is due by the samples of all peers, and none has begun since."""
        self._round = 0
        self._epoch = 0
        self._turns = False
        """It was told to turn to the first of them, and isn't there yet."""
        self._in_round = False
        self._standing: list[Message] = []
        """What each directory is to hear of this peer, in this order."""
        self._unmet: deque[Unmet] = deque(maxlen=MOST_UNMET)
        self._ready: tuple[int, Ready] | None = None
        """Which of its rounds this peer is ready for."""
        self._rounds = 0
        self._question = 0
        """How often somebody has asked who is there."""
        self._asks_agreed = False
        self._says_anew = False
        """What this peer averages is to be said, even if it has been."""
        self._agreed: Agreed | None = None
        self._names: tuple[str, ...] | None = None
        self._sought: tuple[int, Seek] | None = None
        """Which of its requests for states is open."""
        self._seeks = 0
        self._loans: list[Loan] = []
        self._found: int | None = None
        self._group: Group | None = None
        self._met: dict[int, str] = {}
        """The latest comings of those that it has exchanged packets with, by their numbers."""
        self._failure: LossyError | None = None
        self._changed = threading.Condition()
        self._closed = self._over = False
        self.malformed = 0
        """What came and was no message."""
        self._thread = threading.Thread(target=self._run, name="lossycoll-peer", daemon=True)

    # ---- by callers ----

    def connect(self, timeout: float) -> Joined:
        """Joins the swarm.

        Raises:
            RendezvousError: No directory answers in ``timeout`` seconds, or it refuses this peer.
        """
        self._thread.start()
        try:
            joined: Joined = self._awaited(lambda: self.joined, timeout)
        except OperationTimeout:
            raise RendezvousError(
                f"peer {self._name!r}: no directory answers at {_listed(self._where.places)} "
                f"within {timeout:g} s; is it running, reachable, and of the same "
                f"secret?{self._why()}"
            ) from None
        return joined

    @property
    def directories(self) -> tuple[Place, ...]:
        """Whom this peer turns to in turn, the one that it is connected with first."""
        return tuple(self._where.places)

    @property
    def heard(self) -> tuple[Place, ...]:
        """Where directories are, or were, as this peer has heard."""
        return self._where.heard

    def may_open(self, place: Place, opens: Callable[[], None]) -> None:
        """A directory of this peer itself is at ``place``, or will be when ``opens`` was called, by
        the thread, when all before it have been tried in vain."""
        self._where.may_open(place, opens)

    def round_over(self) -> None:
        """What the latest group was for is done: this peer may turn to another directory."""
        with self._changed:
            self._in_round = False
        self._nudge()

    def say(self, message: Here | Serves | Spare | Averages | Offers) -> None:
        """Tells the directory, and each that takes its place."""
        with self._changed:
            others = [one for one in self._standing if type(one) is not type(message)]
            self._standing = [*others, message]
        self._nudge()

    def unmet(self, comings: Sequence[str]) -> None:
        """Tells the directory to whom there is no route. If it ends meanwhile, it is of no use."""
        with self._changed:
            self._unmet.append(Unmet(tuple(comings)))
        self._nudge()

    def renew(self) -> None:
        """Comes anew: whatever others know of the routes to this peer isn't so any more."""
        self._broken.set()
        self._nudge()

    def averages(self, wanted: Averages, timeout: float) -> None:
        """Says what this peer averages.

        Raises:
            RendezvousError: Others average something else, or on another grid.
            OperationTimeout: The directory doesn't answer within ``timeout`` seconds.
        """
        with self._changed:
            self._agreed, self._asks_agreed, self._says_anew = None, True, True
        self.say(wanted)
        try:
            agreed: Agreed = self._awaited(lambda: self._agreed, timeout)
        finally:
            self._asks_agreed = False
        if agreed.reason:
            with self._changed:
                self._standing = [one for one in self._standing if type(one) is not Averages]
            raise RendezvousError(f"peer {self._name!r}: {agreed.reason}")

    def names(self, timeout: float) -> tuple[str, ...]:
        """Of all peers.

        Raises:
            OperationTimeout: The directory doesn't answer within ``timeout`` seconds.
        """
        with self._changed:
            self._names = None
            self._question += 1
        self._nudge()
        found: tuple[str, ...] = self._awaited(lambda: self._names, timeout)
        return found

    def loans(self, lenders: int, timeout: float) -> list[Loan]:
        """Who lends this peer a state, ``lenders`` at most; nobody, if there is nobody.

        Raises:
            OperationTimeout: The directory doesn't answer within ``timeout`` seconds.
        """
        with self._changed:
            self._seeks += 1
            self._loans, self._found = [], None
            self._sought = self._seeks, Seek(lenders)
        self._nudge()
        try:
            self._awaited(lambda: self._found, timeout)
        finally:
            self._sought = None
        return list(self._loans)

    def next_group(self, weight: float, timeout: float) -> Group:
        """The group of the next round, in which what this peer has counts ``weight``.

        Raises:
            OperationTimeout: There is none within ``timeout`` seconds.
            LossyError: The directory refuses this peer.
        """
        with self._changed:
            self._rounds += 1
            self._group, self._ready = None, (self._rounds, Ready(weight))
        self._nudge()
        try:
            group: Group = self._awaited(lambda: self._group, timeout)
        except OperationTimeout:
            self._broken.set()  # the directory may still take this peer for one that is ready
            self.round_over()
            raise
        finally:
            with self._changed:
                self._ready = None
        return group

    def _awaited(self, found: Callable[[], Any], timeout: float) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: found() is not None or self._failure, timeout)
            if found() is not None:
                return found()
        if self._failure is not None:
            raise self._failure.again()
        raise OperationTimeout(
            f"peer {self._name!r}: no answer of a directory for {timeout:g} s; tried: "
            f"{_listed(self._where.places)}{self._why()}"
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
            self._way.wake()
        if self._thread.is_alive():
            self._thread.join()
        with self._changed:
            self._over = True
            self._way.end()

    # ---- the thread ----

    def _nudge(self) -> None:
        with self._changed:
            if not self._over:
                self._way.wake()

    def _run(self) -> None:
        while self._failure is None:
            before = self._where.places
            for at, place in enumerate(before):
                referred = self._where.places is not before
                if self._failure is not None or not self._is_next(place, at, referred):
                    continue
                if self._talk(place):
                    self._where.tries = -1
                    break
            self._where.tries += 1
            just_told = self._turns and self._where.tries == 0
            if self._failure is None and not just_told:
                self._pause()

    def _is_next(self, place: Place, at: int, referred: bool) -> bool:
        try:
            return self._where.is_next(place, at, stands_by=referred)
        except LossyError as error:
            log.warning("peer %r opens no directory: %s", self._name, error)
            return False

    def _pause(self) -> None:
        """Not too short, whoever wants something meanwhile."""
        end = time.monotonic() + AGAIN_SECONDS * (0.5 + random.random())
        while self._failure is None and (left := end - time.monotonic()) > 0:
            self._way.wait(left)

    def _talk(self, place: Place) -> bool:
        """Until the connection ends. Returns whether this peer was in the swarm by it."""
        number, session = PLACES, "0" * 16
        if self.joined is not None:
            number, session = self.joined.number, self.joined.session
        try:
            found = self._way.reach(place, session if self.joined is not None else "")
        except OSError as error:
            self._trouble = str(error)
            return False
        self._trouble = ""
        with contextlib.closing(found) as reached:
            talk = Talk(reached, place, self._start + secrets.token_hex(8), time.monotonic())
            wanted = Join(
                VERSION, self._name, talk.coming, number, session, self._round, self._epoch
            )
            reached.write(pack(wanted))
            self._broken.clear()
            while not (reached.broken or self._broken.is_set() or self._failure or talk.ended):
                self._turn(talk)
            if talk.answered and not reached.broken:
                reached.write(pack(talk.turns if talk.turns and talk.ended else Leave()))
                reached.finish()
            elif not talk.answered:
                self._trouble = reached.broken or ("" if reached.reached else "timed out")
        return talk.answered

    def _turn(self, talk: Talk) -> None:
        # Of thousands that come at once the last hear nothing for long: who came again as soon
        # would have to wait behind all others once more.
        patience = CONNECT_SECONDS * 2 ** min(self._where.tries, MOST_DOUBLED)
        lease = self.joined.lease if self.joined and talk.answered else patience
        if not talk.session.reached and len(self._where.places) > 1:
            lease = min(lease, NEXT_SECONDS)
        self._way.wait(lease / 4)
        now = time.monotonic()
        for body in talk.session.read():
            talk.heard = now
            self._take(talk, body)
        # A directory that is silent is none: it answers each beat.
        talk.ended |= now - talk.heard > lease
        if talk.turns is not None and not self._in_round and not talk.ended:
            talk.ended = self._turns = True
            here = [(talk.turns.host, talk.turns.port), talk.place]
            self._where.prefer(*here)
        elif talk.answered and not self._broken.is_set():  # else it is for the next connection
            self._say(talk)
            if now - talk.beat > lease / 4:
                talk.beat = now
                talk.session.write(pack(Beat(self.peers)))

    def _say(self, talk: Talk) -> None:
        """What callers want said, if it hasn't been over this connection."""
        session, said = talk.session, talk.said
        with self._changed:
            standing, ready = list(self._standing), self._ready
            question = self._question if self._names is None else 0
            sought = self._sought
            unmet = list(self._unmet)
            self._unmet.clear()
            if self._says_anew:
                said = [one for one in said if not isinstance(one, Averages)]
                self._says_anew = False
        for message in standing:
            if message not in said:
                session.write(pack(message))
        for report in unmet:
            session.write(pack(report))
        if question and question not in said:
            session.write(pack(Who()))
        for asked in (sought, ready):
            if asked is not None and asked not in said:
                session.write(pack(asked[1]))
        talk.said = [*standing, sought, ready, question]

    def _take(self, talk: Talk, body: bytes) -> None:
        """Long because each kind of message has its effect."""
        try:
            message: Message = unpack(body)
        except Malformed:
            self.malformed += 1
            return
        if isinstance(message, Group | Loan):
            self._met.update((one.number, one.coming) for one in message.members)
            self._on_met([one.coming for one in message.members])
        with self._changed:
            if isinstance(message, Joined):
                talk.answered = True
                self._take_number(talk, message)
            elif isinstance(message, Refused) and self._turns:
                log.warning("peer %r stays where it was: %s", self._name, message.reason)
                talk.ended = True
            elif isinstance(message, Refused):
                self._failure = self._failure or self._refused(message.reason)
            elif isinstance(message, Turn):
                talk.turns = message
            elif isinstance(message, Group):
                # One of a call that gave up waiting isn't for the next.
                if not self._broken.is_set() and talk.coming in {
                    one.coming for one in message.members
                }:
                    self._group, self._ready, self._in_round = message, None, True
                    # At once: another directory may be told before whoever waits has woken.
                    self._round = message.round + 1
            elif isinstance(message, Beat):
                self.peers = message.peers
            elif isinstance(message, Agreed):
                self._agreed = message
                if message.reason and not self._asks_agreed:  # said again, to another directory
                    self._failure = self._failure or self._refused(message.reason)
            elif isinstance(message, Peers):
                talk.names += message.names
                if not message.more:
                    self._names, talk.names = talk.names, ()
            elif isinstance(message, Directories):
                self._learn(talk, message.places)
            elif isinstance(message, Loan) and message.members[-1].coming == talk.coming:
                self._loans.append(message)
            elif isinstance(message, Found) and self._sought is not None:
                self._found = message.loans
            elif isinstance(message, Leave):  # the directory ends, in good order
                talk.ended = True
            if isinstance(message, Due | Group):
                self.due = isinstance(message, Due)
            self._changed.notify_all()
        if isinstance(message, Loan) and message.members[0].coming == talk.coming:
            self._on_loan(message)
        if isinstance(message, Gone):
            self._on_gone(message.coming)
        if isinstance(message, Joined):
            try:
                self._on_joined(message)
            except LossyError as error:
                with self._changed:
                    self._failure = self._failure or error
                    self._changed.notify_all()
        if isinstance(message, Present):
            self._compare(frozenset(message.starts))

    def _compare(self, starts: frozenset[str]) -> None:
        """Of those that it has met, others have gone than these."""
        for number in [n for n, coming in self._met.items() if coming[:START] not in starts]:
            self._on_gone(self._met.pop(number))

    def _take_number(self, talk: Talk, message: Joined) -> None:
        """A directory takes this peer in, perhaps by another number than the one before did."""
        had, self.joined, self._turns = self.joined, message, False
        self._epoch = max(self._epoch, message.epoch)
        self._where.prefer(talk.place)
        if had is not None and had.number != message.number:
            self._standing = [one for one in self._standing if type(one) is not Here]

    def _learn(self, talk: Talk, places: Sequence[Place]) -> None:
        """Whom to turn to: first who serves now, then all in the same order as other peers. One
        that stands by says whom to ask instead."""
        first = [talk.place] if talk.answered else []
        self._where.learn([*first, *places], serves=talk.answered)
        talk.ended |= not talk.answered

    def _refused(self, reason: str) -> RendezvousError:
        return RendezvousError(f"peer {self._name!r}: {reason}")


def _listed(places: Sequence[Place]) -> str:
    return ", ".join(f"{host}:{port}" for host, port in places)
