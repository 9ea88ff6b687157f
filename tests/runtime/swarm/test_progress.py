"""Samples of a swarm, whose state is newest, and what peers agree on: a directory in virtual
time."""

from __future__ import annotations

import random

import pytest

from lossycoll.runtime.swarm.agreement import digest_of, text_of
from lossycoll.runtime.swarm.directory import FIRST_GRACE
from lossycoll.runtime.swarm.progress import MOST_SAMPLES
from lossycoll.runtime.swarm.protocol import Agreed, Averages, Group, Here, Joined, Offers
from tests.runtime.swarm.test_directory import SCHEMA, Swarm, join, numbers


def says(**settings: object) -> Averages:
    said = text_of({"values": 10, "average": "parameters", **settings})
    return Averages(digest_of(said), "", settings=said)


def silent(swarm: Swarm, name: str) -> int:
    """A peer that hasn't said what it averages."""
    answer = swarm.directory.join(join(name))
    assert isinstance(answer, Joined)
    swarm.directory.here(answer.number, Here("127.0.0.1", 4000 + answer.number))
    swarm.values[answer.number] = random.Random(name).random()
    return answer.number


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shape", [(2, 2, 2), (4, 4)])
def test_a_full_grid_is_exact_in_whatever_order_peers_begin(
    shape: tuple[int, ...], seed: int
) -> None:
    """All are there. Then each says what it averages, and is ready, when it likes, within the time
    for which the others wait."""
    draw, swarm = random.Random(seed), Swarm(*shape)
    peers = [silent(swarm, f"peer {seed} {n}") for n in range(swarm.directory.grid.cells)]
    mean = sum(swarm.values.values()) / len(peers)
    begins = {peer: draw.random() * 0.9 * FIRST_GRACE for peer in peers}
    left = dict.fromkeys(peers, len(shape))
    waits: set[int] = set()
    while any(left.values()):
        swarm.now += 0.02
        assert swarm.now < 60
        for peer in peers:
            if begins[peer] <= swarm.now and not swarm.directory.peers[peer].schema:
                assert swarm.directory.averages(peer, Averages(SCHEMA, "")) == Agreed("")
            if begins[peer] + 0.1 <= swarm.now and left[peer] and peer not in waits:
                swarm.ready(peer)
                waits.add(peer)
        for group in swarm.form():
            assert group.absent == ()
            for member in group.members:
                left[member.number] -= 1
                waits.discard(member.number)
                begins[member.number] = swarm.now + draw.random() * 0.2
    assert max(abs(value - mean) for value in swarm.values.values()) < 1e-12


def test_peers_wait_for_those_that_average_the_same() -> None:
    swarm = Swarm()
    wanted = Averages(SCHEMA, "", peers=3)
    a, b, c = (silent(swarm, name) for name in "abc")
    assert swarm.directory.averages(a, wanted) is None
    assert swarm.directory.averages(b, wanted) is None
    assert swarm.directory.agreed() == []
    silent(swarm, "looks on")
    assert swarm.directory.agreed() == []
    assert swarm.directory.averages(c, wanted) == Agreed("")
    assert swarm.directory.agreed() == [a, b]
    assert swarm.directory.agreed() == []


def test_the_setting_that_differs_is_named() -> None:
    swarm = Swarm()
    a, b = silent(swarm, "a"), silent(swarm, "b")
    assert swarm.directory.averages(a, says(every=10, outer="SGD")) == Agreed("")
    answer = swarm.directory.averages(b, says(every=5, outer=None))
    assert answer is not None
    assert "than 'a': every=5, wanted 10; outer=None, wanted SGD;" in answer.reason
    answer = swarm.directory.averages(b, says(every=10, outer="SGD", wide=1))
    assert answer is not None
    assert "wide=1, wanted not set" in answer.reason
    assert swarm.directory.averages(b, says(every=10, outer="SGD")) == Agreed("")


def test_who_averages_by_itself_is_in_no_round_of_a_training() -> None:
    swarm = Swarm()
    a, b, c = (silent(swarm, name) for name in "abc")
    assert swarm.directory.averages(a, says(average="tensors")) == Agreed("")
    for peer in (b, c):
        assert swarm.directory.averages(peer, says(every=10)) == Agreed("")
    swarm.ready(a, b, c)
    assert numbers(swarm.form() + swarm.form()) == [[a], [b, c]]


def trained(swarm: Swarm, *samples: int) -> list[int]:
    peers = [swarm.come(f"peer {number}") for number in range(len(samples))]
    for peer, since in zip(peers, samples, strict=True):
        swarm.directory.offers(peer, Offers(1, 0, since))
    swarm.ready(*peers)
    (group,) = swarm.form()
    assert group.samples == sum(samples)
    return peers


def test_samples_count_once() -> None:
    swarm = Swarm()
    a, b = trained(swarm, 30, 12)
    swarm.directory.offers(a, Offers(1, 0, 30))  # said before it heard of the round
    swarm.directory.offers(b, Offers(1, 42, 5))
    swarm.ready(a, b)
    (group,) = swarm.form()
    assert group.samples == 47


@pytest.mark.parametrize("claim", [10**15, (1 << 53) - 1])
def test_samples_of_a_liar_are_bounded(claim: int) -> None:
    swarm = Swarm()
    peers = trained(swarm, 30, 12)
    for _ in range(3):
        for peer in peers:
            now = swarm.directory.peers[peer].samples
            swarm.directory.offers(peer, Offers(1, max(now, claim), claim))
        swarm.ready(*peers)
        (group,) = swarm.form()
    assert group.samples <= MOST_SAMPLES


@pytest.mark.parametrize("newest_first", [False, True])
def test_the_newest_state_wins_and_the_loser_is_told(newest_first: bool) -> None:
    swarm = Swarm()
    old, new = swarm.come("old"), swarm.come("new")
    claims = {old: Offers(1, 20, 0, 1), new: Offers(1, 200, 0, 1)}
    for peer in (new, old) if newest_first else (old, new):
        swarm.directory.offers(peer, claims[peer])
    swarm.ready(old, new)
    groups: list[Group] = swarm.form()
    swarm.now += FIRST_GRACE + 1
    groups += swarm.form()
    assert numbers(groups) == [[old], [new]] if old < new else [[new], [old]]
    told = next(one for one in groups if one.members[0].number == old)
    other = next(one for one in groups if one.members[0].number == new)
    assert (told.newer, other.newer) == (200, 0)
    assert other.absent[0][0] == "old"
    swarm.directory.offers(old, Offers(1, 200, 0))  # it has taken that state
    swarm.ready(old)
    swarm.form()
    swarm.ready(new)
    swarm.ready(old)
    assert numbers(swarm.form())[-1] == [old, new]


def test_equal_checkpoints_begin_at_once() -> None:
    swarm = Swarm()
    peers = [swarm.come(name) for name in "abc"]
    for peer in peers:
        swarm.directory.offers(peer, Offers(1, 64, 0, 1))
    swarm.ready(*peers)
    (group,) = swarm.form()
    assert (len(group.members), group.samples, group.newer) == (3, 64, 0)


def test_a_newer_state_that_has_gone_holds_nobody_up() -> None:
    swarm = Swarm()
    a, b, new = (swarm.come(name) for name in ("a", "b", "new"))
    swarm.directory.offers(a, Offers(1, 20, 0, 1))
    swarm.directory.offers(b, Offers(1, 20, 0, 1))
    swarm.directory.offers(new, Offers(1, 200, 0, 1))
    swarm.directory.lost(new)
    swarm.ready(a, b)
    (group,) = swarm.form()
    assert (len(group.members), group.newer) == (2, 0)


def test_peers_of_which_none_has_a_weight_do_not_wait_for_one_another() -> None:
    swarm = Swarm()
    peers = [swarm.come(name) for name in "abc"]
    for peer in peers[:2]:
        swarm.directory.ready(peer, 0.0)
    assert swarm.form() == []
    swarm.directory.ready(peers[2], 0.0)
    (group,) = swarm.form()
    assert [member.weight for member in group.members] == [0.0] * 3


def test_a_round_begins_by_the_samples_of_all() -> None:
    """Each counts by what it has; nobody waits for a count of steps."""
    swarm = Swarm()
    a, b = silent(swarm, "a"), silent(swarm, "b")
    for peer in (a, b):
        assert swarm.directory.averages(peer, Averages(SCHEMA, "", target=100)) == Agreed("")
    swarm.ready(a, b)
    swarm.directory.offers(a, Offers(0, 0, 60))
    swarm.directory.offers(b, Offers(0, 0, 39))
    assert swarm.form() == []
    swarm.now += 1000.0  # that nobody reaches: nobody is told anything
    assert swarm.form() == []
    swarm.directory.offers(b, Offers(0, 0, 40))
    (group,) = swarm.form()
    assert {one.number: one.weight for one in group.members} == {a: 60.0, b: 40.0}
    swarm.ready(a, b)
    swarm.directory.offers(a, Offers(0, 100, 1 << 52))  # a liar has the weight of one round
    swarm.directory.offers(b, Offers(0, 100, 100))
    (group,) = swarm.form()
    assert {one.weight for one in group.members} == {100.0}
