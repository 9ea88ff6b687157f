"""Who meets whom: a directory by itself, on an injected clock."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise

import numpy as np
import pytest

from lossycoll.runtime.swarm.directory import (
    COME,
    FIRST_GRACE,
    LATE,
    LEASE,
    MOST_GRACE,
    PATIENCE,
    SETTLE,
    Directory,
)
from lossycoll.runtime.swarm.directory_tables import FIRST_UNREACHABLE, KEPT_SECONDS, KNOWN
from lossycoll.runtime.swarm.protocol import (
    MOST_PEERS,
    SILENT,
    VERSION,
    Agreed,
    Averages,
    Group,
    Here,
    Join,
    Joined,
    Offers,
    Refused,
    Serves,
)

SCHEMA = "5c" * 16


class Swarm:
    """A directory, and peers that do as they are told."""

    def __init__(self, *shape: int, most: int = 32) -> None:
        self.now = 0.0
        self.directory = Directory(lambda: self.now, shape=shape, most=most, session="5" * 16)
        self.values: dict[int, float] = {}

    def come(self, name: str, **changes: object) -> int:
        wanted = join(name, **changes)
        answer = self.directory.join(wanted)
        assert isinstance(answer, Joined), answer
        self.directory.here(answer.number, Here("127.0.0.1", 4000 + answer.number))
        assert self.directory.averages(answer.number, Averages(SCHEMA, "")) == Agreed("")
        self.values.setdefault(answer.number, random.Random(name).random())
        return answer.number

    def with_peers(self, count: int) -> Swarm:
        for number in range(count):
            self.come(f"peer {number}")
        return self

    def ready(self, *numbers: int) -> None:
        for number in numbers:
            self.directory.ready(number, 1.0)

    def form(self) -> list[Group]:
        """Groups, whose members average."""
        groups = self.directory.form()
        for group in groups:
            numbers = [member.number for member in group.members]
            mean = sum(self.values[one] for one in numbers) / len(numbers)
            self.values.update(dict.fromkeys(numbers, mean))
        return groups


def join(name: str, **changes: object) -> Join:
    incarnation = random.Random(name).randbytes(16).hex()
    wanted = Join(VERSION, name, incarnation, MOST_PEERS, "5" * 16, 0)
    return dataclasses.replace(wanted, **changes)  # type: ignore[arg-type]


def numbers(groups: list[Group]) -> list[list[int]]:
    return sorted(sorted(member.number for member in group.members) for group in groups)


def begins_after(swarm: Swarm, seconds: float) -> list[list[int]]:
    """The groups that begin so much later, and not before."""
    swarm.now += seconds - 0.01
    assert swarm.form() == []
    swarm.now += 0.02
    return numbers(swarm.form())


@pytest.mark.parametrize(("shape", "count"), [((4,), 4), ((4, 4), 16), ((2, 3), 5), ((), 3)])
def test_whoever_owns_a_part_is_dealt_anew_in_each_round(
    shape: tuple[int, ...], count: int
) -> None:
    """Where packets are lost, an owner's values weigh more in its part: not always the same's. Each
    has each place as often, give or take four standard errors; and by the paper's rule it sits
    there from then on."""
    swarm = Swarm(*shape)
    peers = [swarm.come(f"peer {number}") for number in range(count)]
    first, groups_of = np.zeros(count), np.zeros(count)
    for _ in range(600):
        swarm.ready(*peers)
        for group in swarm.form():
            members = [member.number for member in group.members]
            cells = [swarm.directory.peers[one].cell for one in members]
            assert cells == sorted(cells)
            first[members[0]] += 1
            groups_of[members] += 1 / len(members)
    assert (np.abs(first - groups_of) < 4 * np.sqrt(groups_of)).all()


def test_lines_go_on_by_themselves_as_far_as_they_can() -> None:
    swarm = Swarm(2, 2).with_peers(4)
    first = {peer.cell: peer.number for peer in swarm.directory.peers.values()}
    row = [first[0], first[2]]  # along the first axis
    swarm.ready(*row)
    assert numbers(swarm.form()) == [sorted(row)]
    swarm.ready(*row)
    assert swarm.form() == []  # each waits for one of the other row
    swarm.ready(*set(swarm.values) - set(row))
    assert numbers(swarm.form()) == [sorted(set(swarm.values) - set(row))]
    swarm.ready(*set(swarm.values) - set(row))
    assert [group.round for group in swarm.form()] == [1, 1]


def test_late_peers_are_waited_for_as_long_as_earlier_rounds_teach() -> None:
    swarm = Swarm(3).with_peers(3)
    swarm.ready(0, 1)
    swarm.now += FIRST_GRACE - 0.01
    assert swarm.form() == []
    assert swarm.directory.wakes() == pytest.approx(FIRST_GRACE)
    swarm.now += 0.02
    assert numbers(swarm.form()) == [[0, 1]]  # without 2, which hadn't come
    swarm.ready(0, 1)
    assert numbers(swarm.form()) == [[0, 1]]  # nor is it waited for again
    swarm.ready(0, 1, 2)
    assert numbers(swarm.form()) == [[0, 1, 2]]
    for _ in range(KNOWN - 1):
        swarm.ready(0, 1, 2)
        assert numbers(swarm.form()) == [[0, 1, 2]]
    swarm.ready(0, 1)
    swarm.now += 2.0
    swarm.ready(2)  # which takes two seconds
    assert numbers(swarm.form()) == [[0, 1, 2]]
    swarm.ready(0, 1)
    swarm.now += LATE * 2.0 + PATIENCE - 0.01
    assert swarm.form() == []
    for number in range(3):
        swarm.directory.beat(number)
    assert swarm.directory.wakes() == pytest.approx(swarm.now + 0.01)
    swarm.now += 0.02
    assert numbers(swarm.form()) == [[0, 1]]


@pytest.mark.parametrize(("known", "grace"), [(1, FIRST_GRACE), (KNOWN, PATIENCE)])
def test_few_rounds_teach_little(known: int, grace: float) -> None:
    swarm = Swarm(2).with_peers(2)
    for _ in range(known + 1):
        swarm.ready(0, 1)
        assert numbers(swarm.form()) == [[0, 1]]
    swarm.ready(0)
    assert begins_after(swarm, grace) == [[0]]


def test_a_newcomer_has_little_time_until_it_has_been_in_a_round() -> None:
    swarm = Swarm(2)
    swarm.come("first")
    swarm.ready(0)
    assert numbers(swarm.form()) == [[0]]
    swarm.come("newcomer")
    swarm.ready(0)
    swarm.now += PATIENCE - 0.01
    assert swarm.form() == []
    swarm.ready(1)
    assert numbers(swarm.form()) == [[0, 1]]
    swarm.ready(0)
    assert begins_after(swarm, FIRST_GRACE) == [[0]]


def test_no_longer_than_it_takes_and_a_minute() -> None:
    swarm = Swarm(2).with_peers(2)
    swarm.ready(0, 1)
    assert len(swarm.form()) == 1
    swarm.ready(0)
    swarm.now += FIRST_GRACE - 0.1
    swarm.ready(1)
    assert len(swarm.form()) == 1
    swarm.directory.peers[1].took.append(1000.0)
    swarm.ready(0)
    assert begins_after(swarm, 1000.0 + MOST_GRACE + PATIENCE) == [[0]]


def test_waits_do_not_make_longer_waits() -> None:
    """Peers of a full grid take a tenth of a second each; one is frozen now and then. What others
    wait for it makes them late in their next row, which nobody learns to be patient by."""
    swarm, draw = Swarm(4, 4), random.Random(1)
    for number in range(16):
        swarm.come(f"peer {number}")
    ready_at = dict.fromkeys(range(16), 0.0)
    rounds: list[float] = []
    for turn in range(4000):
        if turn % 400 == 399:
            ready_at[draw.randrange(16)] += 8.0
        for number, at in ready_at.items():
            if at <= swarm.now:
                swarm.ready(number)
                ready_at[number] = float("inf")
        for group in swarm.form():
            rounds.append(swarm.now)
            for member in group.members:
                ready_at[member.number] = swarm.now + 0.1
        swarm.now += 0.05
    gaps = [b - a for a, b in pairwise(rounds)]
    assert max(gaps) < FIRST_GRACE
    assert len(rounds) > 3000


def test_nobody_waits_for_one_that_has_gone() -> None:
    swarm = Swarm(3).with_peers(3)
    swarm.ready(0, 1, 2)
    swarm.form()
    swarm.ready(0, 1)
    assert swarm.form() == []
    incarnation = swarm.directory.peers[2].incarnation
    assert sorted(swarm.directory.lost(2)) == [(0, incarnation), (1, incarnation)]
    assert numbers(swarm.form()) == [[0, 1]]
    assert swarm.directory.lost(2) == []


def test_a_peer_that_gives_no_sign_of_life_is_overdue() -> None:
    swarm = Swarm()
    for name in "ab":
        swarm.come(name)
    swarm.now += LEASE - 1
    swarm.directory.beat(1)
    swarm.now += 1.5
    assert swarm.directory.overdue() == [0]


def test_one_that_comes_again_has_what_it_had() -> None:
    swarm = Swarm()
    for name in "abc":
        swarm.come(name)
    for _ in range(3):
        swarm.ready(0, 1, 2)
        swarm.form()
    again = dataclasses.replace(
        join("b"), incarnation=join("b").incarnation[:16] + "7" * 16, number=1
    )
    assert swarm.directory.is_again(again)
    for changes in (
        *({"name": "x"}, {"number": 2}, {"number": MOST_PEERS}, {"session": "9" * 16}),
        {"incarnation": "7" * 32},  # another process of this name, from another part of the swarm
    ):
        assert not swarm.directory.is_again(dataclasses.replace(again, **changes))  # type: ignore[arg-type]
    swarm.directory.lost(1)
    swarm.ready(0, 2)
    swarm.form()
    assert swarm.come("b", number=1, round=3) == 1
    assert swarm.directory.peers[1].round == 4  # not behind the others
    swarm.directory.lost(1)
    assert swarm.come("b, started again") == 3  # "b" may come back yet


def test_a_directory_that_is_new_learns_from_those_that_come() -> None:
    before, after = Swarm(), Swarm()
    for name in "abcd":
        before.come(name)
    for name, number in (("c", 2), ("a", 0), ("d", 3), ("b", 1)):
        assert after.come(name, number=number, round=7) == number
        after.ready(number)
        assert after.form() == []  # others may be on their way
    assert after.directory.wakes() == pytest.approx(SETTLE)
    after.now += SETTLE + 0.01
    assert {group.round for group in after.form()} == {7}


def test_a_directory_that_has_taken_over_says_once_who_came() -> None:
    after = Swarm()
    for turn in range(2):
        for name, number in (("c", 2), ("a", 0)):
            assert after.come(name, number=number, round=7) == number
            assert not after.directory.has_just_settled()
        after.now += COME - 0.01
        assert not after.directory.has_just_settled()
        if turn:  # others turn here, and may still be in a round with those that don't come
            after.directory.takes(9, 10.0)
            after.now += 9.0
            assert not after.directory.has_just_settled()
        after.now += 1.1
        assert [after.directory.has_just_settled() for _ in range(3)] == [True, False, False]
        after.directory.takes(9, 10.0)
        assert not after.directory.has_just_settled()
        for number in (0, 2):
            after.directory.lost(number)
        after.directory.adopt(after.directory.session)
        after.now += 2 * COME
        assert not after.directory.has_just_settled()


def test_who_comes_to_those_that_are_there_says_nothing_of_others() -> None:
    """By a turn, or by another connection: those that it was with needn't be here."""
    swarm = Swarm()
    swarm.come("a")
    swarm.come("b", number=5, round=7)
    swarm.now += COME + 0.01
    assert not swarm.directory.has_just_settled()


def test_a_grid_follows_its_peers() -> None:
    swarm = Swarm(most=4)
    for number in range(16):
        swarm.come(f"peer {number}")
        cells = [peer.cell for peer in swarm.directory.peers.values()]
        assert len(set(cells)) == len(cells)
        assert max(cells) < swarm.directory.grid.cells
    assert str(swarm.directory.grid) == "4x4"
    for number in range(13):
        swarm.directory.lost(number)
    assert str(swarm.directory.grid) == "4", "one group, as soon as that does"
    cells = [peer.cell for peer in swarm.directory.peers.values()]
    assert len(set(cells)) == 3


def test_whoever_comes_and_goes_the_mean_of_those_that_stay_is_approached() -> None:
    """Peers come and go at random; between that, rounds. No cell is ever taken twice."""
    draw, swarm = random.Random(3), Swarm(most=4)
    for number in range(10):
        swarm.come(f"peer {number}")
    for turn in range(300):
        there = list(swarm.directory.peers)
        if draw.random() < 0.2 and len(there) > 3:
            gone = draw.choice(there)
            swarm.directory.lost(gone)
            swarm.values.pop(gone)
        elif draw.random() < 0.2:
            swarm.come(f"another {turn}")
        there = list(swarm.directory.peers)
        swarm.ready(*(one for one in there if draw.random() < 0.9))
        swarm.now += MOST_GRACE
        swarm.form()
        cells = [peer.cell for peer in swarm.directory.peers.values()]
        assert len(set(cells)) == len(cells)
    for _ in range(12):
        swarm.ready(*swarm.directory.peers)
        swarm.now += MOST_GRACE
        swarm.form()
    values = list(swarm.values.values())
    assert max(values) - min(values) < 1e-6


def test_who_cannot_take_part_hears_why() -> None:
    swarm = Swarm()
    swarm.come("a")
    answer = swarm.directory.join(dataclasses.replace(join("b"), name="a"))
    assert isinstance(answer, Refused)
    assert "a peer named 'a' is there" in answer.reason
    assert list(swarm.directory.peers) == [0]


@pytest.mark.parametrize(("shape", "room"), [((2, 2), 4), ((), MOST_PEERS)])
def test_a_swarm_may_be_full(shape: tuple[int, ...], room: int) -> None:
    swarm = Swarm(*shape)
    for number in range(room):
        swarm.come(f"peer {number}")
    answer = swarm.directory.join(join("one more"))
    assert answer == Refused(f"the swarm is full: {room} peers")


def test_all_average_the_same_on_the_first_ones_grid() -> None:
    swarm = Swarm()
    for name in "abc":
        answer = swarm.directory.join(join(name))
        assert isinstance(answer, Joined)

    def said(number: int, wanted: Averages) -> Agreed:
        answer = swarm.directory.averages(number, wanted)
        assert answer is not None
        return answer

    assert "3 peers don't fit into a grid of 1x2" in said(0, Averages(SCHEMA, "1x2")).reason
    assert "as in 32x32" in said(0, Averages(SCHEMA, "x")).reason
    assert said(1, Averages(SCHEMA, "2x2")) == Agreed("")
    assert "something else than 'b'" in said(0, Averages("77" * 16, "")).reason
    said_wire = said(0, Averages(SCHEMA, "", "int8")).reason
    assert said_wire.startswith("your packets carry 'int8', and those of 'b' 'same'")
    assert said(0, Averages(SCHEMA, "")) == Agreed("")
    assert str(swarm.directory.grid) == "2x2"


def test_who_averages_nothing_is_waited_for_once_and_before_the_first_round() -> None:
    swarm = Swarm()
    swarm.come("a"), swarm.come("b")
    assert isinstance(swarm.directory.join(join("looks on")), Joined)
    swarm.ready(0, 1)
    assert swarm.form() == []
    swarm.now += FIRST_GRACE + 0.01
    groups = swarm.form()
    assert numbers(groups) == [[0, 1]]
    assert groups[0].absent == (("looks on", SILENT),)
    assert isinstance(swarm.directory.join(join("comes later, and looks on")), Joined)
    swarm.ready(0, 1)
    assert numbers(swarm.form()) == [[0, 1]]
    assert swarm.directory.names() == ("a", "b", "looks on", "comes later, and looks on")


def test_directories_are_listed_for_all_alike() -> None:
    swarm = Swarm()
    for name in "abc":
        swarm.come(name)
    swarm.directory.serves(2, Serves("10.0.0.2", 7000))
    swarm.directory.serves(0, Serves("10.0.0.1", 7000))
    assert swarm.directory.directories() == (("10.0.0.1", 7000), ("10.0.0.2", 7000))
    swarm.directory.lost(0)
    assert swarm.directory.directories() == (("10.0.0.2", 7000),)


def test_a_standby_leaves_room_for_those_that_are_to_come() -> None:
    swarm = Swarm()
    swarm.directory.adopt("7" * 16)
    assert swarm.come("new") not in (0, 2)
    assert swarm.come("a", number=0, session="7" * 16) == 0
    assert swarm.come("new, too") != 2
    assert swarm.come("b", number=2, session="7" * 16, round=9) == 2
    assert {peer.round for peer in swarm.directory.peers.values()} == {9}
    swarm.now += SETTLE
    later = swarm.come("later")
    assert swarm.come("c", number=later, session="7" * 16) not in (0, 2, later)  # it is taken
    answer = swarm.directory.join(dataclasses.replace(join("d"), number=5, session="8" * 16))
    assert isinstance(answer, Refused)
    assert "others have begun a swarm here meanwhile" in answer.reason


def test_what_a_stranger_claims_moves_nobody() -> None:
    swarm = Swarm()
    for name in "ab":
        swarm.come(name)
    swarm.come("far", number=5, round=2**50)
    assert {peer.round for peer in swarm.directory.peers.values()} == {0}
    alone = Swarm()
    alone.directory.join(join("a"))
    answer = alone.directory.averages(0, Averages(SCHEMA, "70000x2"))
    assert answer is not None
    assert "more than 65536 cells" in answer.reason


def donors(swarm: Swarm, newcomer: int, most: int) -> list[int]:
    """Donors of a newcomer, as told at once."""
    swarm.directory.seeks(newcomer, most)
    ((number, transfers),) = swarm.directory.transfers()
    assert number == newcomer
    assert all(transfer.members[1].number == newcomer for transfer in transfers)
    assert swarm.directory.transfers() == []
    return [transfer.members[0].number for transfer in transfers]


def test_donors_of_a_newcomer() -> None:
    """Those that have a state and have come furthest; never the newcomer itself."""
    swarm = Swarm()
    first, second, third = (swarm.come(name) for name in ("a", "b", "c"))
    for number in (first, second):
        swarm.directory.offers(number, Offers(1))
    swarm.directory._rounds.move(swarm.directory.peers[second], 5)
    assert donors(swarm, third, 4) == [second, first]
    assert donors(swarm, third, 1) == [second]
    assert donors(swarm, second, 4) == [first]
    swarm.directory.offers(first, Offers(0))
    assert donors(swarm, third, 4) == [second]
    assert swarm.directory.lost(second) == [
        (number, join("b").incarnation) for number in (first, third)
    ]
    assert donors(swarm, third, 4) == []


def test_donors_take_turns() -> None:
    swarm = Swarm()
    peers = [swarm.come(str(i)) for i in range(4)]
    for number in peers:
        swarm.directory.offers(number, Offers(1))
    newcomer = swarm.come("newcomer")
    assert {donors(swarm, newcomer, 1)[0] for _ in range(40)} == set(peers)


def test_whoever_averages_nothing_has_no_donor() -> None:
    swarm = Swarm()
    swarm.directory.offers(swarm.come("a"), Offers(1))
    answer = swarm.directory.join(join("b"))
    assert isinstance(answer, Joined)
    swarm.directory.here(answer.number, Here("127.0.0.1", 5000))
    assert donors(swarm, answer.number, 4) == []


def test_donors_that_are_on_their_way_are_waited_for() -> None:
    """A directory that takes over hears only by and by who has a state."""
    swarm = Swarm()
    newcomer = swarm.come("newcomer", number=3, round=7)
    swarm.directory.seeks(newcomer, 4)
    assert swarm.directory.transfers() == []
    donor = swarm.come("a", number=1, round=7)
    swarm.directory.offers(donor, Offers(1))
    assert swarm.directory.transfers() == []
    assert swarm.directory.wakes() == pytest.approx(SETTLE)
    swarm.now += SETTLE + 0.01
    ((number, transfers),) = swarm.directory.transfers()
    assert (number, [transfer.members[0].number for transfer in transfers]) == (newcomer, [donor])


def test_newcomers_wait_for_those_that_count() -> None:
    """They bring nothing, so they are no group by themselves, however long they wait; and others
    wait for them once, and not long."""
    swarm = Swarm(4)
    first, second = swarm.come("a"), swarm.come("b")
    for _ in range(3):
        swarm.ready(first, second)
        assert numbers(swarm.form()) == [[first, second]]
    new = swarm.come("new")
    swarm.ready(first, second)
    assert swarm.form() == []
    swarm.now += PATIENCE + 0.01
    assert numbers(swarm.form()) == [[first, second]]
    swarm.ready(first, second)
    assert numbers(swarm.form()) == [[first, second]]
    swarm.directory.ready(new, 0.0)
    another = swarm.come("another")
    swarm.directory.ready(another, 0.0)
    swarm.now += 10 * MOST_GRACE
    assert swarm.form() == []
    swarm.ready(first, second)
    (group,) = swarm.form()
    assert numbers([group]) == [[first, second, new, another]]
    assert group.round == 5


def test_one_that_averages_later_than_it_came_is_not_behind() -> None:
    swarm = Swarm(3)
    answer = swarm.directory.join(join("early"))
    assert isinstance(answer, Joined)
    swarm.directory.here(answer.number, Here("127.0.0.1", 5000))
    swarm.values[answer.number] = 0.0
    first, second = swarm.come("a"), swarm.come("b")
    for _ in range(5):
        swarm.ready(first, second)
        swarm.now += FIRST_GRACE + 0.01  # others wait for it, once
        assert len(swarm.form()) == 1
    assert swarm.directory.averages(answer.number, Averages(SCHEMA, "")) == Agreed("")
    swarm.ready(answer.number, first, second)
    assert numbers(swarm.form()) == [[answer.number, first, second]]


def test_numbers_of_those_that_may_come_again_are_not_given_away() -> None:
    """A peer that was lost for a moment finds its own; a directory that takes over, and doesn't
    know the others' numbers yet, takes any."""
    swarm = Swarm()
    for name in "abc":
        swarm.come(name)
    swarm.directory.lost(1)
    assert swarm.come("new") == 3
    assert swarm.come("b", number=1) == 1
    swarm.directory.lost(1)
    swarm.now += KEPT_SECONDS + 0.1
    assert swarm.come("newer") == 1
    taken = 0
    for turn in range(40):
        after = Swarm()
        after.directory.adopt(f"{turn:016x}")
        after.come("its own", number=127, session=f"{turn:016x}")
        after.now += SETTLE + 1.0
        numbers_of = {after.come(f"newcomer {turn} {i}", session=f"{turn:016x}") for i in range(4)}
        taken += len(numbers_of & set(range(16)))
    assert taken < 40  # of 160; from below it would be all of them


def test_peers_that_do_not_reach_each_other_are_not_in_one_group() -> None:
    swarm = Swarm(4)
    for name in "abcd":
        swarm.come(name)
    incarnations = {number: peer.incarnation for number, peer in swarm.directory.peers.items()}

    def rounds() -> list[list[int]]:
        swarm.ready(0, 1, 2, 3)
        return numbers(swarm.form())

    assert rounds() == [[0, 1, 2, 3]]
    assert swarm.directory.report_unreachable(1, [incarnations[3]]) == 1
    for _ in range(6):
        found = rounds()
        assert sorted(map(len, found)) == [2, 2]
        assert [1, 3] not in found
    swarm.now += FIRST_UNREACHABLE
    for number in range(4):
        swarm.directory.beat(number)
    assert rounds() == [[0, 1, 2, 3]]  # they try again


def test_nobody_says_of_others_that_they_are_out_of_reach() -> None:
    """Nor of itself, nor of peers that it has nothing to do with."""
    swarm = Swarm(2, 2)
    for name in "abcd":
        swarm.come(name)
    swarm.ready(0, 1, 2, 3)
    groups = {member: group for group in numbers(swarm.form()) for member in group}
    incarnations = {number: peer.incarnation for number, peer in swarm.directory.peers.items()}
    stranger = next(number for number in range(4) if number not in groups[0])
    other = next(number for number in groups[0] if number != 0)
    said = [
        incarnations[stranger],
        incarnations[0],
        "0" * 32,
        incarnations[other],
        incarnations[other],
    ]
    assert swarm.directory.report_unreachable(0, said) == 1
    swarm.directory.lost(other)
    assert swarm.directory.report_unreachable(0, [incarnations[other]]) == 0


def test_donors_that_a_newcomer_does_not_reach_are_not_told_again() -> None:
    swarm = Swarm(4)
    for name in "ab":
        swarm.directory.offers(swarm.come(name), Offers(1))
    joiner = swarm.come("c")
    donors = []
    for _ in range(2):
        swarm.directory.seeks(joiner, 4)
        ((_, transfers),) = swarm.directory.transfers()
        donors.append({transfer.members[0].number for transfer in transfers})
        swarm.directory.report_unreachable(joiner, [swarm.directory.peers[1].incarnation])
    assert donors == [{0, 1}, {0}]
