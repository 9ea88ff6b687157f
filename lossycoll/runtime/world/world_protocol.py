"""Control plane of one process as a state machine, driven by events and by the time.

It belongs to one thread and never blocks: :meth:`WorldProtocol.step` is given what the sockets
report, and is called again at :attr:`WorldProtocol.due`. Messages go to one handler per type, by a
table. docs/control.md has the protocol.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from lossycoll.runtime.control.schema import Malformed

from .connections import (
    Alive,
    Broken,
    Connected,
    Connections,
    Event,
    Received,
    Refused,
    RekeyAsked,
)
from .failover import ReplayLog, Succession
from .failure_detector import SILENT_SHARE, FailureDetector
from .membership import GroupMessages, Membership
from .messages import (
    GROUP,
    REPLAYED,
    Addressed,
    Dead,
    Follow,
    GroupMessage,
    Heartbeat,
    Left,
    Message,
    Ready,
    Rekey,
    Welcome,
    bits,
    pack,
    ranks_in,
)
from .rank_states import RankState

MEETING_SECONDS: Final = 10.0
"""For which ranks may be silent before all have met, where liveness is shorter: a process that
starts is slow, and one that ends meanwhile is refused at once."""
MOST_WAITING: Final = 4096
"""Messages that wait for the next coordinator."""
HEARTBEAT: Final = pack(Heartbeat())
NEVER: Final = float("inf")


class WorldProtocol:
    """One process's part in its world. ``begin``, then ``step`` again and again.
    ``on_met_or_failed``: called when all have met, or when that has failed."""

    def __init__(
        self,
        rank: int,
        world: int,
        liveness: float,
        *,
        sockets: Connections,
        clock: Callable[[], float] = time.monotonic,
        on_met_or_failed: Callable[[], None] = lambda: None,
        on_rekey: Callable[[], None] = lambda: None,
    ) -> None:
        self._rekey_hosts = on_rekey
        self.rank = rank
        self.world = world
        self.liveness = liveness
        self.ready = False
        """Whether the coordinator has heard every rank."""
        self.groups = GroupMessages()
        self.pulse: Callable[[int], float] = lambda rank: 0.0
        """Asks a rank's engine for a sign of life, and returns when the last one came."""
        self.note: Callable[[int, int, float], None] = lambda rank, state, heard: None
        """Has the status page say what is known of a rank: its state, and when it was heard."""
        self._clock = clock
        self._on_met_or_failed = on_met_or_failed
        self._sockets = sockets
        self._succession = Succession(rank, world)
        self._states = sockets.states = self._succession.states
        self._detector = FailureDetector(liveness, clock())
        self._detector.silence = SILENT_SHARE * max(liveness, MEETING_SECONDS)
        self._replay_log = ReplayLog(2 * liveness)
        self._foreign = 0
        self._welcomed: set[int] = set()
        self._unkeyed: set[int] = set()
        """Ranks to be told of new keys as soon as they are back, each over its new connection."""
        """At the coordinator its followers; at others the coordinator, once it has said so."""
        self._unsent: deque[Addressed] = deque()
        """Messages that wait for the next coordinator and aren't kept in ``_replay_log``."""
        self._heard_coordinator = 0.0
        """When anything last came over the connection with the coordinator."""
        self._renew_at = NEVER
        """When that connection is given up for a new one."""
        self._rekey_at = NEVER
        """When it begins again, so that it has new keys."""
        self._heartbeat_at = 0.0
        self._round_at = 0.0

    @property
    def foreign(self) -> int:
        """Messages dropped since they were malformed, without the token, or of no group here."""
        return self._sockets.foreign + self._foreign + self.groups.foreign

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def is_lost(self) -> bool:
        """True if the others have given this rank up."""
        return self._states.is_lost(self.rank)

    @property
    def in_doubt(self) -> bool:
        return self._detector.in_doubt

    @property
    def welcomed(self) -> frozenset[int]:
        """Ranks that this one reaches at once: the coordinator, or at it the others."""
        return frozenset(self._welcomed)

    @property
    def is_cut_off(self) -> bool:
        """True if nobody hears this one."""
        return self.is_lost or not self._welcomed

    @property
    def seeks_coordinator(self) -> bool:
        """True if what this rank says has to wait for a coordinator that answers."""
        succession = self._succession
        has_one = succession.is_coordinator or succession.coordinator in self._welcomed
        return self.ready and not has_one and not self.is_lost

    def is_here(self, rank: int) -> bool:
        return not self._succession.is_gone(rank)

    def begin(self) -> None:
        """Judges and connects from now on."""
        now = self._heard_coordinator = self._clock()
        self._watch(now, succeeds=False)
        self._sockets.follow(
            None if self._succession.is_coordinator else self._succession.coordinator, now
        )

    def broken(self, error: Exception) -> None:
        """The thread ends by ``error``: all groups hear of it."""
        for membership in self.groups:
            membership.listener.on_broken(error)

    def say_goodbye(self) -> None:
        """This process leaves the world in order."""
        body = pack(Left(self.rank))
        for rank in self._welcomed:
            self._sockets.send(rank, body)

    # ---- memberships ----

    def enter(self, membership: Membership) -> None:
        """Opens a membership: what has come for it before is delivered, then who is gone: a rank
        that has said goodbye since is no loss."""
        self.groups.open(membership)
        for rank in self._succession.lost:
            ended = self._states[rank] == RankState.ENDED
            membership.rank_lost(rank, self._detector.silence, ended=ended, proven=False)
        for rank in self._succession.left:
            membership.rank_lost(rank, 0.0, ended=True, proven=False)
        if self.is_lost:
            membership.rank_lost(self.rank, self._detector.silence, ended=False, proven=False)

    def leave(self, membership: Membership) -> None:
        self.groups.close(membership)

    def send(self, group: int, body: GroupMessage, to: Sequence[int]) -> None:
        """Sends a group's message to ranks of the world, by way of the coordinator."""
        others = [rank for rank in to if rank != self.rank]
        if not others:
            return
        message = Addressed(self.rank, bits(others), group, GROUP.plain(body))
        if self._succession.is_coordinator:
            self._relay(message)
            return
        if message.body[0] in REPLAYED:
            self._replay_log.note(message, self._clock())
        if self._succession.coordinator in self._welcomed:
            self._sockets.send(self._succession.coordinator, pack(message))
        elif message.body[0] not in REPLAYED and len(self._unsent) < MOST_WAITING:
            self._unsent.append(message)

    # ---- one turn ----

    @property
    def due(self) -> float:
        """When :meth:`step` is to be called at the latest, whether anything has come or not."""
        coordinator = self._succession.is_coordinator
        return min(self._detector.due, self._heartbeat_at) if coordinator else self._detector.due

    def step(self, events: Sequence[Event]) -> None:
        """One turn of the thread: what has come, what others want, what is due."""
        now = self._clock()
        for event in events:
            self._on_event(event, now)
        self._on_time(self._clock())

    def _on_time(self, now: float) -> None:
        """Does what is due: judging, the coordinator's heartbeat, and what memberships repeat."""
        interval = self._detector.interval
        if now >= self._detector.due or not self._succession.is_coordinator:
            found = self._detector.tick(now)
            for rank, seconds in found.silent.items():
                self._give_up(rank, seconds, ended=False)
            here = [rank for rank in found.late if not self._succession.is_gone(rank)]
            if self.ready:  # until then an engine's answer hides that control can't get through
                for rank in here:
                    self._detector.lives(rank, self.pulse(rank))
            self._sockets.ask(here, interval / 4, now)
            self._sockets.ask(found.doubtful, 0.0, now)
            self._sockets.tick(now, interval / 4)
            for rank, at in self._detector.heard_at.items():
                self.note(rank, RankState.PRESENT, at)
        if now >= min(self._renew_at, self._rekey_at):
            self._renew_at = self._rekey_at = NEVER
            self._welcomed.clear()
            self._sockets.follow(self._succession.coordinator, now)
        if self._succession.is_coordinator and now >= self._heartbeat_at:
            self._heartbeat_at = now + interval
            for rank in list(self._welcomed):
                self._sockets.send(rank, HEARTBEAT)
        if now >= self._round_at:
            self._round_at = now + 0.9 * interval
            for membership in self.groups:
                membership.on_round()

    # ---- what the sockets report ----

    def _on_event(self, event: Event, now: float) -> None:
        if isinstance(event, Received):
            self._detector.heard(event.rank, now)
            self._on_message(event.rank, event.message)
        elif isinstance(event, Connected):
            self._on_connected(event.rank)
        elif isinstance(event, Alive):
            self._detector.heard(event.rank, now)
            self._renew(event.rank, now)
        elif isinstance(event, RekeyAsked):
            self.rekey()
        elif isinstance(event, Broken):
            self._on_broken(event.rank, now)
        elif isinstance(event, Refused) and not self._succession.is_gone(event.rank):
            self._give_up(event.rank, 0.0, ended=True)

    def _on_connected(self, rank: int) -> None:
        self._welcomed.discard(rank)
        if rank == self._succession.coordinator:
            self._sockets.send(rank, pack(self._succession.follow()))

    def _on_broken(self, rank: int, now: float) -> None:
        self._welcomed.discard(rank)
        if not self._succession.is_gone(rank) and not self.is_lost:
            self._detector.suspect(rank, now)

    def _renew(self, rank: int, now: float) -> None:
        """The coordinator has answered over a new connection. If nothing comes over the old one
        soon, as after a cut, that isn't waited for."""
        interval = self._detector.interval
        if not self.ready:  # where the first one takes long, so would another
            return
        if rank == self._succession.coordinator and now - self._heard_coordinator > 2 * interval:
            self._renew_at = min(self._renew_at, now + interval / 4)

    # ---- messages ----

    def _on_message(self, rank: int, message: Message) -> None:
        if rank == self._succession.coordinator:
            self._heard_coordinator = self._clock()
            self._renew_at = NEVER
        if self._states.is_lost(rank):
            # It lives after all, but the others went on without it.
            if self._succession.is_coordinator:
                silent = round(self._detector.silence, 2)
                self._sockets.send(rank, pack(Dead(rank, silent, False)))
            return
        handle = _HANDLERS.get(type(message))
        try:
            if handle is None:
                raise Malformed(f"{message} isn't for a member's connection")
            handle(self, rank, message)
        except Malformed:
            self._foreign += 1

    def _from_coordinator(self, rank: int) -> None:
        if rank != self._succession.coordinator:
            raise Malformed(f"rank {rank} isn't the coordinator")

    def _on_heartbeat(self, rank: int, message: Heartbeat) -> None:
        if rank == self._succession.coordinator:
            self._sockets.send(rank, HEARTBEAT)

    def _on_follow(self, rank: int, message: Follow) -> None:
        """A rank takes this one for the coordinator."""
        now = self._clock()
        for gone in message.left:
            self._on_left(gone, Left(gone))
        news = [r for r in message.lost if r != self.rank and not self._succession.is_gone(r)]
        for lost in news:
            # A coordinator before gave it up, and didn't live to tell all.
            if self._succession.is_coordinator:
                self._give_up(lost, self._detector.silence, ended=lost in message.ended)
            else:
                self._detector.suspect(lost, now)
        if self._succession.is_coordinator and rank not in self._welcomed:
            self._welcome(rank)
            if not self.ready and len(self._welcomed) == self.world - 1:
                self._set_ready()
                for other in self._welcomed:
                    self._sockets.send(other, pack(Ready()))

    def _welcome(self, rank: int) -> None:
        """Tells a rank that is new here what it may have missed."""
        self._welcomed.add(rank)
        self._sockets.send(rank, pack(self._succession.welcome(ready=self.ready)))
        for message in self._replay_log.to(rank, self._clock()):
            self._sockets.send(rank, pack(message))
        self._tell_keys(rank)

    def _on_welcome(self, rank: int, message: Welcome) -> None:
        self._from_coordinator(rank)
        self._welcomed = {rank}
        if message.ready:
            self._set_ready()
        for gone in message.left:
            self._on_left(rank, Left(gone))
        for lost in message.lost:
            self._lose(lost, self._detector.silence, ended=lost in message.ended)
        if rank != self._succession.coordinator:
            return
        waiting, self._unsent = self._unsent, deque()
        for repeated in [*self._replay_log.of(self.rank, self._clock()), *waiting]:
            self._sockets.send(rank, pack(repeated))
        self._tell_keys(rank)
        for membership in self.groups:
            membership.on_round()

    def _on_ready(self, rank: int, message: Ready) -> None:
        self._from_coordinator(rank)
        self._set_ready()

    def _set_ready(self) -> None:
        self.ready = True
        self._detector.silence = SILENT_SHARE * self.liveness
        self._on_met_or_failed()

    def _on_dead(self, rank: int, message: Dead) -> None:
        self._from_coordinator(rank)
        self._lose(message.rank, message.silent, ended=message.ended)

    def _on_left(self, rank: int, message: Left) -> None:
        gone = message.rank
        if rank not in (gone, self._succession.coordinator):
            raise Malformed(f"rank {rank} says that {gone} has left")
        if not self._succession.leave(gone):
            return
        self._detector.forget(gone)
        self.note(gone, RankState.LEFT, 0.0)
        if self._succession.is_coordinator:
            self._welcomed.discard(gone)
            self._sockets.hang_up(gone)
            for other in self._welcomed:
                self._sockets.send(other, pack(message))
        for membership in self.groups:
            membership.rank_lost(gone, 0.0, ended=True, proven=True)
        self._follow()
        if not self.ready:
            self._on_met_or_failed()

    def _on_addressed(self, rank: int, message: Addressed) -> None:
        if self._succession.is_coordinator:
            if message.sender != rank:
                raise Malformed(f"rank {rank} sends in the name of rank {message.sender}")
            self._relay(message)
            return
        self._from_coordinator(rank)
        if message.body[0] not in REPLAYED or self._replay_log.note(message, self._clock()):
            self.groups.deliver(message)

    def _relay(self, message: Addressed) -> None:
        """At the coordinator: to others, and to this rank."""
        if message.body[0] in REPLAYED and not self._replay_log.note(message, self._clock()):
            return
        packed = pack(message)
        for rank in ranks_in(message.to):
            if rank in self._welcomed and rank != message.sender:
                self._sockets.send(rank, packed)
        if message.sender != self.rank and message.to >> self.rank & 1:
            self.groups.deliver(message)

    def rekey(self) -> None:
        """Has all processes seal with new keys, this one at once."""
        self._on_rekey(self.rank, Rekey())

    def _on_rekey(self, rank: int, message: Rekey) -> None:
        if rank != self.rank and not self._succession.is_coordinator:
            self._from_coordinator(rank)
        self._rekey_hosts()
        if not self._succession.is_coordinator:  # once what is said here has been sent
            self._rekey_at = self._clock() + self._detector.interval / 4
        is_coordinator, coordinator = self._succession.is_coordinator, self._succession.coordinator
        told = set(range(self.world)) if is_coordinator else {coordinator}
        self._unkeyed |= told - self._welcomed - {self.rank, rank}
        for other in self._welcomed - {rank}:
            self._sockets.send(other, pack(message))

    def _tell_keys(self, rank: int) -> None:
        if rank in self._unkeyed:
            self._unkeyed.discard(rank)
            self._sockets.send(rank, pack(Rekey()))

    # ---- ranks that are lost ----

    def _give_up(self, rank: int, silent: float, *, ended: bool) -> None:
        """This rank is sure that ``rank`` is lost; the coordinator's word is the others'."""
        if self._succession.is_gone(rank) or self.is_lost:
            return
        if self._succession.is_coordinator:
            told = pack(Dead(rank, round(silent, 2), ended))
            for other in self._welcomed:
                self._sockets.send(other, told)
        self._lose(rank, silent, ended=ended)

    def _lose(self, rank: int, silent: float, *, ended: bool) -> None:
        if rank == self.rank:
            self._states.move(rank, RankState.LOST)
            self._renew_at = self._rekey_at = NEVER
            self._sockets.follow(None, self._clock())
            self._detector.watch((), self._clock(), expected=0, pause=self.liveness)
        elif not self._succession.lose(rank, ended=ended):
            return
        if rank != self.rank:
            self.note(rank, self._states[rank], 0.0)
        proven = ended and not self._detector.in_doubt
        self._detector.forget(rank)
        for membership in self.groups:
            membership.rank_lost(rank, silent, ended=ended, proven=proven)
        self._follow()
        if not self.ready:
            self._on_met_or_failed()

    def _follow(self) -> None:
        """If the coordinator is no more, the lowest rank takes its place."""
        if self.is_lost or not self._succession.succeed():
            return
        now = self._clock()
        self._heard_coordinator = now
        self._renew_at = self._rekey_at = NEVER
        self._watch(now, succeeds=True)
        if not self._succession.is_coordinator:
            self._welcomed = set()
            self._sockets.follow(self._succession.coordinator, now)
            return
        self._sockets.follow(None, now)
        self._welcomed = set()
        self._heartbeat_at = now
        for rank in list(self._sockets.members):
            if not self._succession.is_gone(rank):
                self._detector.heard(rank, now)
                self._welcome(rank)
        for membership in self.groups:
            membership.on_round()

    def _watch(self, now: float, *, succeeds: bool) -> None:
        """The coordinator judges all, the others the coordinator. ``succeeds``: it is a new one."""
        interval = self._detector.interval
        expected = self.world if succeeds else 0
        if self._succession.is_coordinator:
            others = self._succession.others
            self._detector.watch(others, now, expected=expected, pause=interval)
        else:
            coordinator = (self._succession.coordinator,)
            # A little longer, so that the heartbeat wakes this one and no timer has to.
            self._detector.watch(coordinator, now, expected=expected, pause=1.25 * interval)


_HANDLERS: Final[dict[type, Callable[[WorldProtocol, int, Any], None]]] = {
    Heartbeat: WorldProtocol._on_heartbeat,
    Follow: WorldProtocol._on_follow,
    Welcome: WorldProtocol._on_welcome,
    Ready: WorldProtocol._on_ready,
    Dead: WorldProtocol._on_dead,
    Left: WorldProtocol._on_left,
    Rekey: WorldProtocol._on_rekey,
    Addressed: WorldProtocol._on_addressed,
}
