"""Control plane of one process as a state machine, driven by events and by the time.

It belongs to one thread and never blocks: :meth:`WorldProtocol.step` is given what the sockets
report, and is called again at :attr:`WorldProtocol.due`. Messages go to one handler per type, by a
table. docs/control.md has the protocol.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from lossycoll.runtime.control.schema import Malformed

from . import connections, messages
from .connections import Connections, Event
from .failure_detector import SILENT_SHARE, FailureDetector
from .membership import GroupMessages, Membership
from .messages import GROUP, REPLAYED, Addressed, Message, bits, pack, ranks_in
from .rank_states import RankState, Succession

MEETING_SECONDS: Final = 10.0
"""For which ranks may be silent before all have met, where liveness is shorter: a process that
starts is slow, and one that ends meanwhile is refused at once."""
MOST_REPLAYED: Final = 4096
NEVER: Final = float("inf")


class ReplayLog:
    """Messages that are said once, kept while (``seconds``) a coordinator may have died with them:
    the next one hears them again from their senders, and tells all that connect what it has."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._kept: OrderedDict[tuple[int, int, str], tuple[float, Addressed]] = OrderedDict()

    def note(self, message: Addressed, now: float) -> bool:
        """Keeps ``message``. False: it is known."""
        key = message.sender, message.group, repr(message.body)
        if key in self._kept:
            return False
        self._prune(now)
        self._kept[key] = now, message
        return True

    def kept(self, now: float) -> list[Addressed]:
        """The messages, oldest first."""
        self._prune(now)
        return [message for _, message in self._kept.values()]

    def _prune(self, now: float) -> None:
        while self._kept:
            at, _ = next(iter(self._kept.values()))
            if now - at <= self._seconds and len(self._kept) < MOST_REPLAYED:
                return
            self._kept.popitem(last=False)


@dataclass(eq=False)
class WorldProtocol:
    """One process's part in its world. ``begin``, then ``step`` again and again."""

    rank: int
    world: int
    liveness: float
    _: KW_ONLY
    sockets: Connections
    clock: Callable[[], float]
    on_met_or_failed: Callable[[], None]  # called when all have met, or when that has failed
    on_rekey: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.ready = False
        """Whether the coordinator has heard every rank."""
        self.groups = GroupMessages()
        self.pulse: Callable[[int], float] = lambda rank: 0.0
        """Asks a rank's engine for a sign of life, and returns when the last one came."""
        self.note: Callable[[int, int, float], None] = lambda rank, state, heard: None
        """Has the status page say what is known of a rank: its state, and when it was heard."""
        self.states = self.sockets.states = Succession(self.world, self.rank)
        meeting = SILENT_SHARE * max(self.liveness, MEETING_SECONDS)
        self._detector = FailureDetector(self.liveness, meeting, self.clock())
        self._replay_log = ReplayLog(2 * self.liveness)
        self._foreign = 0
        self.welcomed: set[int] = set()
        """Ranks that this one reaches at once: at the coordinator its followers; at others the
        coordinator, once it has said so."""
        self._unkeyed: set[int] = set()
        """Ranks to be told of new keys as soon as they are back, each over its new connection."""
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
        return self.sockets.foreign + self._foreign + self.groups.foreign

    @property
    def is_lost(self) -> bool:
        """True if the others have given this rank up."""
        return self.states.is_lost(self.rank)

    @property
    def in_doubt(self) -> bool:
        return self._detector.in_doubt

    @property
    def seeks_coordinator(self) -> bool:
        """True if what this rank says has to wait for a coordinator that answers."""
        has_one = self.states.is_coordinator or self.states.coordinator in self.welcomed
        return self.ready and not has_one and not self.is_lost

    def begin(self) -> None:
        """Judges and connects from now on."""
        now = self._heard_coordinator = self.clock()
        self._watch(now, succeeds=False)
        self.sockets.follow(None if self.states.is_coordinator else self.states.coordinator, now)

    def say_goodbye(self) -> None:
        """This process leaves the world in order."""
        self._tell(messages.Left(self.rank), self.welcomed)

    def _tell(self, message: Message, ranks: Iterable[int]) -> None:
        body = pack(message)
        for rank in ranks:
            self.sockets.send(rank, body)

    # ---- memberships ----

    def enter(self, membership: Membership) -> None:
        """Opens a membership: what has come for it before is delivered, then who is gone: a rank
        that has said goodbye since is no loss."""
        self.groups.open(membership)
        for rank in sorted(self.states.lost):
            ended = self.states[rank] == RankState.ENDED
            membership.rank_lost(rank, self._detector.silence, ended=ended, proven=False)
        for rank in sorted(self.states.left):
            membership.rank_lost(rank, 0.0, ended=True, proven=False)
        if self.is_lost:
            membership.rank_lost(self.rank, self._detector.silence, ended=False, proven=False)

    def send(self, group: int, body: messages.GroupMessage, to: Sequence[int]) -> None:
        """Sends a group's message to ranks of the world, by way of the coordinator. While there is
        none, those are lost that their senders repeat in any case."""
        others = [rank for rank in to if rank != self.rank]
        if not others:
            return
        message = Addressed(self.rank, bits(others), group, GROUP.plain(body))
        if self.states.is_coordinator:
            self._relay(message)
            return
        if message.body[0] in REPLAYED:
            self._replay_log.note(message, self.clock())
        if self.states.coordinator in self.welcomed:
            self.sockets.send(self.states.coordinator, pack(message))

    # ---- one turn ----

    @property
    def due(self) -> float:
        """When :meth:`step` is to be called at the latest, whether anything has come or not."""
        coordinator = self.states.is_coordinator
        return min(self._detector.due, self._heartbeat_at) if coordinator else self._detector.due

    def step(self, events: Sequence[Event]) -> None:
        """One turn of the thread: what has come, what others want, what is due."""
        now = self.clock()
        for event in events:
            self._on_event(event, now)
        self._on_time(self.clock())

    def _on_time(self, now: float) -> None:
        """Does what is due: judging, the coordinator's heartbeat, and what memberships repeat."""
        interval = self._detector.interval
        if now >= self._detector.due or not self.states.is_coordinator:
            found = self._detector.tick(now)
            for rank, seconds in found.silent.items():
                self._give_up(rank, seconds, ended=False)
            here = [rank for rank in found.late if not self.states.is_gone(rank)]
            if self.ready:  # until then an engine's answer hides that control can't get through
                for rank in here:
                    self._detector.lives(rank, self.pulse(rank))
            self.sockets.ask(here, interval / 4, now)
            self.sockets.ask(found.doubtful, 0.0, now)
            self.sockets.tick(now, interval / 4)
            for rank, at in self._detector.heard_at.items():
                self.note(rank, RankState.PRESENT, at)
        if now >= min(self._renew_at, self._rekey_at):
            self._renew_at = self._rekey_at = NEVER
            self.welcomed.clear()
            self.sockets.follow(self.states.coordinator, now)
        if self.states.is_coordinator and now >= self._heartbeat_at:
            self._heartbeat_at = now + interval
            self._tell(messages.Heartbeat(), self.welcomed)
        if now >= self._round_at:
            self._round_at = now + 0.9 * interval
            for membership in self.groups:
                membership.on_round()

    # ---- what the sockets report ----

    def _on_event(self, event: Event, now: float) -> None:
        if isinstance(event, connections.Received):
            self._detector.heard(event.rank, now)
            self._on_message(event.rank, event.message)
        elif isinstance(event, connections.Connected):
            self.welcomed.discard(event.rank)
            if event.rank == self.states.coordinator:
                self._tell(messages.Follow(*self.states.sets()), [event.rank])
        elif isinstance(event, connections.Alive):
            self._detector.heard(event.rank, now)
            self._renew(event.rank, now)
        elif isinstance(event, connections.RekeyAsked):
            self.rekey()
        elif isinstance(event, connections.Broken):
            self.welcomed.discard(event.rank)
            if not self.states.is_gone(event.rank) and not self.is_lost:
                self._detector.suspect(event.rank, now)
        elif isinstance(event, connections.Refused) and not self.states.is_gone(event.rank):
            self._give_up(event.rank, 0.0, ended=True)

    def _renew(self, rank: int, now: float) -> None:
        """The coordinator has answered over a new connection. If nothing comes over the old one
        soon, as after a cut, that isn't waited for."""
        interval = self._detector.interval
        if not self.ready:  # where the first one takes long, so would another
            return
        if rank == self.states.coordinator and now - self._heard_coordinator > 2 * interval:
            self._renew_at = min(self._renew_at, now + interval / 4)

    # ---- messages ----

    def _on_message(self, rank: int, message: Message) -> None:
        is_coordinators = rank == self.states.coordinator
        if is_coordinators:
            self._heard_coordinator = self.clock()
            self._renew_at = NEVER
        if self.states.is_lost(rank):
            # It lives after all, but the others went on without it.
            if self.states.is_coordinator:
                self._tell(messages.Dead(rank, round(self._detector.silence, 2), False), [rank])
            return
        handle = _HANDLERS.get(type(message))
        try:
            if handle is None or (type(message) in _COORDINATORS and not is_coordinators):
                raise Malformed(f"{message} isn't for rank {rank} to say")
            handle(self, rank, message)
        except Malformed:
            self._foreign += 1

    def _on_heartbeat(self, rank: int, message: messages.Heartbeat) -> None:
        if rank == self.states.coordinator:
            self._tell(message, [rank])

    def _on_follow(self, rank: int, message: messages.Follow) -> None:
        """A rank takes this one for the coordinator."""
        now = self.clock()
        for gone in message.left:
            self._on_left(gone, messages.Left(gone))
        news = [r for r in message.lost if r != self.rank and not self.states.is_gone(r)]
        for lost in news:
            # A coordinator before gave it up, and didn't live to tell all.
            if self.states.is_coordinator:
                self._give_up(lost, self._detector.silence, ended=lost in message.ended)
            else:
                self._detector.suspect(lost, now)
        if self.states.is_coordinator and rank not in self.welcomed:
            self._welcome(rank)
            if not self.ready and len(self.welcomed) == self.world - 1:
                self._set_ready()
                self._tell(messages.Ready(), self.welcomed)

    def _welcome(self, rank: int) -> None:
        """Tells a rank that is new here what it may have missed."""
        self.welcomed.add(rank)
        self._tell(messages.Welcome(*self.states.sets(), self.ready), [rank])
        for message in self._replay_log.kept(self.clock()):
            if message.sender != rank and message.to >> rank & 1:
                self._tell(message, [rank])
        self._tell_keys(rank)

    def _on_welcome(self, rank: int, message: messages.Welcome) -> None:
        self.welcomed = {rank}
        if message.ready:
            self._set_ready()
        for gone in message.left:
            self._on_left(rank, messages.Left(gone))
        for lost in message.lost:
            self._lose(lost, self._detector.silence, ended=lost in message.ended)
        if rank != self.states.coordinator:
            return
        for repeated in self._replay_log.kept(self.clock()):
            if repeated.sender == self.rank:
                self._tell(repeated, [rank])
        self._tell_keys(rank)
        for membership in self.groups:
            membership.on_round()

    def _set_ready(self) -> None:
        self.ready = True
        self._detector.silence = SILENT_SHARE * self.liveness
        self.on_met_or_failed()

    def _on_left(self, rank: int, message: messages.Left) -> None:
        gone = message.rank
        if rank not in (gone, self.states.coordinator):
            raise Malformed(f"rank {rank} says that {gone} has left")
        if not self.states.leave(gone):
            return
        if self.states.is_coordinator:
            self.welcomed.discard(gone)
            self.sockets.hang_up(gone)
            self._tell(message, self.welcomed)
        self._continue_without(gone, 0.0, ended=True, proven=True)

    def _on_addressed(self, rank: int, message: Addressed) -> None:
        if self.states.is_coordinator:
            if message.sender != rank:
                raise Malformed(f"rank {rank} sends in the name of rank {message.sender}")
            self._relay(message)
        elif rank != self.states.coordinator:
            raise Malformed(f"rank {rank} isn't the coordinator")
        elif message.body[0] not in REPLAYED or self._replay_log.note(message, self.clock()):
            self.groups.deliver(message)

    def _relay(self, message: Addressed) -> None:
        """At the coordinator: to others, and to this rank."""
        if message.body[0] in REPLAYED and not self._replay_log.note(message, self.clock()):
            return
        others = [rank for rank in ranks_in(message.to) if rank != message.sender]
        self._tell(message, [rank for rank in others if rank in self.welcomed])
        if message.sender != self.rank and message.to >> self.rank & 1:
            self.groups.deliver(message)

    def rekey(self) -> None:
        """Has all processes seal with new keys, this one at once."""
        self._on_rekey(self.rank, messages.Rekey())

    def _on_rekey(self, rank: int, message: messages.Rekey) -> None:
        told = set(range(self.world))
        if not self.states.is_coordinator:
            told = {self.states.coordinator}
            if rank not in (self.rank, self.states.coordinator):
                raise Malformed(f"rank {rank} isn't the coordinator")
            # Once what is said here has been sent.
            self._rekey_at = self.clock() + self._detector.interval / 4
        self.on_rekey()
        self._unkeyed |= told - self.welcomed - {self.rank, rank}
        self._tell(message, self.welcomed - {rank})

    def _tell_keys(self, rank: int) -> None:
        if rank in self._unkeyed:
            self._unkeyed.discard(rank)
            self._tell(messages.Rekey(), [rank])

    # ---- ranks that are lost ----

    def _give_up(self, rank: int, silent: float, *, ended: bool) -> None:
        """This rank is sure that ``rank`` is lost; the coordinator's word is the others'."""
        if self.states.is_gone(rank) or self.is_lost:
            return
        if self.states.is_coordinator:
            self._tell(messages.Dead(rank, round(silent, 2), ended), self.welcomed)
        self._lose(rank, silent, ended=ended)

    def _lose(self, rank: int, silent: float, *, ended: bool) -> None:
        if rank == self.rank:
            self.states.move(rank, RankState.LOST)
            self._renew_at = self._rekey_at = NEVER
            self.sockets.follow(None, self.clock())
            self._detector.watch((), self.clock(), expected=0, pause=self.liveness)
        elif not self.states.lose(rank, ended=ended):
            return
        proven = ended and not self._detector.in_doubt
        self._continue_without(rank, silent, ended=ended, proven=proven)

    def _continue_without(self, rank: int, silent: float, *, ended: bool, proven: bool) -> None:
        if rank != self.rank:
            self.note(rank, self.states[rank], 0.0)
        self._detector.forget(rank)
        for membership in self.groups:
            membership.rank_lost(rank, silent, ended=ended, proven=proven)
        self._follow()
        if not self.ready:
            self.on_met_or_failed()

    def _follow(self) -> None:
        """If the coordinator is no more, the lowest rank takes its place."""
        if self.is_lost or not self.states.succeed():
            return
        now = self.clock()
        self._heard_coordinator = now
        self._renew_at = self._rekey_at = NEVER
        self._watch(now, succeeds=True)
        self.welcomed = set()
        if not self.states.is_coordinator:
            self.sockets.follow(self.states.coordinator, now)
            return
        self.sockets.follow(None, now)
        self._heartbeat_at = now
        for rank in list(self.sockets.members):
            if not self.states.is_gone(rank):
                self._detector.heard(rank, now)
                self._welcome(rank)
        for membership in self.groups:
            membership.on_round()

    def _watch(self, now: float, *, succeeds: bool) -> None:
        """The coordinator judges all, the others the coordinator. ``succeeds``: it is a new one."""
        interval = self._detector.interval
        expected = self.world if succeeds else 0
        if self.states.is_coordinator:
            others = self.states.others
            self._detector.watch(others, now, expected=expected, pause=interval)
        else:
            coordinator = (self.states.coordinator,)
            # A little longer, so that the heartbeat wakes this one and no timer has to.
            self._detector.watch(coordinator, now, expected=expected, pause=1.25 * interval)


_HANDLERS: Final[dict[type, Callable[[WorldProtocol, int, Any], None]]] = {
    messages.Heartbeat: WorldProtocol._on_heartbeat,
    messages.Follow: WorldProtocol._on_follow,
    messages.Welcome: WorldProtocol._on_welcome,
    messages.Ready: lambda self, rank, message: self._set_ready(),
    messages.Dead: lambda self, rank, dead: self._lose(dead.rank, dead.silent, ended=dead.ended),
    messages.Left: WorldProtocol._on_left,
    messages.Rekey: WorldProtocol._on_rekey,
    Addressed: WorldProtocol._on_addressed,
}
_COORDINATORS: Final = frozenset({messages.Welcome, messages.Ready, messages.Dead})
"""Messages that nobody but the coordinator may send."""
