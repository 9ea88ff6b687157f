"""States of ranks: what news may change, and that nobody who is lost comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lossycoll.runtime.world.rank_states import RankState, RankStates

NEWS = st.sampled_from(RankState)


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
