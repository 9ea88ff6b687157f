"""Who is in a swarm, and who meets whom: a state machine without sockets.

Peers sit in the cells of a grid (plan/grid.py). A peer that is ready waits for the others of its
line, those that live and haven't averaged in this round yet. How long is learnt from each peer's
earlier rounds: from what it took from the begin of a round until it was ready for the next. No wait
for others counts in that, or waits would make waits. All is soft state: a peer that comes back says
what it had.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from lossycoll.plan.grid import Cells, Grid, fitting, parse
from lossycoll.plan.rng import key_of

from .apart import Apart, split
from .peer import Peer
from .protocol import (
    MOST_DIRECTORIES,
    MOST_EPOCH,
    PLACES,
    START,
    VERSION,
    Agreed,
    Averages,
    Group,
    Here,
    Join,
    Joined,
    Loan,
    Refused,
)

LEASE: Final = 10.0
"""Seconds without a sign of life after which a peer is lost."""
FIRST_GRACE, PATIENCE, MOST_GRACE = 5.0, 1.0, 60.0
"""Seconds that late peers are waited for: of whom no round is known, beyond what earlier rounds
teach, and beyond their longest round."""
LATE: Final = 1.5
"""A peer may take so many times its longest of the latest rounds."""
KEPT_SECONDS: Final = 60.0
"""For which a peer that was lost finds its number free when it comes again."""
SETTLE: Final = 2.0
"""Seconds in which those come that another directory knew, after the first of them."""
COME: Final = 5.0
"""And in which all come that live: they may have tried directories that don't answer before."""
MOST_ROUND: Final = 1 << 40
"""Further than that nobody can have come."""
MOST_CELLS: Final = 1 << 16
GROUP_SIZE: Final = 32
"""Peers in a group at most, where the grid isn't given."""


class Directory:
    """The peers of a swarm.

    Args:
        clock: In seconds.
        shape: The grid's; empty: it follows the number of peers.
        most: Peers in a group at most, where it does.
        patience: Seconds that late peers are waited for beyond what earlier rounds teach.
        session: 16 hex digits that name the swarm's packets; empty: drawn.
    """

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
        self._fixed = bool(shape)
        self._most = most
        self.grid = Grid(tuple(shape) or (1,))
        self.session = session or secrets.token_hex(8)
        self._seed = int(self.session, 16)
        self._has_settled = False
        self._standby = False
        self._took_over = False
        """There may be peers that another directory knew, and this one doesn't."""
        self.epoch = 0
        """One more than the latest of another directory whose peers this one has taken over."""
        self._joins_until = clock()
        """Until then peers of a directory that has yielded say how far they were."""
        self._came = 0
        self._formed = secrets.randbits(32)
        self.peers: dict[int, Peer] = {}
        self._former: dict[int, tuple[str, float]] = {}
        """Whose the numbers were of peers that have gone, and until when they aren't given away."""
        self._apart = Apart(clock)
        self.unfounded = 0
        """Times that a peer was said to be out of reach by one that has nothing to do with it."""

    # ---- who is there ----

    def is_again(self, wanted: Join) -> bool:
        """Whether a peer that is here still has come anew: the same process, by the same number."""
        here = self.peers.get(wanted.number)
        same = here is not None and here.name == wanted.name
        same = same and here is not None and here.coming[:START] == wanted.coming[:START]
        return same and wanted.session == self.session

    def join(self, wanted: Join) -> Joined | Refused:
        """A peer comes, or comes back."""
        if wanted.version != VERSION:
            return Refused(f"this directory speaks version {VERSION}, and you {wanted.version}")
        others = list(self.peers.values())
        for other in others:
            if other.name == wanted.name:
                return Refused(f"a peer named {wanted.name!r} is there; choose another name")
        if len(others) >= (min(PLACES, self.grid.cells) if self._fixed else PLACES):
            return Refused(f"the swarm is full: {len(others)} peers")
        came_before = wanted.number < PLACES
        if came_before and wanted.session != self.session and not others:
            self.adopt(wanted.session)
        if came_before and wanted.session != self.session:
            return Refused("others have begun a swarm here meanwhile; start again to join it")
        if self._settled is None and (came_before or self._standby):
            self._settled = self._clock() + (0.0 if others else SETTLE)
            self._took_over = self._standby or not others
            self._standby = False
        if came_before:
            first = self._took_over and self._is_settling()
            self.epoch = min(MOST_EPOCH, max(self.epoch, wanted.epoch + first))
        number = self._number_for(wanted)
        # Those that another directory knew say how far they were, as long as it is new here.
        new = came_before and (self._is_settling() or not others)
        known = min(wanted.round, MOST_ROUND) if new else 0
        for other in others:
            other.round = max(other.round, known) if not other.group else other.round
        if came_before and self._clock() < self._joins_until:
            self._reach(wanted.round)
        latest = self.round
        peer = Peer(
            number=number,
            name=wanted.name,
            coming=wanted.coming,
            round=max(latest, known),
            seen=self._clock(),
            came=self._came,
        )
        self._came += 1
        self.peers[number] = peer
        self._seat(peer)
        return Joined(peer.number, self.session, peer.round, LEASE, self.epoch)

    def adopt(self, session: str) -> None:
        """This directory is to take over a swarm's peers. Nobody is here, maybe nobody any more."""
        self.session, self._seed = session, int(session, 16)
        self._standby, self._settled, self._took_over = True, None, False
        self._has_settled = False

    def _number_for(self, wanted: Join) -> int:
        """Another one than the peer has, if that is another's by now."""
        free = set(range(PLACES)) - self.peers.keys()
        if wanted.number in free:
            return wanted.number
        now = self._clock()
        kept = {
            n for n, (name, until) in self._former.items() if now < until and name != wanted.name
        }
        places = sorted(free - kept) or sorted(free)
        if not self._took_over:
            return places[0]
        # Those that another directory knew may still come: so few as possible find theirs taken.
        return places[key_of(self._seed, self._came) % len(places)]

    def _is_settling(self) -> bool:
        return self._settled is not None and self._clock() < self._settled

    def settles(self) -> bool:
        """Whether all have just come whose directory this one has taken over, or had the time to.
        Once; of those that turn here meanwhile, some may still be with the directory before."""
        if self._has_settled or not self._took_over or self._settled is None:
            return False
        due = max(self._settled - SETTLE + COME, self._joins_until)
        self._has_settled = self._clock() >= due
        return self._has_settled

    def here(self, number: int, place: Here) -> None:
        """Where a peer's packets come from."""
        self.peers[number].place = place

    def serves(self, number: int, place: tuple[str, int]) -> None:
        """A peer has a directory of its own."""
        self.peers[number].serves = place

    def spare(self, number: int, place: tuple[str, int]) -> None:
        """A peer opens a directory there if all others have gone."""
        self.peers[number].spare = place

    def directories(self) -> tuple[tuple[str, int], ...]:
        """Whom to turn to in turn, the same for all peers."""
        peers = sorted(self.peers.values(), key=lambda one: one.came)
        found = [peer.serves for peer in peers if peer.serves is not None]
        spare = [peer for peer in peers if peer.spare is not None and peer.serves is None]
        spare.sort(key=lambda one: one.number)
        return tuple((found + [one.spare for one in spare if one.spare])[:MOST_DIRECTORIES])

    def averages(self, number: int, wanted: Averages) -> Agreed:
        """A peer says what it averages: all average the same."""
        peer = self.peers[number]
        others = [one for one in self.peers.values() if one.schema and one is not peer]
        differs = next((one for one in others if one.schema != wanted.schema), None)
        if differs is not None:
            return Agreed(
                f"you average something else than {differs.name!r} (schema {wanted.schema}, "
                f"wanted {differs.schema}): the same model, shapes and options on all peers"
            )
        other = next((one for one in others if one.wire != wanted.wire), None)
        if other is not None:
            return Agreed(
                f"your packets carry {wanted.wire!r}, and those of {other.name!r} {other.wire!r}: "
                f"the same wire= and options LOSSYCOLL_WIRE... on all peers"
            )
        if wanted.grid and not others:
            try:
                grid = parse(wanted.grid)
            except ValueError as error:
                return Agreed(str(error)[:200])
            if grid.cells > MOST_CELLS:
                return Agreed(f"a grid of {grid} has more than {MOST_CELLS} cells")
            if len(self.peers) > grid.cells:
                return Agreed(f"{len(self.peers)} peers don't fit into a grid of {grid}")
            self._set_grid(grid)
            self._fixed = True
        if not peer.schema:  # it hasn't been in the rounds that others have had
            peer.round = max([peer.round, *(one.round for one in others)])
            peer.came_late = any(one.group for one in others)
        peer.schema, peer.wire, peer.rate = wanted.schema, wanted.wire, wanted.rate
        peer.began = self._clock()
        return Agreed("")

    def names(self) -> tuple[str, ...]:
        """Of all peers, in order of their numbers."""
        return tuple(peer.name for _, peer in sorted(self.peers.items()))

    def beat(self, number: int) -> None:
        """A sign of life."""
        self.peers[number].seen = self._clock()

    def lost(self, number: int) -> list[tuple[int, str]]:
        """A peer has gone, in whatever way. Returns whom to tell, those that it has exchanged
        packets with last, and which coming of it is over."""
        peer = self.peers.pop(number, None)
        if peer is None:
            return []
        self._former[number] = peer.name, self._clock() + KEPT_SECONDS
        self._apart.forget(number)
        self._regrid()
        others = sorted({*peer.group, *peer.partners} & self.peers.keys())
        for other in others:
            self.peers[other].partners.discard(number)
        return [(other, peer.coming) for other in others]

    def unmet(self, number: int, comings: Sequence[str]) -> int:
        """A peer finds no route to others. It can say so of those alone of whom it was told last.
        Returns of how many it has."""
        peer = self.peers[number]
        others = ({*peer.group, *peer.partners} - {number}) & self.peers.keys()
        found = [one for one in others if self.peers[one].coming in comings]
        for other in found:
            self._apart.note(number, other)
        self.unfounded += len(set(comings)) - len(found)
        return len(found)

    def overdue(self) -> list[int]:
        """Peers whose lease has run out."""
        now = self._clock()
        return [peer.number for peer in self.peers.values() if now - peer.seen > LEASE]

    # ---- beside another directory of the swarm (reunion.py) ----

    @property
    def round(self) -> int:
        """The one that the furthest peer averages in next."""
        return max((peer.round for peer in self.peers.values()), default=0)

    @property
    def free(self) -> int:
        """How many more peers there is room for."""
        room = min(PLACES, self.grid.cells) if self._fixed else PLACES
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
                peer.round += -(-missing // axes) * axes

    def tell_all(self) -> None:
        """All that are here are to turn to another directory."""
        for peer in self.peers.values():
            peer.told, peer.cell = True, -1

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

    def form(self) -> list[Group]:
        """The groups whose rounds begin now."""
        now, out = self._clock(), []
        if self._is_settling():
            return []
        for peer in sorted(self.peers.values(), key=lambda one: (one.round, one.number)):
            if not peer.is_ready or peer.told:
                continue
            line = self._line(peer)
            due = [one for one in line if one.round <= peer.round and one.schema]
            here = [one for one in due if one.is_ready and one.round == peer.round]
            here += [one for one in due if one.is_ready and not one.weight and one not in here]
            counts = [one.ready_at for one in here if one.weight]
            if not counts:
                continue  # newcomers, who bring nothing
            first = min(counts)
            late = [one for one in due if one not in here]
            # Those that are ready for an earlier round will have had it soon.
            if any(one.is_ready or now < self._awaited_until(one, first) for one in late):
                continue
            out += self._begin(peer.round, here, due, line)
        return out

    def _awaited_until(self, peer: Peer, first: float) -> float:
        """How long others wait for a peer that isn't ready, of whom one is since ``first``."""
        if peer.skipped:
            return first
        if not peer.took:
            grace = self._patience if peer.came_late else max(FIRST_GRACE, self._patience)
            return max(first, peer.began) + grace
        longest = max(peer.took)
        return peer.began + min(LATE * longest, longest + MOST_GRACE) + self._patience

    def wakes(self) -> float | None:
        """When :meth:`form` or :meth:`overdue` may say something new by itself, on the clock."""
        now = self._clock()
        ready = [peer.ready_at for peer in self.peers.values() if peer.is_ready]
        times = [peer.seen + LEASE for peer in self.peers.values()]
        for peer in self.peers.values():
            if ready and peer.schema and not peer.is_ready and not peer.told:
                ends = {self._awaited_until(peer, first) for first in ready}
                times += [end for end in ends if end > now]
        if self._settled is not None and self._settled > now:
            times.append(self._settled)
        return min(times, default=None)

    def _begin(
        self, number: int, here: Sequence[Peer], due: Sequence[Peer], line: Sequence[Peer]
    ) -> list[Group]:
        """One group, or several without pairs that can't reach each other."""
        groups = split(
            [peer.number for peer in here],
            self._apart,
            lambda one: key_of(self._seed, number, one),
        )
        cells: Cells = np.array([peer.cell for peer in line], np.int64)
        for peer, cell in zip(line, self.grid.moved(cells, number, self._seed), strict=True):
            peer.cell = int(cell)
        # Owners' own values always count, so others own each part of the values in each round: a
        # peer moves to the place of the part that it owns.
        for group in groups:
            group.sort(key=lambda one: self.peers[one].cell)
        out = [
            Group(number, self._number_of_group(), tuple(self.peers[n].member for n in group))
            for group in groups
        ]
        for peer in due:
            peer.round = number + 1
            peer.skipped = True
        for group in groups:
            for peer in (self.peers[n] for n in group):
                peer.weight, peer.skipped, peer.began = None, False, self._clock()
                peer.group = tuple(group)
        return out

    def _number_of_group(self) -> int:
        self._formed += 1
        return int(key_of(self._seed, self._formed) >> 33) + 1

    # ---- states ----

    def offers(self, number: int, has: bool) -> None:
        """Whether a peer has a state for newcomers."""
        self.peers[number].offers = has

    def seeks(self, number: int, lenders: int) -> None:
        """A newcomer wants a state, of so many peers at most."""
        self.peers[number].seeks = lenders

    def lends(self) -> list[tuple[int, list[Loan]]]:
        """Whom to answer that seeks a state, and with what. As long as those may come that another
        directory knew, nobody."""
        if self._is_settling():
            return []
        found = [peer for peer in self.peers.values() if peer.seeks and not peer.told]
        return [(peer.number, self._loans(peer)) for peer in found]

    def _loans(self, taker: Peer) -> list[Loan]:
        """Of those that have come furthest, others each time."""
        number, lenders, taker.seeks = taker.number, taker.seeks, 0
        if taker.place is None or not taker.schema:
            return []
        found = [
            one
            for one in self.peers.values()
            if one is not taker and one.offers and one.place and one.schema == taker.schema
        ]
        found = [one for one in found if not self._apart(one.number, number)]
        self._formed += 1
        found.sort(key=lambda one: (-one.round, key_of(self._seed, self._formed, one.number)))
        lent = found[:lenders]
        for one in lent:
            one.partners.add(number)
        taker.partners.update(one.number for one in lent)
        return [Loan(self._number_of_group(), (one.member, taker.member)) for one in lent]

    # ---- the grid ----

    def _line(self, peer: Peer) -> list[Peer]:
        """Those that sit on the line along which a peer averages next, in order of their cells."""
        axis = self.grid.axis(peer.round)
        own = self.grid.line(np.array([peer.cell], np.int64), axis)[0]
        here = self._staying()
        cells: Cells = np.array([one.cell for one in here], np.int64)
        on = self.grid.line(cells, axis) == own
        found = [one for one, is_on in zip(here, on, strict=True) if is_on]
        return sorted(found, key=lambda one: one.cell)

    def _staying(self) -> list[Peer]:
        """Those that have a cell."""
        return [one for one in self.peers.values() if not one.told]

    def _seat(self, peer: Peer) -> None:
        if self._regrid():
            return
        taken = {one.cell for one in self._staying()}
        free = [cell for cell in range(self.grid.cells) if cell not in taken]
        peer.cell = free[key_of(self._seed, peer.number, peer.round) % len(free)]

    def _regrid(self) -> bool:
        """Where the grid follows the peers: a new one if they don't fit, or if half the cells or
        fewer axes would do. Then all are seated anew."""
        count = max(1, len(self._staying()))
        best = fitting(count, self._most)
        fits = count <= self.grid.cells <= 2 * best.cells
        if self._fixed or (fits and len(self.grid.shape) <= len(best.shape)):
            return False
        self._set_grid(best)
        return True

    def _set_grid(self, grid: Grid) -> None:
        self.grid = grid
        for cell, peer in enumerate(sorted(self._staying(), key=lambda one: one.number)):
            peer.cell = cell
