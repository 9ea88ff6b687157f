"""Sites as ranks name them, or as they learn them from round trips."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.backend import sharing
from lossycoll.backend.sharing import compare_sites, learn_sites
from lossycoll.errors import RendezvousError
from lossycoll.plan import Topology
from lossycoll.runtime.engine.failures import Where
from tests.support.failure_cases import CALM
from tests.support.harness import init, run_good
from tests.support.shared_memory import Meeting, at_once

NEAR, FAR = 0.0003, 0.03
HOSTS = (0, 0, 1, 2, 3, 3)
"""The hosts of the ranks; those of an odd and those of an even number are at one place each."""
SITES = (0, 0, 1, 0, 1, 1)
PLACES = [("10.0.0.1", 100 + rank) for rank in range(6)]

_Places = Mapping[int, tuple[str, int]]


def must_refuse(sites: list[str], *said: str) -> None:
    for rank in range(len(sites)):
        with pytest.raises(RendezvousError) as caught:
            compare_sites(Where(rank, len(sites)), sites)
        text = str(caught.value)
        assert text.startswith(f"rank {rank}/{len(sites)}: option site is ")
        assert all(part in text for part in (*said, "LOSSYCOLL_SITE")), text
        assert caught.value.peer != rank


def test_a_site_that_only_some_have_is_refused_on_all() -> None:
    compare_sites(Where(0, 2), ["", ""])
    compare_sites(Where(0, 2), ["a", "b"])
    must_refuse(
        ["east", "", "west"],
        "option site is 'east' on rank 0 and not set on rank 1",
        "2 of 3 ranks have one",
    )


def test_a_site_that_some_name_and_others_learn_is_refused_on_all() -> None:
    compare_sites(Where(0, 2), ["auto", "auto"])
    must_refuse(
        ["east", "auto", "auto"],
        "option site is 'auto' on rank 1 and 'east' on rank 0",
        "2 of 3 ranks have 'auto'",
    )


def learn(
    measure: Callable[[int, int], float],
    change: Callable[[int, Any], Any] = lambda rank, said: said,
    hosts: tuple[int, ...] = HOSTS,
) -> tuple[Topology, list[str], list[tuple[int, int]]]:
    """What ranks on ``hosts`` find, the rounds, and who has measured to whom. ``change``: what a
    rank says in the round, by rank."""
    topology = Topology.of_labels(hosts, [0] * len(hosts), 7)
    meeting = Meeting(topology.world)
    asked: list[tuple[int, int]] = []

    def run(rank: int) -> Topology:
        mine = topology.hosts[rank]
        own = meeting.of(rank)

        class Changed:
            def exchange(self, name: str, value: Any, meanwhile: Any = lambda: None) -> list[Any]:
                return own.exchange(name, change(rank, value), meanwhile)

        def measured(places: _Places) -> dict[int, float]:
            assert all(
                place == PLACES[topology.members_of_hosts[other][0]]
                for other, place in places.items()
            )
            asked.extend((mine, other) for other in places)
            found = {other: measure(mine, other) for other in places}
            return {other: seconds for other, seconds in found.items() if seconds}

        return learn_sites(Where(rank, topology.world), Changed(), topology, PLACES, measured)

    found = set(at_once(topology.world, run))
    assert len(found) == 1, "ranks differ"
    (one,) = found
    assert (one.hosts, one.host_packets) == (topology.hosts, 7)
    return one, meeting.rounds, asked


def by_place(a: int, b: int) -> float:
    return FAR if (a - b) % 2 else NEAR


def test_all_ranks_learn_the_same_from_one_measurement_of_each_pair_of_hosts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lossycoll")
    found, rounds, asked = learn(by_place)
    assert found.sites == SITES
    assert rounds == ["round_trips"]
    pairs = [(min(pair), max(pair)) for pair in asked]
    assert sorted(pairs) == [(a, b) for a in range(4) for b in range(a + 1, 4)]
    (line,) = caplog.records
    said = line.fields  # type: ignore[attr-defined]
    assert (said["event"], said["rank"], said["sites"]) == ("sites", 0, 2)
    assert said["ranks"] == "0,1,3 2,4,5"
    assert "at most 0.3 ms within a site, and at least 30 ms between two" in said["why"]


@pytest.mark.parametrize(
    ("measure", "why"),
    [
        (lambda a, b: NEAR, "have no gap"),
        (lambda a, b: 0.0, "only 0 of 6 round trips are known"),
        (lambda a, b: FAR if {a, b} == {0, 1} else NEAR, "linked by hosts"),
        (lambda a, b: by_place(a, b) if 0 not in (a, b) else 0.0, "no round trip is known"),
    ],
)
def test_what_leaves_a_doubt_is_one_site(
    measure: Callable[[int, int], float], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lossycoll")
    assert learn(measure)[0].n_sites == 1
    assert why in caplog.text


def test_two_hosts_measure_nothing() -> None:
    found, rounds, asked = learn(by_place, hosts=(0, 0, 1))
    assert (found.n_sites, rounds, asked) == (1, [], [])


@pytest.mark.parametrize("said", [None, "text", [1], {"1": 2}, [-5, "x", True], [float("nan")] * 2])
def test_what_a_rank_says_that_is_no_measurement_counts_as_none(said: Any) -> None:
    """Rank 5, which is nobody's first, is not listened to at all."""

    def change(rank: int, value: Any) -> Any:
        return said if rank in (0, 5) else value

    # Host 0 measures to host 1, and to host 2 that is near it; hosts 2 and 3 to the others.
    assert learn(by_place, change)[0].n_sites == 1
    assert learn(by_place, lambda rank, value: said if rank == 5 else value)[0].sites == SITES


def rank_that_learns(rank: int, world: int) -> dict[str, Any]:
    asked: list[_Places] = []

    def pretended(places: _Places) -> dict[int, float]:
        import socket

        asked.append(places)
        for place in places.values():
            socket.create_connection(place, 20).close()  # somebody listens there
        return {other: by_place(rank, other) for other in places}

    sharing.round_trips = pretended  # type: ignore[attr-defined,assignment]
    init()
    few = dist.new_group([0, 2, 3], pg_options={"mtu": 1400})
    out = {
        "all": lossycoll.topology().sites,
        "few": () if rank == 1 else lossycoll.topology(few).sites,
        "asked": len(asked),
        "foreign": lossycoll.stats().control_foreign,
    }
    with lossycoll.reliable():
        for group in (None, few):
            t = torch.full((60_000,), 2.0**rank)
            if group is None or rank != 1:
                dist.all_reduce(t, group=group)
                assert (t == (15 if group is None else 13)).all()
    dist.destroy_process_group()
    return out


def test_a_job_learns_its_sites_and_a_group_with_a_host_of_its_own_learns_them_anew() -> None:
    environment = {**CALM, "LOSSYCOLL_SITE": "auto"}
    per_rank = {rank: {"LOSSYCOLL_HOST": str(rank)} for rank in range(4)}
    for rank, found in enumerate(run_good(rank_that_learns, 4, environment, per_rank=per_rank)):
        assert found["all"] == (0, 1, 0, 1)
        assert found["foreign"] == 0
        assert found["few"] == (() if rank == 1 else (0, 1, 1))
        assert found["asked"] == (1 if rank == 1 else 2)
