"""How processes agree on who is in the next group: a state machine on a store.

docs/rejoin.md has the keys and the rules. Nothing here knows torch's groups.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from lossycoll.errors import OperationTimeout, RendezvousError

POLL_SECONDS: Final = 0.02
BEAT_SECONDS: Final = 0.1
ALIVE_SECONDS: Final = 1.0
SETTLE_SECONDS: Final = 0.5
"""Nobody writes members before it has looked so long: five beats of all who are here."""
FRESH: Final = -1
"""The steps of a process that has no state yet."""
MOST_BYTES: Final = 1 << 20


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass(frozen=True)
class Member:
    """One process in a generation.

    Attributes:
        seat: The number that its launcher gave it.
        start: Its name, which no other process has had.
        steps: That its state has had; FRESH: it has none.
    """

    seat: int
    start: str
    steps: int


@dataclass(frozen=True)
class Generation:
    """A group that was agreed on.

    Attributes:
        number: From 0 on.
        members: By seat; torch's ranks are their places in it.
    """

    number: int
    members: tuple[Member, ...]

    @property
    def seats(self) -> tuple[int, ...]:
        """The members' seats, the least first."""
        return tuple(one.seat for one in self.members)

    @property
    def source(self) -> int:
        """The place of the member whose state all take: of the most steps, the first of several."""
        return max(range(len(self.members)), key=lambda at: (self.members[at].steps, -at))


class Watch:
    """Who waits for a generation, by what has been seen of their beats.

    Args:
        store: That all share.
        number: The generation's.
        seats: Those to look at.
    """

    def __init__(self, store: Store, number: int, seats: Iterable[int]) -> None:
        self._store = store
        self._keys = {seat: f"beat/{number}/{seat}" for seat in seats}
        self._beats: dict[int, int] = {}
        self._grew: dict[int, float] = {}

    def look(self, now: float) -> set[int]:
        """Asks the store.

        Args:
            now: Seconds, by a clock that only grows.

        Returns:
            The seats whose beat has grown within the last ALIVE_SECONDS.
        """
        for seat, key in self._keys.items():
            if self._store.check([key]):
                beat = self._store.add(key, 0)
                if beat != self._beats.setdefault(seat, beat):
                    self._beats[seat], self._grew[seat] = beat, now
        return {seat for seat, grew in self._grew.items() if now - grew <= ALIVE_SECONDS}


class Meeting:
    """One process's way from generation to generation.

    Args:
        store: That all share.
        seat: This process's.
        seats: How many there are.
        start: This process's name.
        clock: Seconds.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        store: Store,
        seat: int,
        seats: int,
        start: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._seat = seat
        self._seats = seats
        self._start = start
        self._clock = clock
        self._sleep = sleep
        store.set(f"seat/{seat}", start)

    def next_number(self, at_least: int = 0) -> int:
        """The first generation without members, from ``at_least`` on.

        Args:
            at_least: None before it is asked for.

        Returns:
            Its number.
        """
        number = max(at_least, self._latest() + 1)
        while self._store.check([f"members/{number}"]):
            number += 1
        return number

    def watch(self, number: int) -> Watch:
        """Looks who waits for a generation.

        Args:
            number: The generation's.
        """
        return Watch(self._store, number, [n for n in range(self._seats) if n != self._seat])

    def meet(
        self,
        steps: int,
        last: Generation | None,
        lost: Collection[int],
        grace: float,
        timeout: float,
    ) -> Generation:
        """Waits until this process is a member of a new generation.

        Args:
            steps: That its state has had; FRESH: it has none.
            last: The generation that it was in.
            lost: Seats of that which are known to be lost.
            grace: Seconds that members of the last one are waited for.
            timeout: Seconds for all of it.

        Returns:
            The generation.

        Raises:
            OperationTimeout: None was agreed on in time.
            RendezvousError: Another process has this seat now.
        """
        end = self._clock() + timeout
        self._check_seat()  # before its name is where another's may be
        number = self.next_number(0 if last is None else last.number + 1)
        expected = None
        if last is not None and number == last.number + 1:
            expected = set(last.seats) - {*lost}
        while True:
            self._wait(number, steps, expected, grace, end)
            agreed = self.members(number)
            if any(one.start == self._start for one in agreed.members):
                return agreed
            expected = None  # the others have gone on without it
            number = self.next_number(number + 1)

    def _wait(
        self, number: int, steps: int, expected: set[int] | None, grace: float, end: float
    ) -> None:
        """Until a generation has members. ``expected``: None: this process was in none."""
        own = Member(self._seat, self._start, steps)
        self._store.set(f"here/{number}/{self._seat}", json.dumps(asdict(own)))
        watch, begin = self.watch(number), self._clock()
        next_beat = begin
        while not self._store.check([f"members/{number}"]):
            now = self._clock()
            if now >= next_beat:
                self._check_seat()
                self._store.add(f"beat/{number}/{self._seat}", 1)
                next_beat = now + BEAT_SECONDS
            here = watch.look(now) | {self._seat}
            missing = (set(range(self._seats)) if expected is None else expected) - here
            enough = not missing or (expected is not None and now >= begin + grace)
            if enough and now >= begin + SETTLE_SECONDS:
                self._agree(number, here)
            elif now >= end and missing:
                raise OperationTimeout(
                    f"seat {self._seat}: seats {sorted(missing)} of {self._seats} have not come to "
                    f"generation {number} in time; are their processes started, and do they use "
                    f"the same store?",
                    peer=min(missing),
                )
            else:
                self._sleep(POLL_SECONDS)

    def members(self, number: int) -> Generation:
        """A generation that was agreed on.

        Args:
            number: Its number.

        Returns:
            The generation.

        Raises:
            RendezvousError: The store has something else under its key.
        """
        said = _read(self._store, f"members/{number}")
        if not isinstance(said, list):
            raise RendezvousError(f"seat {self._seat}: members/{number} in the store is no list")
        return Generation(number, tuple(self._member(one) for one in said))

    def _agree(self, number: int, seats: Collection[int]) -> None:
        said = [_read(self._store, f"here/{number}/{seat}") for seat in sorted(seats)]
        members = json.dumps([asdict(self._member(one)) for one in said])
        self._store.compare_set(f"members/{number}", "", members)
        self._store.set("generation", str(number))

    def _latest(self) -> int:
        if not self._store.check(["generation"]):
            return -1
        said = self._store.get("generation").decode(errors="replace")
        return int(said) if said.isdecimal() and len(said) < 10 else -1

    def _check_seat(self) -> None:
        holder = self._store.get(f"seat/{self._seat}").decode(errors="replace")
        if holder != self._start:
            raise RendezvousError(
                f"seat {self._seat}: process {holder} has this seat now, and {self._start} had it "
                f"before; end this one, or give each its own seat",
                peer=self._seat,
            )

    def _member(self, said: Any) -> Member:
        if isinstance(said, dict) and set(said) == {"seat", "start", "steps"}:
            seat, start, steps = said["seat"], said["start"], said["steps"]
            if (
                _whole(seat, 0, self._seats - 1)
                and isinstance(start, str)
                and _whole(steps, FRESH, 1 << 62)
            ):
                return Member(seat, start, steps)
        raise RendezvousError(
            f"seat {self._seat}: {said!r} in the store is no member of a job of {self._seats} "
            f"seats; does another job use the same store, or a job of another size?"
        )


def _whole(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _read(store: Store, key: str) -> Any:
    raw = store.get(key)
    if len(raw) > MOST_BYTES:
        raise RendezvousError(f"{key} in the store has {len(raw)} bytes, at most {MOST_BYTES}")
    try:
        return json.loads(raw)
    except ValueError as error:
        raise RendezvousError(f"{key} in the store can't be read: {error}") from None
