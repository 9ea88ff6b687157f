"""States of ranks: what news may change, and who remains. No sockets, no clock."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossycoll.runtime.world.messages import View
from lossycoll.runtime.world.rank_states import RankState, RankStates, Survivors, has_quorum

NEWS = st.sampled_from(RankState)
ALL = View(0, (0, 1, 2, 3))


@given(st.lists(NEWS, max_size=8), st.lists(NEWS, max_size=8))
def test_nobody_who_is_lost_comes_back(before: list[RankState], after: list[RankState]) -> None:
    table = RankStates(2)
    for news in before:
        table.move(0, news)
    was_lost, was_present = table.is_lost(0), table.is_present(0)
    for news in after:
        table.move(0, news)
    assert table.is_lost(0) or not was_lost
    assert was_present or not table.is_present(0)
    assert table[1] == RankState.PRESENT


@given(NEWS, NEWS)
def test_news_are_taken_or_change_nothing(now: RankState, news: RankState) -> None:
    table = RankStates(1)
    table.move(0, now)
    before = table[0]
    taken = table.move(0, news)
    assert table[0] == (news if taken else before)
    assert not table.move(0, news), "news that come twice"
    assert not taken or news != RankState.PRESENT


def test_who_is_lost_may_turn_out_to_have_ended() -> None:
    table = RankStates(3)
    assert table.move(1, RankState.LOST)
    assert table.move(1, RankState.ENDED)
    assert not table.move(1, RankState.LOST)
    assert table.lost == {1}
    assert not table.move(1, RankState.LEFT), "a goodbye of a rank that was given up"


def test_states_that_only_status_shows_are_no_news() -> None:
    table = RankStates(1)
    assert not table.move(0, RankState.STOPPED)
    assert not table.move(0, RankState.SILENT)


def test_words_of_the_status() -> None:
    words = [state.word for state in RankState]
    assert words == ["alive", "dead", "dead", "left", "aborted", "stopped", "silent", "unknown"]


# ---- the agreement on who is left ----


def four(rank: int) -> Survivors:
    return Survivors(rank, 4, 10.0)


def test_a_view_never_begins_before_the_last_one() -> None:
    made = four(0)
    made.learn([ALL, View(50, (0, 1, 2))])
    made.lose(2, ended=True)
    made.stopped(40, 0.0)
    made.report(1, {2, 3}, 41)
    assert made.decide() == View(50, (0, 1))


def test_the_coordinator_is_the_lowest_that_is_left_and_has_not_departed() -> None:
    made = four(2)
    assert made.proposer == 0
    made.lose(0, ended=False)
    assert made.proposer == 1
    made.move(1, RankState.LEFT)
    assert made.proposer == 2
    made.move(2, RankState.LEFT)
    assert made.proposer == 2, "it is here itself"


def test_longer_views_are_learned_and_shorter_ones_are_not_news() -> None:
    made = four(3)
    later = [ALL, View(4, (0, 1, 3)), View(9, (1, 3))]
    assert made.learn(later)
    assert made.lost == {0, 2}
    assert made.agreed
    assert not made.learn(later[:2])
    assert made.views == tuple(later)


@pytest.mark.parametrize(
    ("rank", "silent", "ended", "goes_on"),
    [
        (0, {3}, set(), True),
        (0, {2, 3}, set(), True),
        (0, {1, 2, 3}, set(), False),
        (3, {0, 1}, set(), False),
        (3, {0}, {1}, True),
        (3, set(), {0, 1, 2}, True),
        (0, {1, 2}, {3}, False),
    ],
)
def test_only_the_larger_part_or_the_half_with_the_lowest_goes_on(
    rank: int, silent: set[int], ended: set[int], goes_on: bool
) -> None:
    made = four(rank)
    for lost in silent:
        made.lose(lost, ended=False)
    for lost in ended:
        made.lose(lost, ended=True)
    made.stopped(1, 100.0)
    assert made.must_stop(101.0) is not goes_on
    assert made.must_stop(110.1), "an agreement isn't waited for without end"


def test_nobody_loses_itself() -> None:
    made = four(1)
    assert not made.lose(1, ended=True)
    assert made.agreed
    assert made.lose(0, ended=False)
    assert not made.lose(0, ended=True), "known, but now as ended"
    assert made.ranks(RankState.ENDED) == {0}


@given(st.randoms(use_true_random=False))
def test_survivors_agree_in_whatever_order_their_news_come(draw: random.Random) -> None:
    """Reports are doubled and reordered; the proposer may be lost on the way."""
    ranks = [four(rank) for rank in range(4)]
    victims = draw.sample(range(4), draw.randint(1, 3))
    left = [rank for rank in range(4) if rank not in victims]
    nexts = {rank: draw.randrange(100) for rank in left}
    news = [(rank, victim) for rank in left for victim in victims]
    draw.shuffle(news)
    for rank, victim in news:
        if ranks[rank].lose(victim, ended=True):
            ranks[rank].stopped(nexts[rank], 0.0)
        for teller in draw.sample(left, len(left)):
            head = ranks[teller].proposer
            if head in left and ranks[teller].lost:
                state = ranks[teller]
                ranks[head].report(teller, set(state.lost), state.next)
                ranks[head].learn(state.views)
                ranks[head].decide()
    for rank in left:
        for other in left:
            ranks[rank].learn(ranks[other].views)
    last = {ranks[rank].views for rank in left}
    assert len(last) == 1, last
    assert last.pop()[-1] == View(max(nexts.values()), tuple(left))


@given(
    st.sets(st.integers(0, 11)),
    st.lists(st.sampled_from(["one", "other", "ended"]), min_size=12, max_size=12),
)
def test_of_the_parts_of_a_network_exactly_one_has_a_quorum(of: set[int], sides: list[str]) -> None:
    """Whatever has ended counts for no part; ranks that aren't members change nothing."""
    one = {rank for rank in range(12) if sides[rank] == "one"}
    other = {rank for rank in range(12) if sides[rank] == "other"}
    rest = of & (one | other)
    assert has_quorum(one, rest) + has_quorum(other, rest) == (1 if rest else 0)


@given(st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)), st.integers(0, 11))
def test_a_quorum_outlives_a_rank_that_joins_it(of: set[int], here: set[int], rank: int) -> None:
    assert has_quorum(here | {rank}, of) >= has_quorum(here, of)
    assert has_quorum(here, of) == has_quorum(here & of, of)
