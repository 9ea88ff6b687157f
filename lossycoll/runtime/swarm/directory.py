"""Directory of a swarm: its peers and the groups that they form, as a state machine without
sockets.

Peers sit in the cells of a grid (plan/grid.py). A peer that is ready waits for the others of its
row, those that live and haven't averaged in this round yet. How long is learnt from each peer's
earlier rounds: from what it took from the begin of a round until it was ready for the next. No wait
for others counts in that, or waits would make waits. All is soft state: a peer that comes back says
what it had.

Long because who is there, what they average and which rounds begin decide on one another.
"""

from __future__ import annotations

import bisect
import secrets
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

import numpy as np

from lossycoll.plan.grid import Cells, Grid
from lossycoll.plan.rng import key_of
from lossycoll.runtime.control.schema import Address

from . import directory_tables as tables
from . import protocol
from .directory_tables import GridRow, Peer, Placement, split
from .protocol import MOST_DIRECTORIES, MOST_EPOCH, MOST_PEERS, START

LEASE: Final = 10.0  # seconds without a sign of life after which a peer is lost
FIRST_GRACE, PATIENCE, MOST_GRACE = 5.0, 1.0, 60.0
"""Seconds that late peers are waited for: of whom few rounds are known, beyond what earlier rounds
teach, and beyond their longest round."""
LATE: Final = 1.5  # a peer may take so many times its longest of the latest rounds
SETTLE: Final = 2.0
"""Seconds in which those come that another directory knew, after the first of them."""
COME: Final = 5.0
"""And in which all come that live: they may have tried directories that don't answer before."""
MOST_ROUND: Final = 1 << 40  # further than that nobody can have come
GROUP_SIZE: Final = 32  # peers in a group at most, where the grid isn't given


class Directory:
    """The peers of a swarm. ``shape``: the grid's; empty: it follows the number of peers. ``most``:
    peers in a group at most, where it does. ``patience``: seconds that late peers are waited for
    beyond what earlier rounds teach. ``session``: 16 hex digits that name the swarm's packets;
    empty: drawn. OptionError: a row of the grid is too long for a group."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        shape: Sequence[int] = (),
        most: int = GROUP_SIZE,
        patience: float = PATIENCE,
        session: str = "",
    ) -> None:
        self._clock = clock
        self._patience = patience
        self._settled: float | None = None
        """When all should be here that another directory knew; None: nobody came from one."""
        self._shape, self._most = tuple(shape), most
        self._placement = Placement(shape, most)
        self._dirty = tables.DirtyQueue()
        self.session = session or secrets.token_hex(8)
        self._seed = int(self.session, 16)
        self._has_settled = False
        self._standby = False
        self._took_over = False
        """There may be peers that another directory knew, and this one doesn't."""
        self.epoch = 0
        """One more than the latest of another directory whose peers this one has taken over."""
        self._joins_until = clock()
        """Time until which peers of a yielded directory report their progress."""
        self._came = 0
        self._formed = secrets.randbits(32)
        self.peers: dict[int, Peer] = {}
        self._rounds = tables.Rounds()
        self._named: dict[str, int] = {}
        self._averaging: dict[int, Peer] = {}
        """Peers that have announced their tensors, or a draft, of one schema."""
        self._able: dict[int, Peer] = {}  # peers of these that have announced all of it
        self._waiting: set[int] = set()  # peers to answer once more have announced the same
        self._progress = tables.Progress()
        self._too_late: dict[int, Peer] = {}
        """Peers ready for a round by samples that began without them."""
        self._have_averaged: set[int] = set()  # numbers of those that have been in a group
        self._serve: list[tuple[int, int, Address]] = []
        """Standby directories: first those that listen, in the order in which their peers came,
        then those that peers would open, in the order of the peers' numbers."""
        self._ids = tables.IdAllocator(clock)
        self._seen_until = clock() + LEASE  # nobody's lease runs out before
        self._unreachable = tables.UnreachablePairs(clock)
        self._donors = tables.Donors(self._unreachable)

    @property
    def grid(self) -> Grid:
        return self._placement.grid

    # ---- who is there ----

    def is_again(self, wanted: protocol.Join) -> bool:
        """True if a connected peer has reconnected: the same process, by the same number."""
        here = self.peers.get(wanted.number)
        if here is None or (here.name, self.session) != (wanted.name, wanted.session):
            return False
        return here.incarnation[:START] == wanted.incarnation[:START]

    def holder(self, name: str) -> Peer | None:
        return self.peers.get(self._named.get(name, MOST_PEERS))

    def join(self, wanted: protocol.Join) -> protocol.Joined | protocol.Refused:
        others = len(self.peers)
        if wanted.name in self._named:
            return protocol.Refused(f"a peer named {wanted.name!r} is there; choose another name")
        if not self.free:
            return protocol.Refused(f"the swarm is full: {others} peers")
        came_before = wanted.number < MOST_PEERS
        if came_before and wanted.session != self.session and not others:
            self.adopt(wanted.session)
        if came_before and wanted.session != self.session:
            reason = "others have begun a swarm here meanwhile; start again to join it"
            return protocol.Refused(reason)
        if self._settled is None and (came_before or self._standby):
            self._settled = self._clock() + (0.0 if others else SETTLE)
            self._took_over = self._standby or not others
            self._standby = False
        if came_before:
            first = self._took_over and self._is_settling()
            self.epoch = min(MOST_EPOCH, max(self.epoch, wanted.epoch + first))
        # Those that another directory knew may still come: so few as possible find theirs taken.
        draw = key_of(self._seed, self._came) if self._took_over else None
        number = self._ids.take(wanted.number, wanted.name, draw)
        # Those that another directory knew say how far they were, as long as it is new here.
        new = came_before and (self._is_settling() or not others)
        known = min(wanted.round, MOST_ROUND) if new else 0
        if known > self._rounds.least:
            for other in self.peers.values():
                if not other.group:
                    self._rounds.move(other, max(other.round, known))
            self._note_all()
        if came_before and self._clock() < self._joins_until:
            self._reach(wanted.round)
        latest = self.round
        peer = Peer(
            number=number,
            name=wanted.name,
            incarnation=wanted.incarnation,
            seen=self._clock(),
            came=self._came,
            came_back=came_before,
            began=self._clock(),
            skipped=came_before or bool(self._have_averaged),
        )
        self._rounds.move(peer, max(latest, known))
        self._came += 1
        self.peers[number] = peer
        self._named[peer.name] = number
        if self._placement.come(
            peer, lambda turn: key_of(self._seed, peer.number, peer.round, turn)
        ):
            self._note_all()
        self._note(peer)
        return protocol.Joined(peer.number, self.session, peer.round, LEASE, self.epoch)

    def adopt(self, session: str) -> None:
        """This directory is to take over a swarm's peers. Nobody is here, maybe nobody any more."""
        self.session, self._seed = session, int(session, 16)
        self._standby, self._settled, self._took_over = True, None, False
        self._has_settled = False

    def _is_settling(self) -> bool:
        return self._settled is not None and self._clock() < self._settled

    def has_just_settled(self) -> bool:
        """True if all have just come whose directory this one has taken over, or had the time to.
        Once; of those that turn here meanwhile, some may still be with the directory before."""
        if self._has_settled or not self._took_over or self._settled is None:
            return False
        due = max(self._settled - SETTLE + COME, self._joins_until)
        self._has_settled = self._clock() >= due
        return self._has_settled

    def here(self, number: int, place: protocol.Here) -> None:
        self.peers[number].place = place
        self._note(self.peers[number])

    def serves(self, number: int, said: protocol.Serves) -> None:
        peer = self.peers[number]
        self._serves_no_more(peer)
        peer.serves = said.spare, number if said.spare else peer.came, (said.host, said.port)
        bisect.insort(self._serve, peer.serves)

    def _serves_no_more(self, peer: Peer) -> None:
        if peer.serves is not None:
            del self._serve[bisect.bisect_left(self._serve, peer.serves)]

    def directories(self) -> tuple[Address, ...]:
        return tuple(place for _, _, place in self._serve[:MOST_DIRECTORIES])

    def averages(self, number: int, wanted: protocol.Averages) -> protocol.Agreed | None:
        """A peer says what it averages: all average the same. None: it is answered later."""
        peer = self.peers[number]
        some = (*islice(self._able.values(), 2), *islice(self._averaging.values(), 2))
        other = next((one for one in some if one is not peer), None)
        if other is not None and other.said is not None:
            if differ := protocol.difference(wanted, other.said):
                return protocol.Agreed(
                    f"you average something else than {other.name!r}: {differ}; the same model, "
                    f"shapes, settings and options on all peers"[:4096]
                )
            if other.said.wire != wanted.wire:
                return protocol.Agreed(
                    f"your packets carry {wanted.wire!r}, and those of {other.name!r} "
                    f"{other.said.wire!r}: the same wire= and options LOSSYCOLL_WIRE... and "
                    f"LOSSYCOLL_LINK on all peers"
                )
        elif wanted.grid:
            if reason := self._placement.set_grid(wanted.grid, len(self.peers)):
                return protocol.Agreed(reason)
            self._note_all()
        schema = "" if wanted.draft else wanted.schema
        if schema and not peer.schema:
            # By samples nobody has waited for it, so none of their rounds has skipped it.
            if peer.skipped or wanted.target:  # it hasn't been in the rounds that others have had
                self._rounds.move(peer, self.round)
                peer.came_late = bool(self._have_averaged)
            if not self._able:
                self._progress.target = wanted.target
            peer.skipped = False
        if schema != peer.schema:
            peer.began = self._clock()
        peer.said, peer.schema = wanted, schema
        self._averaging[number] = peer
        self._waiting.add(number)
        if schema:
            self._able[number] = peer
        else:
            self._able.pop(number, None)
        self._note(peer)
        return protocol.Agreed("") if number in self.agreed([number]) else None

    def agreed(self, of: Sequence[int] | None = None) -> list[int]:
        """Return the peers to answer now, since as many as they wait for have said the same.
        ``of``: which of those that wait; None: any."""
        out = []
        for number in list(self._waiting) if of is None else of:
            wanted, count = self.peers[number].said, len(self._averaging)
            assert wanted is not None
            if wanted.peers > 1 and not wanted.draft:
                count = sum(one.schema == wanted.schema for one in self._able.values())
            if wanted.peers <= count:
                self._waiting.discard(number)
                out.append(number)
        return out

    def names(self) -> tuple[str, ...]:
        return tuple(peer.name for _, peer in sorted(self.peers.items()))

    def beat(self, number: int) -> None:
        self.peers[number].seen = self._clock()

    def lost(self, number: int) -> list[tuple[int, str]]:
        """A peer has gone, in whatever way. Returns whom to tell, those that it has exchanged
        packets with last, and which incarnation of it is over."""
        peer = self.peers.pop(number, None)
        if peer is None:
            return []
        self._ids.give_back(number, peer.name)
        del self._named[peer.name]
        for table in (self._averaging, self._able, self._too_late):
            table.pop(number, None)
        self._waiting.discard(number)
        self._progress.lost(peer, self._averaging.values())
        self._have_averaged.discard(number)
        self._unreachable.forget(number)
        self._donors.lost(number)
        self._serves_no_more(peer)
        self._note(peer)
        if self._placement.leave(peer):
            self._note_all()
        self._rounds.leave(peer)
        others = sorted({*peer.group, *peer.partners} & self.peers.keys())
        for other in others:
            self.peers[other].partners.discard(number)
        if not self.peers:
            self._begin_anew()
        return [(other, peer.incarnation) for other in others]

    def _begin_anew(self) -> None:
        """Nobody is left: whoever comes next may begin another training. Those that come back, or
        have a checkpoint, say how far they were, and on which grid."""
        self._progress = tables.Progress()
        self._placement = Placement(self._shape, self._most)
        self._note_all()

    def report_unreachable(self, number: int, incarnations: Sequence[str]) -> int:
        """A peer finds no route to others. It can say so of those alone of whom it was told last.
        Returns of how many it has."""
        peer = self.peers[number]
        others = ({*peer.group, *peer.partners} - {number}) & self.peers.keys()
        found = [one for one in others if self.peers[one].incarnation in incarnations]
        for other in found:
            self._unreachable.note(number, other)
        return len(found)

    def overdue(self) -> list[int]:
        now = self._clock()
        if now <= self._all_live_until():
            return []
        return [peer.number for peer in self.peers.values() if now - peer.seen > LEASE]

    def _all_live_until(self) -> float:
        """Nobody's lease runs out before. All are looked at only when that may be now."""
        now = self._clock()
        if now > self._seen_until:
            self._seen_until = min((one.seen for one in self.peers.values()), default=now) + LEASE
        return self._seen_until

    # ---- beside another directory of the swarm (partition_merge.py) ----

    @property
    def round(self) -> int:
        """The one that the furthest peer averages in next."""
        return self._rounds.furthest

    @property
    def free(self) -> int:
        room = min(MOST_PEERS, self.grid.cells) if self._placement.fixed else MOST_PEERS
        return max(0, room - len(self.peers))

    def takes(self, number: int, seconds: float) -> None:
        """Peers of another directory come, which are to have the round ``number`` next: for so many
        seconds they may say how far they were."""
        self._joins_until = self._clock() + seconds
        self._reach(number)

    def _reach(self, number: int) -> None:
        """Rounds go on from this one, if nobody here is as far: all, along the same axes."""
        axes = len(self.grid.shape)
        missing = min(number, MOST_ROUND) - self.round
        if self.peers and missing > 0:
            for peer in self.peers.values():
                self._rounds.move(peer, peer.round - (-missing // axes) * axes)
            self._note_all()

    def tell_all(self) -> None:
        self._placement.clear()
        self._dirty.clear()
        for peer in self.peers.values():
            peer.told = True

    # ---- rounds ----

    def ready(self, number: int, weight: float) -> None:
        """A peer has something to average. Said again, it counts anew."""
        peer = self.peers[number]
        if not peer.schema:
            return  # it hasn't said what
        if peer.weight is None:
            peer.ready_at = self._clock()
            if peer.group and not peer.skipped:
                peer.took.append(peer.ready_at - peer.began)
        peer.weight, peer.skipped = weight, False
        if self._progress.target and weight and not peer.due:
            self._too_late[number] = peer
        if weight and peer.cell >= 0:  # others may go on waiting for it, and begin no sooner
            axis = self.grid.axis(peer.round)
            self._dirty.mark([self._placement.row_of(peer.cell, axis)])
        else:
            self._note(peer)

    def due(self) -> list[int]:
        if self._is_settling() or not self._progress.falls_due():
            return []
        for peer in self._able.values():
            peer.due = True
        return list(self._able)

    def form(self) -> list[protocol.Group]:
        """The groups whose rounds begin now. What has changed since the last call is looked at, or
        whose time has come: of a swarm of thousands, a row or two."""
        out: list[protocol.Group] = []
        if self._is_settling():
            return out
        for peer in self._progress.told():
            out.append(self._group(peer.round, [peer], newer=peer.behind))
            peer.weight = None
        late, self._too_late = list(self._too_late.values()), {}
        placed = (peer for peer in late if peer.is_ready and peer.cell >= 0)
        out += [self._alone(peer) for peer in placed if not peer.due]
        while rows := self._dirty.take(self._clock()):
            for row in rows:
                out += self._looked_at(row)
        return out

    def _looked_at(self, row: GridRow) -> list[protocol.Group]:
        """The group of a row whose round begins now, of those along it the earliest."""
        peers = self._placement.on(row)
        rounds = {(one.round, one.schema) for one in peers if one.is_ready and not one.behind}
        times = []
        for number, schema in sorted(rounds):
            if self.grid.axis(number) != row.axis:
                continue
            due = [one for one in peers if one.round <= number and self._may_be_in(one, schema)]
            here = [one for one in due if one.is_ready and one.round == number]
            here += [one for one in due if one.is_ready and not one.weight and one not in here]
            counts = [one.ready_at for one in here if one.weight]
            late = [one for one in due if one not in here]
            others = any(one.schema == schema and one not in here for one in peers)
            if not counts and (late or (others and self._progress.target)):
                continue  # newcomers, who bring nothing
            if any(one.is_ready for one in late):
                continue  # for an earlier round: they will have had it soon
            until = max((self._awaited_until(one, min(counts)) for one in late), default=0.0)
            if not late or self._clock() >= until:
                return self._begin(number, here, due, peers)
            times.append(until)
        self._dirty.schedule(row, min(times, default=None))
        return []

    def _may_be_in(self, peer: Peer, schema: str) -> bool:
        """True if a peer may be in a round of a schema. One that hasn't said what it averages may,
        as long as others wait for it. By samples nobody waits for one that hasn't been told."""
        if peer.behind or (self._progress.target and not peer.due and not peer.is_ready):
            return False
        return (peer.schema or ("" if peer.skipped else schema)) == schema

    def is_needed(self, name: str) -> bool:
        """True if peers haven't had all the rounds yet that this one has, who is about to leave
        with the directory: by another one they wouldn't meet as they would by this."""
        own = self.holder(name)
        if own is None or own.told or self._progress.target:
            return False
        others = (one for one in self._able.values() if one.schema == own.schema)
        return any(one.round < own.round and not one.skipped and not one.behind for one in others)

    def _note(self, peer: Peer) -> None:
        """Something of a peer has changed by which groups may form."""
        if peer.cell >= 0:
            self._dirty.mark(self._placement.rows_of(peer.cell))

    def _note_all(self) -> None:
        """Nothing that was known of the rows holds any more."""
        self._dirty.clear()
        for peer in self._placement.placed():
            if peer.is_ready:
                self._note(peer)

    def _awaited_until(self, peer: Peer, first: float) -> float:
        """Time until which others wait for a peer that isn't ready, of whom one is since
        ``first``."""
        if peer.skipped:
            return first
        longest = max(peer.took, default=0.0)
        until = peer.began + min(LATE * longest, longest + MOST_GRACE) + self._patience
        if len(peer.took) < tables.KNOWN:  # the next may well be longer than a few were
            grace = self._patience if peer.came_late else max(FIRST_GRACE, self._patience)
            until = max(until, max(first, peer.began) + grace)
        return until

    def wakes(self) -> float | None:
        """When :meth:`form` or :meth:`overdue` may say something new by itself, on the clock."""
        now = self._clock()
        is_settling = self._settled is not None and self._settled > now
        times = [self._settled if is_settling else self._dirty.wakes(now)]
        times += [self._all_live_until()] if self.peers else []
        return min((at for at in times if at is not None), default=None)

    def _begin(
        self, number: int, here: Sequence[Peer], due: Sequence[Peer], row: Sequence[Peer]
    ) -> list[protocol.Group]:
        """One group, or several without pairs that can't reach each other."""
        numbers = [peer.number for peer in here]
        groups = [numbers]
        if self._unreachable.concerns(numbers):
            groups = split(numbers, self._unreachable, lambda one: key_of(self._seed, number, one))
        self._move(number, row)
        # Owners' own values always count, so others own each part of the values in each round: a
        # peer moves to the place of the part that it owns.
        for group in groups:
            group.sort(key=lambda one: self.peers[one].cell)
        self._progress.begin(here)
        out = []
        for group in groups:
            absent = [
                (one.name, _why_absent(one, number, numbers))
                for one in row
                if one.number not in group
            ]
            out.append(self._group(number, [self.peers[one] for one in group], absent))
        for peer in due:
            self._rounds.move(peer, number + 1)
            peer.skipped, peer.due = True, False
        for group in groups:
            for peer in (self.peers[n] for n in group):
                peer.weight, peer.skipped, peer.began = None, False, self._clock()
                peer.came_late = False
                peer.group = tuple(group)
            self._have_averaged.update(group)
        return out

    def _alone(self, peer: Peer) -> protocol.Group:
        """For one whose round has begun without it: it goes on by itself, and waits for nobody."""
        row = self._placement.on(self._placement.row_of(peer.cell, self.grid.axis(peer.round)))
        absent = [(one.name, protocol.ELSEWHERE) for one in row if one is not peer]
        self._progress.begin([peer])
        group = self._group(max(0, peer.round - 1), [peer], absent)
        peer.weight, peer.began = None, self._clock()
        return group

    def _move(self, number: int, row: Sequence[Peer]) -> None:
        """Move the peers of a row to their next cells. Both rows of each may then form groups."""
        cells: Cells = np.array([peer.cell for peer in row], np.int64)
        for peer in row:
            self._note(peer)
        self._placement.move(row, self.grid.moved(cells, number, self._seed))
        for peer in row:
            self._note(peer)

    def _group(
        self,
        number: int,
        peers: Sequence[Peer],
        absent: Sequence[tuple[str, int]] = (),
        newer: int = 0,
    ) -> protocol.Group:
        members, samples = tuple(one.member for one in peers), self._progress.samples
        named = number, self._number_of_group()
        return protocol.Group(*named, members, tuple(absent), samples, newer)

    def _number_of_group(self) -> int:
        self._formed += 1
        return int(key_of(self._seed, self._formed) >> 33) + 1

    # ---- states ----

    def offers(self, number: int, said: protocol.Offers) -> None:
        peer = self.peers[number]
        was_behind = peer.behind
        self._donors.offers(peer, bool(said.has))
        self._progress.report(peer, said, self._averaging.values())
        if was_behind and not peer.behind:
            # While it took the newer state, rounds went on without it. In an earlier one than the
            # others' it would meet nobody, and would have to take the state once more.
            others = [p.round for p in self._averaging.values() if p is not peer and not p.behind]
            self._rounds.move(peer, max(peer.round, min(others, default=peer.round)))
        self._note(peer)

    def seeks(self, number: int, donors: int) -> None:
        self._donors.seeks(self.peers[number], donors)

    def transfers(self) -> list[tuple[int, list[protocol.Transfer]]]:
        """Return the transfers to tell each joiner that seeks a state. As long as peers of another
        directory may come, none."""
        out: list[tuple[int, list[protocol.Transfer]]] = []
        for joiner, most in () if self._is_settling() else self._donors.asked():
            drawn = self._number_of_group()
            chosen = self._donors.choose(joiner, most, drawn)
            numbered = [(self._number_of_group(), (one.member, joiner.member)) for one in chosen]
            out.append((joiner.number, [protocol.Transfer(*one) for one in numbered]))
        return out


def _why_absent(peer: Peer, number: int, there: Sequence[int]) -> int:
    if peer.behind:
        return protocol.OLDER
    if peer.number in there:
        return protocol.OUT_OF_REACH
    if not peer.schema:
        return protocol.SILENT
    return protocol.ELSEWHERE if peer.round > number else protocol.LATE_AGAIN
