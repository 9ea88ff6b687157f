"""Samples of a swarm, whose state is newest, and what peers agree on: a directory in virtual
time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossycoll.runtime.swarm.directory import FIRST_GRACE, PATIENCE, SETTLE
from lossycoll.runtime.swarm.directory_tables import MOST_SAMPLES, MOST_TARGETS, Peer, Progress
from lossycoll.runtime.swarm.protocol import (
    MOST_WEIGHT,
    Agreed,
    Averages,
    Group,
    Here,
    Joined,
    Offers,
    difference,
    digest_of,
    pack,
    text_of,
    unpack,
)
from lossycoll.train.moshpit.pace import MOST_TARGET
from tests.runtime.swarm.test_directory import SCHEMA, Swarm, join, numbers


def says(**settings: object) -> Averages:
    said = text_of({"values": 10, "average": "parameters", **settings})
    return Averages(digest_of(said), "", settings=said)


def silent(swarm: Swarm, name: str, **changes: object) -> int:
    """A peer that hasn't said what it averages."""
    answer = swarm.directory.join(join(name, **changes))
    assert isinstance(answer, Joined)
    swarm.directory.here(answer.number, Here("127.0.0.1", 4000 + answer.number))
    swarm.values[answer.number] = random.Random(name).random()
    return answer.number


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shape", [(2, 2, 2), (4, 4), (3, 5)])
def test_a_full_grid_is_exact_in_whatever_order_peers_begin(
    shape: tuple[int, ...], seed: int
) -> None:
    """All are there. Then each says what it averages, and is ready, when it likes, within the time
    for which the others wait. Mostly it soon is, and sometimes hardly in time: hosts are busy."""
    draw, swarm = random.Random(seed), Swarm(*shape)
    peers = [silent(swarm, f"peer {seed} {n}") for n in range(swarm.directory.grid.cells)]
    mean = sum(swarm.values.values()) / len(peers)
    begins = {peer: draw.random() * 0.9 * FIRST_GRACE for peer in peers}
    left = dict.fromkeys(peers, 2 * len(shape))
    waits: set[int] = set()
    delays: list[float] = []
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
                delays.append(draw.random() ** 8 * 0.9 * FIRST_GRACE)
                begins[member.number] = swarm.now + delays[-1]
    assert min(delays) < 0.01
    assert max(delays) > 2 * PATIENCE
    assert max(abs(value - mean) for value in swarm.values.values()) < 1e-12


def test_a_directory_is_needed_until_others_have_had_its_owners_rounds() -> None:
    swarm = Swarm(2, 2)
    for name in "abcd":
        swarm.come(name)
    of = {peer.cell: peer.number for peer in swarm.directory.peers.values()}
    own, partner, third, fourth = of[0], of[2], of[1], of[3]
    name = swarm.directory.peers[own].name

    def is_needed() -> bool:
        return swarm.directory.is_needed(name)

    assert not is_needed()
    swarm.ready(own, partner)
    assert numbers(swarm.form()) == [sorted((own, partner))]
    assert is_needed()
    swarm.ready(third)
    assert swarm.form() == []
    assert is_needed()
    swarm.now += FIRST_GRACE + 0.01
    assert numbers(swarm.form()) == [[third]]  # without the fourth, for which nobody waits again
    assert swarm.directory.peers[fourth].skipped
    assert not is_needed()
    assert not swarm.directory.is_needed("a stranger")


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
    answer = swarm.directory.averages(b, says(every=10, outer="SGD", shapes="ab"))
    assert answer is not None
    assert "shapes=ab, wanted not set" in answer.reason
    assert difference(says(shapes="ab"), says(shapes="cd")) == "tensors of other shapes or types"
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


def leave(swarm: Swarm) -> None:
    for peer in list(swarm.directory.peers):
        swarm.directory.lost(peer)


def test_a_training_that_is_over_leaves_no_samples_to_the_next() -> None:
    """Of its peers none is left. A checkpoint of the next one's peers is newer than nothing."""
    swarm = Swarm()
    trained(swarm, 30, 12)
    leave(swarm)
    trained(swarm, 5, 7)
    leave(swarm)
    (fresh,) = trained(swarm, 5)
    loaded = swarm.come("loaded")
    swarm.directory.offers(loaded, Offers(1, 20, 0, 1))
    behind = {number: peer.behind for number, peer in swarm.directory.peers.items()}
    assert behind == {fresh: 20, loaded: 0}


@pytest.mark.parametrize("claims", [0, 1], ids=["reconnected", "restarted"])
def test_peers_that_have_all_gone_for_a_moment_go_on(claims: int) -> None:
    """A router restarts, or all machines do, of which some have a checkpoint."""
    swarm = Swarm()
    trained(swarm, 30, 12)
    leave(swarm)
    swarm.now += 1.0
    for number, since in enumerate((3, 4)):
        had = {} if claims else {"number": number, "round": 1}
        assert swarm.come(f"peer {number}", **had) == number
        swarm.directory.offers(number, Offers(1, 42, 0 if claims else since, claims))
    swarm.now += SETTLE
    swarm.ready(0, 1)
    (group,) = swarm.form()
    assert (group.samples, group.newer, len(group.members)) == (42 if claims else 49, 0, 2)
    assert group.round == (0 if claims else 1)


def test_a_training_that_is_over_leaves_no_grid_to_the_next() -> None:
    swarm = Swarm()
    for name in "abcd":
        peer = silent(swarm, name)
        assert swarm.directory.averages(peer, Averages(SCHEMA, "2x2")) == Agreed("")
    assert swarm.directory.free == 0
    leave(swarm)
    for name in "efghi":
        swarm.come(name)
    given = Swarm(2, 2)
    given.come("a")
    leave(given)
    assert given.directory.grid.shape == (2, 2)


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


def test_rounds_that_pass_while_a_newer_state_is_taken_cost_the_peer_none() -> None:
    """It has loaded an old checkpoint. Rounds pass while it takes the others' state."""
    swarm = Swarm()
    a, b = trained(swarm, 30, 12)
    late = swarm.come("late")
    swarm.directory.offers(late, Offers(1, 20, 0, 1))
    for _ in range(2):
        swarm.now += 1
        swarm.ready(a, b)
        swarm.form()
    samples = swarm.directory.peers[a].samples
    swarm.directory.offers(late, Offers(1, samples, 0))
    swarm.directory.ready(late, 0.0)
    assert swarm.form() == []  # not by itself, in a round that is over
    swarm.ready(a, b)
    assert numbers(swarm.form()) == [[a, b, late]]


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


def aimed(swarm: Swarm, target: int, names: str, **changes: object) -> list[int]:
    peers = [silent(swarm, name, **changes) for name in names]
    for peer in peers:
        assert swarm.directory.averages(peer, Averages(SCHEMA, "", target=target)) == Agreed("")
    return peers


def says_since(swarm: Swarm, peer: int, since: int) -> None:
    now = swarm.directory.peers[peer].samples
    swarm.directory.offers(peer, Offers(0, now, since))


def weights(group: Group) -> dict[int, float]:
    return {one.number: one.weight for one in group.members}


def test_a_round_is_due_by_the_samples_of_all() -> None:
    """Each counts by what it has; nobody waits for a count of steps."""
    swarm = Swarm()
    a, b, silent_one = *aimed(swarm, 100, "ab"), silent(swarm, "evaluates")
    says_since(swarm, a, 60)
    says_since(swarm, b, 39)
    swarm.now += 1000.0
    assert swarm.directory.due() == []
    says_since(swarm, b, 40)
    assert swarm.directory.due() == [a, b]
    assert swarm.directory.due() == []
    swarm.ready(a)
    assert swarm.form() == [], "b ends its step"
    says_since(swarm, b, 45)
    swarm.ready(b)
    (group,) = swarm.form()
    assert weights(group) == {a: 60.0, b: 45.0}
    assert [name for name, _ in group.absent] == [swarm.directory.peers[silent_one].name]
    says_since(swarm, a, 94)
    assert swarm.directory.due() == [], "the 5 of b count for this round"
    says_since(swarm, a, 95)
    assert swarm.directory.due() == [a, b]


def test_one_that_is_late_goes_on_by_itself() -> None:
    swarm = Swarm()
    a, b = aimed(swarm, 100, "ab")
    says_since(swarm, a, 100)
    assert swarm.directory.due() == [a, b]
    swarm.ready(a)
    swarm.now += FIRST_GRACE + 1
    assert numbers(swarm.form()) == [[a]]
    says_since(swarm, b, 10)
    swarm.ready(b)
    (group,) = swarm.form()
    assert (numbers([group]), [name for name, _ in group.absent]) == ([[b]], ["a"])
    assert swarm.form() == []
    says_since(swarm, a, 90)
    says_since(swarm, b, 20)
    assert swarm.directory.due() == [a, b]
    swarm.ready(a, b)
    (group,) = swarm.form()
    assert weights(group) == {a: 90.0, b: 20.0}
    assert group.samples == 220


def test_one_that_has_joined_before_the_first_round_and_averages_later_meets_the_others() -> None:
    """By its own count of rounds it would go on by itself for ever."""
    swarm = Swarm()
    late = silent(swarm, "c")
    peers = aimed(swarm, 100, "ab")
    for _ in range(3):
        says_since(swarm, peers[0], 100)
        assert swarm.directory.due() == peers
        swarm.ready(*peers)
        assert numbers(swarm.form()) == [peers]
    assert swarm.directory.averages(late, Averages(SCHEMA, "", target=100)) == Agreed("")
    says_since(swarm, peers[0], 100)
    assert swarm.directory.due() == [*peers, late]
    says_since(swarm, late, 10)
    swarm.ready(*peers, late)
    (group,) = swarm.form()
    assert sorted(weights(group)) == sorted([*peers, late])


def test_a_newcomer_neither_delays_a_round_nor_is_waited_for() -> None:
    swarm = Swarm()
    a, b = aimed(swarm, 100, "ab")
    says_since(swarm, a, 60)
    (new,) = aimed(swarm, 100, "c")
    swarm.directory.ready(new, 0.0)  # it catches up
    assert swarm.form() == []
    says_since(swarm, b, 40)
    assert swarm.directory.due() == [a, b, new]
    swarm.ready(a, b)
    (group,) = swarm.form()
    assert weights(group) == {a: 60.0, b: 40.0, new: 0.0}


def test_a_directory_that_takes_over_counts_on_from_what_peers_say() -> None:
    swarm = Swarm()
    peers = [*aimed(swarm, 100, "a", number=0), *aimed(swarm, 100, "b", number=1)]
    swarm.now += 10
    for peer in peers:
        swarm.directory.offers(peer, Offers(1, 5000, 40))
    assert swarm.directory.due() == []
    swarm.directory.offers(peers[0], Offers(1, 5000, 60))
    assert swarm.directory.due() == peers


@pytest.mark.parametrize("claim", [10**15, (1 << 53) - 1])
def test_a_liar_counts_for_a_whole_round_at_most(claim: int) -> None:
    swarm = Swarm()
    a, b = aimed(swarm, 100, "ab")
    says_since(swarm, a, claim)
    says_since(swarm, b, 50)
    assert swarm.directory.due() == [a, b]
    swarm.ready(a, b)
    (group,) = swarm.form()
    assert weights(group) == {a: 100.0, b: 50.0}
    assert group.samples <= 50 + MOST_TARGETS * 100


@pytest.mark.parametrize("target", [2_900_000, 3_000_001, 10**9 + 7, *range(10**6 - 1, 10**6 + 2)])
def test_no_weight_is_more_than_messages_carry(target: int) -> None:
    """Rounding included; below that, a weight is the samples."""
    swarm = Swarm()
    (peer,) = aimed(swarm, target, "a")
    for since in (target - 1, target, 2 * target):
        says_since(swarm, peer, since)
        swarm.directory.due()
        swarm.ready(peer)
        (group,) = swarm.form()
        (weight,) = weights(group).values()
        assert unpack(pack(group)) == group
        assert weight == pytest.approx(min(since, target) * min(1.0, MOST_WEIGHT / target))


@given(st.integers(1, MOST_TARGET), st.floats(0, 4))
def test_weights_of_any_target_can_be_said(target: int, share: float) -> None:
    progress, peer = Progress(), Peer(0, "a", "0f" * 16, 0.0, 0)
    progress.target, peer.since, peer.weight = target, round(share * target), 1.0
    progress.begin([peer])
    assert peer.weight is not None
    assert 0 <= peer.weight <= MOST_WEIGHT


def test_targets_may_be_beyond_what_weights_can_be() -> None:
    swarm = Swarm()
    a, b = aimed(swarm, 10**9, "ab")
    says_since(swarm, a, 750_000_000)
    says_since(swarm, b, 250_000_000)
    assert swarm.directory.due() == [a, b]
    swarm.ready(a, b)
    (group,) = swarm.form()
    found = weights(group)
    assert found[a] == pytest.approx(3 * found[b])
    assert max(found.values()) <= MOST_WEIGHT
