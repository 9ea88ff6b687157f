"""One group on the control plane: its members, who has left or is lost, and what is said in it.

A membership translates between the ranks of the group, which its listener knows, and those of the
world, which the plane knows. Liveness and death are the plane's; abort, goodbye, mismatch, figures
and views are the group's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from lossycoll.errors import ClosedError
from lossycoll.runtime.control.schema import Malformed

from . import messages
from .comparison import difference
from .failure_detector import SILENT_SHARE
from .messages import GROUP, GroupMessage, View
from .rank_states import RankState, Survivors

if TYPE_CHECKING:
    from .control_plane import ControlPlane

MOST_EARLY: Final = 1024
"""Messages kept for groups that aren't open here yet."""
MOST_ENDED: Final = 4096
"""Groups that are remembered as over."""


class Listener(Protocol):
    """Listener of a group to the control plane. Called from its thread: must be quick, never raise.

    The last three only where the group outlives a rank. ``on_lost`` stops submitting, and returns
    the number of the next operation; ``on_views`` continues if ``agreed``. After ``on_broken`` the
    thread ends; what is posted within still goes out. ``on_round`` comes a few times per liveness.
    """

    def on_dead(self, rank: int, silent: float, ended: bool) -> None: ...
    def on_abort(self, rank: int, reason: str, kind: str) -> None: ...
    def on_bye(self, rank: int, seq: int, why: str) -> None: ...
    def on_mismatch(self, seq: int, calls: dict[int, str]) -> None: ...
    def on_differs(self, how: str) -> None: ...
    def on_own_host(self, rank: int, options: Mapping[str, Any]) -> None: ...
    def on_broken(self, error: Exception) -> None: ...
    def on_round(self) -> object: ...
    def call_at(self, seq: int) -> str | None: ...
    def stats(self) -> dict[str, Any]: ...
    def on_lost(self, rank: int, silent: float, ended: bool) -> int: ...
    def on_views(self, views: Sequence[View], agreed: bool) -> None: ...
    def on_no_quorum(self, lost: Sequence[int], remaining: Sequence[int]) -> None: ...


@dataclass(eq=False)
class Membership:
    """This rank's place in one group. ``open``, then the rest; ``leave`` and ``close`` at the end.
    ClosedError: the plane is ending."""

    plane: ControlPlane  # lasts as long as one of its memberships
    group: int  # a number of 64 bits, which no other group of the world ever has
    members: Sequence[int]  # the group's ranks, as ranks of the world, in the group's order
    _: KW_ONLY
    outlive: bool = False  # whether the group continues without ranks that are lost
    # What this rank takes the group for; None: nobody compares it
    definition: messages.Defined | None = None

    def __post_init__(self) -> None:
        self._router = self.plane.protocol
        self._ranks = {process: rank for rank, process in enumerate(self.members)}
        self.rank = self._ranks[self.plane.rank]
        self.listener: Listener = _NOBODY
        if not self.plane.hold():
            raise ClosedError("the control plane of this process is ending")
        self._held = True
        # The rest belongs to the plane's thread, apart from plain reads.
        self._states = Survivors(self.rank, len(self.members), self.plane.liveness)
        self._silence = SILENT_SHARE * self.plane.liveness
        self._has_stopped = False
        """Whether this rank doesn't go on, since too few are left or they couldn't agree."""
        self._differs = False
        self._missed: set[int] = set()
        """Ranks that others need, whose goodbye may not have come yet."""
        self._stats: dict[int, dict[str, Any]] = {}
        self._asked: set[int] = set()
        self._fresh = threading.Event()

    # ---- any thread ----

    @property
    def foreign(self) -> int:
        return self._router.foreign

    def open(self, listener: Listener, *, wait: bool = True) -> None:
        """Has the plane tell ``listener``, first (``wait``: at once) of what has come before."""
        self.listener = listener
        run = self.plane.call if wait else self.plane.post
        run(lambda: self._router.enter(self))

    def abort(self, reason: str, kind: str) -> None:
        self._post(messages.Abort(reason, kind))

    def waiting(self, seq: int, call: str) -> None:
        """Asks all ranks whether they mean the same by call number ``seq``."""
        self._post(messages.Waiting(seq, call, self._digest))

    def own_host(self, options: Mapping[str, Any]) -> None:
        self._post(messages.OwnHost(dict(options)))

    def missed(self, rank: int) -> None:
        """``rank`` has left, and is needed: a group that outlives ranks continues without it."""
        self._post(messages.Missed(rank))
        self.plane.post(lambda: self._on_missed(self.rank, messages.Missed(rank)))

    def leave(self, seq: int, why: str = "") -> None:
        """Says goodbye to all ranks; ``seq``: the last call issued, ``why``: this rank's error."""
        self.plane.post(lambda: self._send(messages.Bye(seq, why, self.listener.stats())))

    def group_stats(self, timeout: float = 2.0) -> dict[int, dict[str, Any]]:
        """The counters of each rank, asked for now; of a rank that doesn't answer within
        ``timeout`` s what it answered last, if anything."""
        self._fresh.clear()
        self.plane.post(self._ask)
        self._fresh.wait(timeout)
        return {rank: dict(found) for rank, found in sorted(dict(self._stats).items())}

    def last_stats(self) -> dict[int, dict[str, Any]]:
        """The counters that other ranks have told last, when they were asked or with goodbye."""
        return {rank: dict(each) for rank, each in dict(self._stats).items() if rank != self.rank}

    def close(self) -> None:
        """Ends the membership, the last one the plane. Idempotent. No listener is called later."""
        self.plane.call(lambda: self._router.groups.close(self))
        self.listener = _NOBODY
        if self._held:
            self._held = False
            self.plane.release()

    def _post(self, body: GroupMessage) -> None:
        self.plane.post(lambda: self._send(body))

    # ---- the plane's thread ----

    def take(self, process: int, packed: list[Any]) -> None:
        """A message from a rank of the world. Malformed: it is none, or not from a member."""
        sender = self._ranks.get(process)
        message = GROUP.read(packed, len(self.members))
        if isinstance(message, messages.Waiting) and message.digest != self._digest:
            self._define(process)
        elif isinstance(message, messages.Defined):
            self._on_defined(process, message)
        elif sender is None:
            raise Malformed(f"rank {process} of the world is no member")
        elif not (self.outlive and self._states.is_lost(sender)):
            _HANDLERS[type(message)](self, sender, message)

    def rank_lost(self, process: int, silent: float, *, ended: bool, proven: bool) -> None:
        """The plane has lost a rank of the world; ``proven``: its process has surely ended."""
        rank = self._ranks.get(process)
        if rank is None:
            return
        self._answered(rank)
        if rank == self.rank:
            self.listener.on_dead(rank, silent, False)
        elif not self._states.is_present(rank):
            return
        elif not (self.outlive and self._router.ready):
            self.outlive = False  # the group fails before all have met
            self._states.lose(rank, ended=ended)
            self.listener.on_dead(rank, silent, ended)
        else:
            self._lose(rank, silent, ended=ended, proven=proven)

    def on_round(self) -> None:
        """Repeats messages, a few times per liveness and when the coordinator has changed."""
        self.listener.on_round()
        if self._asked:  # the question may have gone with a coordinator
            self._send(messages.Ask(), sorted(self._asked))
        if self.outlive and not self._states.agreed:
            self._agree()

    def _send(self, body: GroupMessage, to: Sequence[int] | None = None) -> None:
        """``to``: ranks of the group; None: all."""
        ranks = range(len(self.members)) if to is None else to
        self._router.send(self.group, body, [self.members[rank] for rank in ranks])

    # ---- figures ----

    def _ask(self) -> None:
        self._stats[self.rank] = self.listener.stats()
        others = self._states.ranks(RankState.PRESENT) - {self.rank}
        self._asked = others
        if others:
            self._send(messages.Ask(), sorted(others))
        else:
            self._fresh.set()

    def _on_ask(self, sender: int, message: messages.Ask) -> None:
        self._send(messages.Answer(self.listener.stats()), [sender])

    def _on_answer(self, sender: int, message: messages.Answer) -> None:
        self._stats[sender] = dict(message.stats)
        self._answered(sender)

    def _answered(self, rank: int) -> None:
        if rank in self._asked:
            self._asked.discard(rank)
            if not self._asked:
                self._fresh.set()

    # ---- calls, aborts, goodbyes ----

    def _on_abort(self, sender: int, message: messages.Abort) -> None:
        if self._states.is_present(sender):
            self._states.move(sender, RankState.ABORTED)
            self.listener.on_abort(sender, message.reason, message.kind)

    def _on_bye(self, sender: int, message: messages.Bye) -> None:
        if self._states[sender] == RankState.LEFT:
            return
        self._states.move(sender, RankState.LEFT)
        self._stats[sender] = dict(message.stats)
        self._answered(sender)
        self.listener.on_bye(sender, message.seq, message.why)
        if self.outlive and sender in self._missed:
            self._lose(sender, 0.0, ended=True, proven=True)
        elif self.outlive and not self._states.agreed:
            self._agree()

    def _on_waiting(self, sender: int, message: messages.Waiting) -> None:
        mine = self.listener.call_at(message.seq)
        if mine is not None and mine != message.call:
            self._send(messages.Mismatch(message.seq, mine, sender, message.call))
            self.listener.on_mismatch(message.seq, {self.rank: mine, sender: message.call})

    def _on_mismatch(self, sender: int, message: messages.Mismatch) -> None:
        calls = {sender: message.call, message.rank: message.other}
        self.listener.on_mismatch(message.seq, calls)

    # ---- what ranks take the group for ----

    @property
    def _digest(self) -> int:
        return 0 if self.definition is None else self.definition.digest

    def _define(self, process: int) -> None:
        """Tells a rank of the world, which may be no member here, this one's definition."""
        if self.definition is not None:
            self._router.send(self.group, self.definition, [process])

    def _on_defined(self, process: int, message: messages.Defined) -> None:
        if self.definition is None:
            return
        if not 0 <= message.rank < len(message.members):
            raise Malformed(f"rank {message.rank} of {len(message.members)}")
        how = difference(self.definition, message)
        if how and not self._differs:
            self._differs = True
            self._define(process)
            self.listener.on_differs(how)

    def _on_own_host(self, sender: int, message: messages.OwnHost) -> None:
        self.listener.on_own_host(sender, message.options)

    # ---- a group that outlives ranks ----

    def _on_missed(self, sender: int, message: messages.Missed) -> None:
        if not self.outlive or message.rank == self.rank:
            return
        self._missed.add(message.rank)
        if self._states[message.rank] == RankState.LEFT:
            self._lose(message.rank, 0.0, ended=True, proven=True)

    def _lose(self, rank: int, silent: float, *, ended: bool, proven: bool) -> None:
        if self._has_stopped or not self._states.lose(rank, ended=proven):
            return
        self._answered(rank)
        self._states.stopped(self.listener.on_lost(rank, silent, ended), self._router.clock())
        self._agree()

    def _agree(self) -> None:
        """Tells the proposer where this rank stands; it decides when it knows that of all."""
        states = self._states
        if self._has_stopped or states.agreed:
            return
        for rank in states.remaining:
            if states[rank] == RankState.LEFT:  # it can't be asked any more
                self._lose(rank, 0.0, ended=True, proven=True)
                return
        if states.must_stop(self._router.clock()):
            self._has_stopped = True
            self.listener.on_no_quorum(sorted(states.lost), states.remaining)
        elif states.proposer != self.rank:
            self._send(self._state(), [states.proposer])
        elif states.decide() is not None:
            self._send(messages.ViewChange(states.views), states.remaining)
            self.listener.on_views(states.views, states.agreed)

    def _state(self) -> messages.State:
        lost, ended, _ = self._states.sets()
        return messages.State(lost, ended, self._states.next, self._states.views)

    def _on_state(self, sender: int, message: messages.State) -> None:
        states = self._states
        if not self.outlive or self._has_stopped:
            return
        self._learn(message.views)
        states.report(sender, message.lost, message.next)
        for rank in message.lost:
            if not states.is_lost(rank):  # another proposer's verdict, which died with it
                ended = rank in message.ended
                proven = ended and not self._router.in_doubt
                self._lose(rank, self._silence, ended=ended, proven=proven)
        if states.agreed:  # the sender has missed the verdict
            self._send(messages.ViewChange(states.views), [sender])
            return
        if not states.lost <= set(message.lost):
            self._send(self._state(), [sender])
        self._agree()

    def _on_view_change(self, sender: int, message: messages.ViewChange) -> None:
        if not self.outlive or self._has_stopped:
            return
        if self.rank not in message.views[-1].members:
            self.listener.on_dead(self.rank, 0.0, False)
        else:
            self._learn(message.views)

    def _learn(self, views: Sequence[View]) -> None:
        states = self._states
        if len(views) <= len(states.views) or self.rank not in views[-1].members:
            return
        for rank in set(states.views[-1].members) - set(views[-1].members) - states.lost:
            states.lose(rank, ended=False)
            states.stopped(self.listener.on_lost(rank, self._silence, False), self._router.clock())
        if states.learn(views):
            self.listener.on_views(states.views, states.agreed)


class GroupMessages:
    """The groups that are open here. Messages for those that aren't yet are kept.

    ``foreign`` counts what was malformed or, of too much that came early, the oldest.
    """

    def __init__(self) -> None:
        self.foreign = 0
        self._open: dict[int, Membership] = {}
        self._early: deque[messages.Addressed] = deque()
        self._ended: OrderedDict[int, None] = OrderedDict()

    def __iter__(self) -> Iterator[Membership]:
        """The groups that are open, of which some may end meanwhile."""
        return iter(list(self._open.values()))

    def open(self, group: Membership) -> None:
        """From now on ``group`` takes its messages, those that came early first."""
        self._open[group.group] = group
        for message in [one for one in self._early if one.group == group.group]:
            self._early.remove(message)
            self._hand(group, message)

    def close(self, group: Membership) -> None:
        """``group`` takes no more messages, whether it was open or not. Idempotent."""
        self._open.pop(group.group, None)
        self._early = deque(one for one in self._early if one.group != group.group)
        self._ended[group.group] = None
        if len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)

    def deliver(self, message: messages.Addressed) -> None:
        """A message that has come for one of this rank's groups."""
        group = self._open.get(message.group)
        if group is not None:
            self._hand(group, message)
        elif message.group not in self._ended:
            self._early.append(message)
            if len(self._early) > MOST_EARLY:
                self._early.popleft()
                self.foreign += 1

    def _hand(self, group: Membership, message: messages.Addressed) -> None:
        try:
            group.take(message.sender, message.body)
        except Malformed:
            self.foreign += 1


class _Nobody:
    """The listener of a membership that isn't open, or is over."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_: None


_NOBODY: Final[Any] = _Nobody()
_HANDLERS: Final[dict[type, Callable[[Membership, int, Any], None]]] = {
    messages.Abort: Membership._on_abort,
    messages.Bye: Membership._on_bye,
    messages.Waiting: Membership._on_waiting,
    messages.OwnHost: Membership._on_own_host,
    messages.Mismatch: Membership._on_mismatch,
    messages.Missed: Membership._on_missed,
    messages.Ask: Membership._on_ask,
    messages.Answer: Membership._on_answer,
    messages.State: Membership._on_state,
    messages.ViewChange: Membership._on_view_change,
}
