"""Control planes of several ranks in threads of one process, over real sockets, and who listens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.world.control_plane import ControlPlane
from lossycoll.runtime.world.membership import Membership
from lossycoll.runtime.world.messages import View
from lossycoll.runtime.world.rank_states import RankState, RankStates
from tests.support.waiting import until

TOKEN = "secret"
GROUP = 7
LIVENESS = 3.0
"""Long enough that a machine that is busy elsewhere for two seconds is no death."""


class Notes:
    """A listener that logs what is reported to it; ``calls``: what was called at each number."""

    def __init__(self, rank: int, liveness: float = LIVENESS) -> None:
        self.rank = rank
        self.silence = 0.7 * liveness
        self.log: list[tuple[Any, ...]] = []
        self.when: list[float] = []
        self.calls: dict[int, str] = {}
        self.next = 10 + rank
        self.heartbeats = 0

    def _note(self, *what: Any) -> None:
        self.log.append(what)
        self.when.append(time.monotonic())

    def on_dead(self, rank: int, silent: float, ended: bool) -> None:
        assert silent >= self.silence or ended or rank == self.rank
        self._note("dead", rank)

    def on_abort(self, rank: int, reason: str, kind: str) -> None:
        self._note("abort", rank, reason, kind)

    def on_bye(self, rank: int, seq: int, why: str) -> None:
        self._note("bye", rank, seq)

    def on_mismatch(self, seq: int, calls: dict[int, str]) -> None:
        self._note("mismatch", seq, tuple(sorted(calls.items())))

    def on_differs(self, how: str) -> None:
        self._note("differs", how)

    def on_own_host(self, rank: int, options: Mapping[str, Any]) -> None:
        self._note("own host", rank, dict(options))

    def on_broken(self, error: Exception) -> None:
        self._note("broken", repr(error))

    def on_round(self) -> None:
        self.heartbeats += 1

    def call_at(self, seq: int) -> str | None:
        return self.calls.get(seq)

    def on_lost(self, rank: int, silent: float, ended: bool) -> int:
        assert silent >= self.silence or ended
        self._note("lost", rank)
        return self.next

    def on_views(self, views: Sequence[View], agreed: bool) -> None:
        self._note("views", [(view.first, view.members) for view in views], agreed)

    def on_no_quorum(self, lost: Sequence[int], remaining: Sequence[int]) -> None:
        self._note("no quorum", list(lost), list(remaining))

    def stats(self) -> dict[str, Any]:
        return {"rank": self.rank, "operations": 10 * self.rank}


def die(plane: ControlPlane) -> None:
    """The plane ends as with a process that is killed: its sockets close, and it says nothing."""
    plane.protocol.say_goodbye = plane.protocol.welcomed.clear  # type: ignore[method-assign]
    plane.close()


def silence(plane: ControlPlane) -> None:
    """The rank lives and hears, but nothing of it is heard any more."""
    sockets = plane._sockets
    sockets.states = RankStates(plane.world)
    for rank in range(plane.world):
        sockets.states.move(rank, RankState.LOST)
    sockets.send = lambda *_: True  # type: ignore[method-assign]
    sockets.ask = lambda *_: None  # type: ignore[method-assign]


class Planes:
    """A world of ``world`` ranks, each with one membership of a group of all of them."""

    def __init__(
        self,
        world: int,
        liveness: float = 30.0,
        *,
        outlive: bool = False,
        clock: Callable[[], float] = time.monotonic,
        secret: Secret | None = None,
    ) -> None:
        self.planes = [
            ControlPlane(rank, world, liveness, clock=clock, secret=secret) for rank in range(world)
        ]
        self.notes = [Notes(rank, liveness) for rank in range(world)]
        self.groups = [
            Membership(plane, GROUP, range(world), outlive=outlive) for plane in self.planes
        ]
        self.endpoints = [("127.0.0.1", plane.open("127.0.0.1")) for plane in self.planes]

    def start(self, rank: int) -> None:
        self.planes[rank].start(TOKEN, self.endpoints)
        self.groups[rank].open(self.notes[rank])

    def leave(self, rank: int, seq: int) -> None:
        """In order: goodbye, and the end."""
        self.groups[rank].leave(seq)
        self.groups[rank].close()

    def die(self, rank: int) -> None:
        die(self.planes[rank])

    def silence(self, rank: int) -> None:
        silence(self.planes[rank])

    def join(
        self, group: int, members: Sequence[int], *, outlive: bool = False
    ) -> dict[int, tuple[Membership, Notes]]:
        """Opens another group; membership and notes by rank of the world."""
        found = {}
        for number, rank in enumerate(members):
            made = Membership(self.planes[rank], group, members, outlive=outlive)
            notes = Notes(number, self.planes[rank].liveness)
            made.open(notes)
            found[rank] = (made, notes)
        return found

    def close(self) -> None:
        for plane in self.planes:
            plane.close()


@contextlib.contextmanager
def planes(world: int, liveness: float = 30.0, **rest: Any) -> Iterator[Planes]:
    """A world whose ranks have met."""
    made = Planes(world, liveness, **rest)
    try:
        for rank in range(world):
            made.start(rank)
        assert all(plane.meet(5) for plane in made.planes)
        yield made
    finally:
        made.close()


def quiet(seconds: float, notes: list[Notes]) -> None:
    time.sleep(seconds)
    assert all(not note.log for note in notes), [note.log for note in notes]


def views(made: Planes, rank: int) -> list[tuple[int, tuple[int, ...]]]:
    """The latest that were reported to a rank."""
    reported = [entry for entry in made.notes[rank].log if entry[0] == "views"]
    return reported[-1][1] if reported else []


def view_of(made: Planes, *left: int, since: int = 1) -> tuple[int, tuple[int, ...]]:
    """What those that are left must agree on after ``since`` losses, and do."""
    until(lambda: all(len(views(made, rank)) > since for rank in left), seconds=3 * LIVENESS)
    found = {views(made, rank)[since] for rank in left}
    assert len(found) == 1, found
    return found.pop()
