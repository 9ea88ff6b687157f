"""Where a peer looks for a directory, and when it opens its own."""

from __future__ import annotations

import itertools
import random

import pytest

from lossycoll.runtime.swarm.directory_list import (
    AGAIN_SECONDS,
    BEGIN_SECONDS,
    MOST_HEARD,
    MOST_SERVED,
    STANDING_TRIES,
    Begin,
    DirectoryList,
    delay,
    next_pass,
)

A, B, C, D, E = ((f"10.0.0.{number}", 7000) for number in range(1, 6))


def test_what_was_known_before_comes_after_what_others_say() -> None:
    where = DirectoryList([D])
    assert where.places == [D]
    where.learn([A, B, A])
    assert where.places == [A, B, D]
    where.learn([C, B])
    assert where.places == [C, B, D, A]
    where.prefer(A, C)
    assert where.places == [A, C, B, D]
    assert set(where.heard) == {A, B, C}


def test_no_more_is_remembered_than_there_is_room_for() -> None:
    where = DirectoryList([A])
    for number in range(100):
        where.learn([("10.1.0.1", 1000 + number), B])
    assert len(where.heard) == MOST_HEARD
    assert where.places[:2] == [("10.1.0.1", 1099), B]
    assert len(where.places) == MOST_HEARD + 1
    assert ("10.1.0.1", 1000) not in where.places


def test_those_that_it_was_with_are_remembered_longest() -> None:
    where = DirectoryList([A])
    for number in range(MOST_SERVED + 3):
        where.learn([("10.2.0.1", 1000 + number), B], serves=True)
    for number in range(100):
        where.learn([("10.1.0.1", 1000 + number), B])
    served = [("10.2.0.1", 1000 + number) for number in range(3, MOST_SERVED + 3)]
    assert list(where.heard[-MOST_SERVED:]) == served
    assert len(where.heard) == MOST_HEARD + MOST_SERVED


@pytest.mark.parametrize("own", [B, C, D])
def test_its_own_is_opened_when_those_before_had_their_time(own: tuple[str, int]) -> None:
    opened: list[int] = []
    where = DirectoryList([A])
    where.learn([A, B, C, D])
    where.may_open(own, lambda: opened.append(where.tries))
    for where.tries in range(6):
        tried = [p for at, p in enumerate(where.places) if where.is_next(p, at, standby=False)]
        assert [place for place in tried if place != own] == [p for p in (A, B, C, D) if p != own]
    assert opened[0] == where.places.index(own) - 1  # A has just ended
    assert len(opened) == 6 - opened[0]


def test_none_opens_before_one_that_is_earlier_in_the_list() -> None:
    """Each draws its delays, and takes its time for a pass. The next after the first of all opens
    in its first pass."""
    draw = random.Random(3)
    for _ in range(300):
        opened = []
        for place in range(1, 6):
            due = 0.0
            for _ in range(place):
                due = next_pass(due, due + delay(draw.random()) + 0.1 * draw.random())
            opened.append(due + delay(draw.random()))
        # Half of a delay is left for the earlier one's directory to answer in.
        assert all(b - a >= AGAIN_SECONDS / 2 for a, b in itertools.pairwise(opened)), opened


def test_passes_have_pauses_however_long_they_are() -> None:
    """Places that don't answer take 2 s each."""
    assert next_pass(10.0, 30.0) == 30.0 + AGAIN_SECONDS / 4


def test_one_that_stands_by_is_waited_for() -> None:
    opened: list[int] = []
    where = DirectoryList([A])
    where.learn([A, B, C])
    where.may_open(C, lambda: opened.append(where.tries))
    for where.tries in range(STANDING_TRIES + 2):
        where.is_next(C, 2, standby=True)
    assert opened == [STANDING_TRIES, STANDING_TRIES + 1]


def test_the_first_by_address_of_those_that_are_alive_begins_a_swarm() -> None:
    """A later one begins none while an earlier one is alive, nor before its time."""
    opened: list[int] = []
    where = DirectoryList([A, C, B], Begin(B, B, lambda: opened.append(1)))
    assert not where.may_begin([B, C], 0.99 * BEGIN_SECONDS)
    assert not where.may_begin([A, B, C], 100 * BEGIN_SECONDS)
    assert not opened
    assert where.may_begin([B, C], BEGIN_SECONDS)
    assert len(opened) == 1
    where.learn([A], serves=True)
    assert not where.may_begin([B, C], BEGIN_SECONDS)  # it has been in a swarm
    assert not DirectoryList([A, C]).may_begin([], BEGIN_SECONDS)  # it doesn't listen


@pytest.mark.parametrize("first", [f"{net}.0.1" for net in ("10.0", "172.16", "192.168", "8.8")])
def test_its_own_directory_at_its_loopback_is_nobody_to_wait_for(first: str) -> None:
    """One that listens on all addresses reaches itself by the loopback, which may sort first."""
    hosts = [first, first[:-1] + "2", "2001:db8::1"]
    for host in hosts:
        known, at = (host, 7000), ("::1" if ":" in host else "127.0.0.1", 7000)
        others = [(one, 7000) for one in hosts if one != host]
        opened: list[int] = []
        begin = Begin(at, known, lambda opened=opened: opened.append(1))
        where = DirectoryList([*others, at], begin)
        assert where.may_begin([at], BEGIN_SECONDS), host
        assert where.may_begin([*others, at], BEGIN_SECONDS) == (host == hosts[0])
        assert len(opened) == 1 + (host == hosts[0])


def test_a_newcomer_that_has_one_place_to_ask_seeks_no_other() -> None:
    assert not DirectoryList([A]).seeks
    assert DirectoryList([A, B]).seeks
    assert DirectoryList([A], Begin(A, A, lambda: None)).seeks
