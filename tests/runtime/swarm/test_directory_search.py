"""A newcomer's search, by a clock and a transport of the tests: whom it finds, and when it begins a
swarm itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from lossycoll.runtime.control.schema import Address
from lossycoll.runtime.swarm.directory_list import (
    BEGIN_SECONDS,
    REACH_SECONDS,
    SILENT_SECONDS,
    Begin,
    DirectoryList,
    DirectorySearch,
    FoundDirectory,
)
from lossycoll.runtime.swarm.protocol import Directories, Heartbeat, pack, unpack

PLACES: list[Address] = [(f"10.0.0.{number}", 7000) for number in range(1, 17)]
OWN = PLACES[15]
STEP = 0.05


@dataclass
class End:
    """This end of a connection. ``answer``: what the other end says to a question, if anything."""

    answer: Callable[[], bytes | None]
    reached: bool = True
    broken: str = ""
    came: list[bytes] = field(default_factory=list)
    closed: bool = False

    def read(self) -> list[bytes]:
        found, self.came = self.came, []
        return found

    def write(self, body: bytes) -> None:
        assert unpack(body) == Heartbeat(0)
        answer = self.answer()
        if answer is not None:
            self.came.append(answer)

    def finish(self) -> None:
        raise AssertionError

    def close(self) -> None:
        self.closed = True


class Network:
    """Places by what they say: ``serves``, ``stands by``, ``drops`` who asks, ``silent`` (reached),
    ``lost`` (no packet comes back) or ``refuses``, which is what all others do."""

    def __init__(self, says: dict[Address, str], names: Address = OWN) -> None:
        self.now = 0.0
        self.says, self.names = says, names
        self.ends: dict[Address, End] = {}

    def reach(self, place: Address, session: str) -> End:
        says = self.says.get(place, "refuses")
        broken = "nobody listens there" if says == "refuses" else ""
        reached = says not in ("refuses", "lost")
        end = self.ends[place] = End(lambda: self._answer(place), reached, broken)
        return end

    def _answer(self, place: Address) -> bytes | None:
        says = self.says[place]
        if says == "drops":
            self.ends[place].broken = "it was closed there"
        if says == "serves":
            return pack(Heartbeat(3))
        return pack(Directories((self.names,))) if says == "stands by" else None

    def dies(self, place: Address) -> None:
        self.says[place] = "refuses"
        self.ends[place].broken = "it was closed there"

    def wait(self, seconds: float) -> None:
        raise AssertionError

    wake = end = lambda self: None


def search(
    network: Network, until: float, *, begin: Begin | None = None
) -> tuple[DirectorySearch, FoundDirectory | None]:
    """Searches until something is found, or the clock says ``until``."""
    one = DirectorySearch(network, DirectoryList(PLACES, begin), lambda: network.now)
    return one, goes_on(one, network, until)


def goes_on(one: DirectorySearch, network: Network, until: float) -> FoundDirectory | None:
    while network.now < until:
        if (found := one.turn()) is not None:
            return found
        network.now += STEP
    return None


@pytest.mark.parametrize("others", ["lost", "silent", "stands by", "refuses"])
def test_the_last_of_many_places_is_found_as_soon_whatever_the_others_say(others: str) -> None:
    network = Network({**dict.fromkeys(PLACES[:-1], others), PLACES[-1]: "serves"})
    _, found = search(network, 10.0)
    assert found is not None
    assert found == (PLACES[-1], network.ends[PLACES[-1]])
    assert network.now < REACH_SECONDS
    assert [place for place, end in network.ends.items() if not end.closed] == [PLACES[-1]]


def test_where_the_first_answers_no_other_is_asked() -> None:
    network = Network(dict.fromkeys(PLACES, "serves"))
    _, found = search(network, 10.0)
    assert found is not None
    assert found.place == PLACES[0]
    assert list(network.ends) == PLACES[:1]


def test_one_that_stands_by_names_others_to_ask() -> None:
    elsewhere = "10.0.0.99", 7000
    network = Network({PLACES[3]: "stands by", elsewhere: "serves"}, names=elsewhere)
    _, found = search(network, 10.0)
    assert found is not None
    assert found.place == elsewhere


def test_a_place_that_drops_the_question_is_joined_to_hear_why() -> None:
    """One of another version."""
    network = Network({PLACES[3]: "drops"})
    _, found = search(network, 10.0)
    assert found == (PLACES[3], None)
    assert network.ends[PLACES[3]].closed


@pytest.mark.parametrize("begins", [0.0, 3.0])
def test_places_are_asked_again(begins: float) -> None:
    """One that comes later, or whose swarm does, is found."""
    network = Network(dict.fromkeys(PLACES[:3], "stands by"))
    one, found = search(network, 5.0 + begins)
    assert found is None
    network.says[PLACES[1] if begins else PLACES[7]] = "serves"
    before = network.now
    assert goes_on(one, network, 30.0) is not None
    assert network.now - before < 1.0


def own_begin(begun: list[float], network: Network) -> Begin:
    return Begin(OWN, OWN, lambda: begun.append(network.now))


@pytest.mark.parametrize("others", ["lost", "refuses"])
def test_a_swarm_is_begun_in_time_though_all_others_are_dead(others: str) -> None:
    """Asked one after another, 15 dead machines would take 30 s each time."""
    network = Network({**dict.fromkeys(PLACES[:-1], others), OWN: "stands by"})
    begun: list[float] = []
    search(network, BEGIN_SECONDS + 2.0, begin=own_begin(begun, network))
    assert begun
    assert BEGIN_SECONDS <= begun[0] < BEGIN_SECONDS + 2 * STEP


@pytest.mark.parametrize("host", ["10.0.0.7", "172.16.0.7", "192.168.1.5", "8.8.8.7", "fd00::7"])
def test_one_of_a_list_begins_a_swarm_whatever_kind_its_addresses_are_of(host: str) -> None:
    """It listens on all addresses, and its own directory answers at the loopback's."""
    at = "::1" if ":" in host else "127.0.0.1", 7000
    network, begun = Network({at: "stands by"}, names=at), list[float]()
    begin = Begin(at, (host, 7000), lambda: begun.append(network.now))
    places = [(f"{host[:-1]}{number}", 7000) for number in (8, 9)]
    one = DirectorySearch(network, DirectoryList([*places, at], begin), lambda: network.now)
    goes_on(one, network, BEGIN_SECONDS + 2.0)
    assert begun
    assert begun[0] < BEGIN_SECONDS + 2 * STEP


@pytest.mark.parametrize("earlier", ["stands by", "silent"])
def test_none_is_begun_while_an_earlier_one_lives(earlier: str) -> None:
    """Where that one is reached and silent, it may be busy: until a limit."""
    network, begun = Network({PLACES[4]: earlier, OWN: "stands by"}), list[float]()
    one, _ = search(network, 0.98 * SILENT_SECONDS, begin=own_begin(begun, network))
    assert not begun
    if earlier == "silent":
        goes_on(one, network, SILENT_SECONDS + 1.0)
    else:
        goes_on(one, network, 30.0)
        assert not begun
        network.dies(PLACES[4])  # it is asked again at once, and refuses
        goes_on(one, network, 30.0 + 4 * STEP)
    assert begun


def test_one_whose_connection_has_broken_is_given_time_to_come_again() -> None:
    network, begun = Network({PLACES[4]: "stands by", OWN: "stands by"}), list[float]()
    one, _ = search(network, 20.0, begin=own_begin(begun, network))
    network.says[PLACES[4]] = "lost"
    network.ends[PLACES[4]].broken = "it was closed there"
    goes_on(one, network, 20.0 + REACH_SECONDS - 2 * STEP)
    assert not begun
    goes_on(one, network, 20.0 + REACH_SECONDS + 2 * STEP)
    assert begun
