"""Agreement of processes on who is in the next group: a state machine on a store.

docs/rejoin-protocol.md has the keys and the rules. Nothing here knows torch's groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

from lossycoll.errors import OperationTimeout, RendezvousError
from lossycoll.options.ranges import Between
from lossycoll.runtime.control.schema import PRINTABLE, Check, Length, Malformed, Schema
from lossycoll.runtime.world.polled_store import PolledStore
from lossycoll.runtime.world.rank_states import has_quorum

POLL_SECONDS: Final = 0.02
HEARTBEAT_SECONDS: Final = 0.1
ALIVE_SECONDS: Final = 1.0
"""A process is taken for dead after so long without a heartbeat, and ALIVE_LOOKS looks."""
ALIVE_LOOKS: Final = 5
SETTLE_SECONDS: Final = 0.5
"""Nobody writes members before it has looked so long: five heartbeats of all who are here."""
OVER_SECONDS: Final = 1.0  # between two looks whether the job has ended
NONE: Final = -1
FRESH: Final = -1  # the steps of a process that has no state yet
MOST_SLOTS: Final = 1 << 16


def _is_slot(value: int, slots: int) -> int:
    if value >= slots:
        raise Malformed(f"no member of a job of {slots} slots: {value}")
    return value


def _by_slot(members: tuple[Participant, ...], slots: int) -> tuple[Participant, ...]:
    found = [one.slot for one in members]
    if sorted({*found}) != found:
        raise Malformed(f"slots {found}, wanted ascending ones")
    return members


@dataclass(frozen=True)
class Participant:
    """One process in a generation, as it says in the store. ``slot`` is the number that its
    launcher gave it; no other process has had ``incarnation``. ``steps``: that its state has had;
    FRESH: it has none. ``before``: the generation that it comes from, if no later one was agreed
    on; NONE: it comes from no such."""

    slot: Annotated[int, Between(0, MOST_SLOTS), Check("below the job's slots", _is_slot)]
    incarnation: Annotated[str, Length(1, 64), PRINTABLE]
    steps: Annotated[int, Between(FRESH, 1 << 62)]
    before: Annotated[int, Between(NONE, 1 << 31)] = NONE


@dataclass(frozen=True)
class Generation:
    """A generation, as the first process that may has written it. torch's ranks are the members'
    places in it."""

    number: Annotated[int, Between(0, 1 << 31)]
    members: Annotated[
        tuple[Participant, ...], Length(1, MOST_SLOTS), Check("by slot, each once", _by_slot)
    ]

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(one.slot for one in self.members)

    @property
    def source(self) -> int:
        """The place of the member whose state all take: of the most steps, the first of several."""
        return max(range(len(self.members)), key=lambda at: (self.members[at].steps, -at))


@dataclass(frozen=True)
class Ended:
    """A member of a generation has ended in good order. ``lost``: slots of members that it knew to
    be dead."""

    lost: Annotated[tuple[Annotated[int, Between(0, MOST_SLOTS)], ...], Length(0, MOST_SLOTS)]


STORE: Final[Schema[Participant | Generation | Ended]] = Schema(Participant | Generation | Ended)
_Said = TypeVar("_Said", Participant, Generation, Ended)


@dataclass(frozen=True)
class LastGeneration:
    """The latest group of a process that worked, and what it knows of the others."""

    generation: Generation  # that group
    lost: frozenset[int] = frozenset()  # slots of members that are known to be dead
    refused: frozenset[str] = frozenset()  # incarnations with which no group could be made

    @property
    def expected(self) -> set[int]:
        """Slots of the members that may be alive, and aren't refused."""
        members = self.generation.members
        return {one.slot for one in members if one.incarnation not in self.refused} - self.lost

    def is_enough(self, here: Collection[int], silent: Collection[int]) -> bool:
        """True if the slots ``here`` may continue without ``silent``, of whom nothing is known."""
        return has_quorum(here, self.expected - {*silent})


class Watch:
    """The processes that wait for a generation, by what has been seen of their heartbeats."""

    def __init__(self, store: PolledStore, number: int, slots: int) -> None:
        self._store = store
        self._number = number
        self._slots = slots
        self._arrivals: list[_Arrival] = []
        self._looked = float("-inf")
        self._alive = ALIVE_SECONDS

    def look(self, now: float) -> list[Participant]:
        """Processes whose heartbeat has grown lately, of each slot the latest to come, by slot.
        Asks the store: some questions, however many wait, and some for each that has come. ``now``
        is in seconds, by a clock that only grows. RendezvousError: the store fails."""
        if self._looked > float("-inf"):
            self._alive = max(ALIVE_SECONDS, ALIVE_LOOKS * (now - self._looked))
        self._looked = now
        self._take_arrivals()
        keys = [f"heartbeat/{self._number}/{at}" for at in range(len(self._arrivals))]
        for one, heartbeat in zip(self._arrivals, self._store.counts(keys), strict=True):
            if one.heartbeat and heartbeat > one.heartbeat:
                one.grew = now
            one.heartbeat = max(heartbeat, one.heartbeat)
        found = {member.slot: member for member in self._living()}
        return [found[slot] for slot in sorted(found)]

    @property
    def silent(self) -> set[int]:
        """Slots of those that were seen alive, and aren't any more, as of the last look."""
        seen = {one.participant.slot for one in self._arrivals if one.participant and one.grew > 0}
        return seen - {member.slot for member in self._living()}

    def _living(self) -> list[Participant]:
        return [
            one.participant
            for one in self._arrivals
            if one.participant and self._looked - one.grew <= self._alive
        ]

    def _take_arrivals(self) -> None:
        key = f"places/{self._number}"
        count = self._store.counts([key])[0] if self._store.is_marked(key) else 0
        for at in range(len(self._arrivals), count):
            self._store.add(f"heartbeat/{self._number}/{at}", 0)  # so that it can be asked for
            self._arrivals.append(_Arrival())
        for at, one in enumerate(self._arrivals):
            if one.participant is None:  # it is about to be written, or its process has ended
                key = f"participant/{self._number}/{at}"
                one.participant = _read(self._store, key, Participant, self._slots)


def _read(store: PolledStore, key: str, kind: type[_Said], slots: int) -> _Said | None:
    """What a process has written; None: nothing, or what it can't be."""
    try:
        found = STORE.unpack((store.get(key) or "").encode(), slots)
    except Malformed:
        return None
    return found if isinstance(found, kind) else None


@dataclass
class _Arrival:
    """Process that has a place: what it says, its heartbeat, and when that grew."""

    participant: Participant | None = None
    heartbeat: int = 0
    grew: float = float("-inf")


class Agreement:
    """One process's way from generation to generation."""

    def __init__(
        self,
        store: PolledStore,
        slot: int,
        slots: int,
        incarnation: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._slot = slot
        self._slots = slots
        self.incarnation = incarnation
        self._clock = clock
        self._sleep = sleep
        store.set(f"slot/{slot}", incarnation)

    @property
    def _who(self) -> str:
        return f"slot {self._slot}"

    def next_number(self, at_least: int = 0) -> int:
        """The first generation without members, from ``at_least`` on."""
        said = self._store.get("generation") or ""
        number = max(at_least, int(said) if said.isdecimal() and len(said) < 10 else 0)
        while self._store.is_marked(f"members/{number}"):
            number += 1
        return number

    def watch(self, number: int) -> Watch:
        return Watch(self._store, number, self._slots)

    def meet(
        self, steps: int, before: LastGeneration | None, at_least: int, grace: float, timeout: float
    ) -> Generation:
        """Waits until this process is a member of a new generation, ``at_least`` or later.
        ``steps`` is what its state has had, or FRESH; ``grace``, in seconds, is the wait for
        members of the last group. OperationTimeout: none was agreed on within ``timeout`` seconds.
        RendezvousError: another process has this slot now, or the store fails."""
        end = self._clock() + timeout
        self._check_slot()  # before its name is where another's may be
        number = self.next_number(at_least)
        if number > at_least:
            before = None  # others have agreed on that one without it
        while True:
            self._wait(number, steps, before, grace, end)
            agreed = self.members(number)
            if any(one.incarnation == self.incarnation for one in agreed.members):
                return agreed
            before = None
            number = self.next_number(number + 1)

    def _wait(
        self, number: int, steps: int, before: LastGeneration | None, grace: float, end: float
    ) -> None:
        of = NONE if before is None else before.generation.number
        own = Participant(self._slot, self.incarnation, steps, of)
        at = self._store.add(f"places/{number}", 1) - 1
        self._store.set(f"participant/{number}/{at}", STORE.pack(own).decode())
        watch, begin = self.watch(number), self._clock()
        next_heartbeat = latest = next_look = begin
        known: set[str] = set()
        while not self._store.is_marked(f"members/{number}"):
            now = self._clock()
            if now >= next_heartbeat:
                self._check_slot()
                self._store.add(f"heartbeat/{number}/{at}", 1)
                next_heartbeat = now + HEARTBEAT_SECONDS
            others = [one for one in watch.look(now) if one.slot != self._slot]
            here = [
                own,
                *(one for one in others if not before or one.incarnation not in before.refused),
            ]
            if not known >= {one.incarnation for one in here}:
                known |= {one.incarnation for one in here}
                latest = now  # the others may be close behind
            if now >= begin + SETTLE_SECONDS:
                waited = before is not None and now >= latest + grace
                slots = {one.slot for one in here}
                # Without these it agrees on nothing before ``grace`` is over.
                wanted = set(range(self._slots)) if before is None else before.expected
                missing = wanted - slots
                # Who comes from no group leaves it to those who do: they may know better.
                may = before is not None or all(one.before == NONE for one in here)
                enough = not missing or (
                    waited and before and before.is_enough(slots, watch.silent)
                )
                if may and enough:
                    self._agree(number, here)
                    continue
                # Not at once: all slots may be about to begin another job with this store.
                if before is None and now >= max(next_look, latest + grace):
                    next_look = now + OVER_SECONDS
                    self._check_job(number - 1)
                if now >= end:
                    raise self._late(number, missing)
            self._sleep(POLL_SECONDS)

    def end(self, generation: Generation, lost: Collection[int]) -> None:
        """Mark that this process has ended in good order, for those that come too late. ``lost``:
        slots of members that are dead. RendezvousError: the store fails."""
        said = STORE.pack(Ended(tuple(sorted(lost)))).decode()
        self._store.set(f"ended/{generation.number}/{self._slot}", said)

    def _check_job(self, number: int) -> None:
        """RendezvousError: all members of the latest generation that lived have ended."""
        if number < 0 or not self._store.is_marked(f"members/{number}"):
            return
        left = {*self.members(number).slots} - {self._slot}
        marks = {
            slot: _read(self._store, f"ended/{number}/{slot}", Ended, self._slots) for slot in left
        }
        ended = sorted(slot for slot, mark in marks.items() if mark is not None)
        lost = {slot for mark in marks.values() if mark is not None for slot in mark.lost}
        if ended and left <= {*ended} | lost:
            raise RendezvousError(
                f"{self._who}: the job has ended: slots {ended} of its generation {number} "
                f"have left in good order, and no other of it lives; to begin another one, start "
                f"all slots, or take a new store"
            )

    def _late(self, number: int, missing: Collection[int]) -> OperationTimeout:
        if not missing:
            return OperationTimeout(
                f"{self._who}: the others didn't let this process into generation {number}; what "
                f"they logged says why"
            )
        return OperationTimeout(
            f"{self._who}: slots {sorted(missing)} of {self._slots} have not come to generation "
            f"{number} in time; are their processes started, and do they use the same store?",
            peer=min(missing),
        )

    def members(self, number: int) -> Generation:
        """A generation that was agreed on. RendezvousError: its key holds something else."""
        raw = self._store.get(f"members/{number}") or ""
        try:
            found = STORE.unpack(raw.encode(), self._slots)
            if not isinstance(found, Generation) or found.number != number:
                raise Malformed(f"{raw!r:.80} is another thing")
        except Malformed as error:
            raise RendezvousError(
                f"{self._who}: members/{number} in the store: {error}; does another job use the "
                f"same store, or a job of another size?"
            ) from None
        return found

    def _agree(self, number: int, here: Collection[Participant]) -> None:
        agreed = Generation(number, tuple(sorted(here, key=lambda one: one.slot)))
        self._store.set_first(f"members/{number}", STORE.pack(agreed).decode())
        self._store.set("generation", str(number))  # a hint: it may go backwards

    def _check_slot(self) -> None:
        holder = self._store.get(f"slot/{self._slot}")
        if holder != self.incarnation:
            raise RendezvousError(
                f"{self._who}: process {holder} has this slot now, and {self.incarnation} had it "
                f"before; end this one, or give each its own slot",
                peer=self._slot,
            )
