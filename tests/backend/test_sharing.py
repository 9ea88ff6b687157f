"""Who shares a host: what ranks that look alike find out, whatever keeps them apart."""

from __future__ import annotations

import json
import logging
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from lossycoll.backend import sharing
from lossycoll.backend.sharing import (
    Offer,
    Sharing,
    alike,
    hosts_of,
    is_crowded,
    open_sharing,
    share,
    topology_of,
)
from lossycoll.errors import EngineError
from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.net.descriptor_exchange import DescriptorExchange
from lossycoll.runtime.net.machine import core_mask, this_machine
from tests.support.shared_memory import BYTES, Meeting, at_once, memory

TOKEN = "the world's"
PAYLOAD, SHARED_PAYLOAD = 8896, 65_024


class Host:
    """As much of the engine's host as is asked here."""

    def __init__(self, topology: Topology | None = None, error: str = "") -> None:
        self.own: tuple[int, int] | None = None
        self._asleep = -1
        self.shared_with: Sequence[int] = ()
        self.topology = topology
        self._error = error

    def share(self, processes: Sequence[int]) -> tuple[int, int]:
        if self._error:
            raise EngineError(self._error)
        self.shared_with = processes
        self._asleep, wake = os.pipe()
        self.own = (memory(), wake)
        return self.own

    def link(self, number: int = 0) -> Any:
        return SimpleNamespace(payload_bytes=SHARED_PAYLOAD if number else PAYLOAD)

    def close(self) -> None:
        for descriptor in (*self.own, self._asleep) if self.own else ():
            os.close(descriptor)


@dataclass
class Outcome:
    """What ranks found out, which must be the same for all; ``rounds``: of the rendezvous."""

    topology: Topology
    rounds: list[str]
    shared_with: list[Sequence[int]]


def meet(
    options: Sequence[Options],
    *,
    change: Callable[[int, Sharing], Sharing] = lambda rank, own: own,
    errors: dict[int, str] | None = None,
) -> Outcome:
    """Ranks with these options meet; ``change`` alters what one offers, by rank, and ``errors`` are
    those of its host."""
    world = len(options)
    before = len(os.listdir("/proc/self/fd"))
    own = [change(rank, open_sharing(one, world)) for rank, one in enumerate(options)]
    offers = [Offer.from_json(one.offer.to_json()) for one in own]
    hosts = [Host(error=(errors or {}).get(rank, "")) for rank in range(world)]
    meeting = Meeting(world)

    def run(rank: int) -> Topology:
        where = Where(rank, world)
        host: Any = hosts[rank]
        topology, descriptors = share(where, meeting.of(rank), host, own[rank], offers, TOKEN)
        here = topology.members_of_hosts[topology.hosts[rank]]
        assert descriptors.keys() == set(here) - {rank}
        for other, (taken, _) in descriptors.items():
            mine = hosts[other].own
            assert mine is not None
            assert os.pread(taken, BYTES, 0).startswith(f"{mine[0]};".encode())
        return topology

    topologies = at_once(world, run)
    for one in own:
        one.close()
    for host in hosts:
        host.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(set(topologies)) == 1, topologies
    return Outcome(topologies[0], meeting.rounds, [host.shared_with for host in hosts])


def test_ranks_of_one_machine_share_it() -> None:
    found = meet([Options()] * 3)
    assert found.topology == Topology((0, 0, 0), (0, 0, 0), SHARED_PAYLOAD // PAYLOAD)
    assert found.rounds == ["sent", "shared"]
    assert found.shared_with == [(0, 1, 2)] * 3


@pytest.mark.parametrize(
    ("options", "hosts", "sites"),
    [
        ([{"host": "a"}, {"host": "b"}, {"host": "a"}, {"host": "b"}], (0, 1, 0, 1), (0,) * 4),
        ([{"site": "x"}, {"site": "x"}, {"site": "y"}, {"site": "y"}], (0, 0, 1, 1), (0, 0, 1, 1)),
        ([{}, {"link": "udp"}, {}, {"host": "b"}], (0, 1, 0, 2), (0,) * 4),
    ],
)
def test_labels_and_links_set_ranks_of_one_machine_apart(
    options: list[dict[str, str]],
    hosts: tuple[int, ...],
    sites: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Labels say so, and nothing is logged; a link says why."""
    caplog.set_level(logging.INFO, "lossycoll")
    found = meet([Options(**one) for one in options])
    assert (found.topology.hosts, found.topology.sites) == (hosts, sites)
    assert bool(caplog.records) == any("link" in one for one in options), caplog.text


@pytest.mark.parametrize(
    "options",
    [
        [Options(link="udp")] * 3,
        [Options(inject="loss=0.1")] * 3,
        [Options(host=name) for name in "abc"],
    ],
)
def test_where_nobody_could_share_there_is_no_round_more(options: list[Options]) -> None:
    found = meet(options)
    assert found.topology == Topology.flat(3)
    assert found.rounds == []


def elsewhere(rank: int, own: Sharing) -> Sharing:
    """Rank 2 is in another network namespace."""
    if rank != 2 or own.offer.machine is None:
        return own
    machine = replace(own.offer.machine, network=7)
    return replace(own, offer=replace(own.offer, machine=machine))


def says_another_name(rank: int, own: Sharing) -> Sharing:
    """Nobody listens where rank 1 says it does."""
    return replace(own, offer=replace(own.offer, socket="nowhere")) if rank == 1 else own


@pytest.mark.parametrize(
    ("change", "hosts", "why"),
    [
        (elsewhere, (0, 0, 1, 0), "another user's, or in a container with other namespaces"),
        (says_another_name, (0, 1, 0, 0), "Connection refused"),
    ],
)
def test_a_rank_that_cant_be_reached_is_a_host_of_its_own(
    change: Any, hosts: tuple[int, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lossycoll")
    found = meet([Options()] * 4, change=change)
    assert found.topology.hosts == hosts
    lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert sorted(line["rank"] for line in lines) == [0, 1, 2, 3], "one line each"
    assert {line["event"] for line in lines} == {"apart"}
    (alone,) = (rank for rank in range(4) if hosts.count(hosts[rank]) == 1)
    assert {line["ranks"] for line in lines if line["rank"] != alone} == {str(alone)}
    assert why in next(line["why"] for line in lines if line["rank"] != alone)


def test_a_rank_without_memory_is_a_host_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lossycoll")
    found = meet([Options()] * 3, errors={1: "no memory for it"})
    assert found.topology.hosts == (0, 1, 0)
    assert found.topology.host_packets == SHARED_PAYLOAD // PAYLOAD
    assert all("no memory for it" in record.getMessage() for record in caplog.records)


def test_a_machine_whose_memory_is_nearly_full_isnt_asked_for_any(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lossycoll")
    monkeypatch.setattr(sharing, "memory_room", lambda: 1000.0)
    found = meet([Options()] * 2)
    assert found.topology == Topology.flat(2)
    assert found.shared_with == [(), ()]
    assert "1e+03 bytes of memory are free" in caplog.text


def test_a_kernel_without_abstract_sockets_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(most: int) -> DescriptorExchange:
        raise OSError(97, "Address family not supported")

    monkeypatch.setattr(sharing, "DescriptorExchange", refused)
    own = open_sharing(Options(), 2)
    assert (own.exchange, own.offer.socket) == (None, "")
    assert own.offer.why == "there are no abstract Unix sockets here: Address family not supported"


def test_ranks_without_proc_go_by_udp_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unmounted() -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/self/ns/net")

    caplog.set_level(logging.INFO, "lossycoll")
    monkeypatch.setattr(sharing, "this_machine", unmounted)
    assert meet([Options()] * 2).topology == Topology.flat(2)
    assert len(caplog.records) == 2
    assert all("/proc/self/ns/net" in record.getMessage() for record in caplog.records)


def test_injection_makes_each_rank_a_host_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lossycoll")
    assert meet([Options(inject="loss=0.1")] * 2).topology == Topology.flat(2)
    assert len(caplog.records) == 2
    assert all("each rank counts as a host of its own" in r.getMessage() for r in caplog.records)


def test_a_group_has_the_topology_of_its_members_and_none_where_it_injects(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host: Any = Host(Topology((0, 0, 1, 1), (0, 0, 1, 1), 7))
    members = [1, 2, 3]
    with caplog.at_level(logging.INFO, logger="lossycoll"):
        whole = topology_of(Where(1, 3), host, members, Options())
        assert whole == Topology((0, 1, 1), (0, 1, 1), 7)
        assert not caplog.records
        injected = topology_of(Where(1, 3), host, members, Options(inject="loss=0.1"))
        assert injected == Topology((0, 1, 2), (0, 1, 1))
        assert "event=apart ranks=2 " in caplog.records[0].getMessage()
        topology_of(Where(0, 3), host, members, Options(inject="loss=0.1"))
    assert len(caplog.records) == 1, "rank 0 has a host of its own"


def test_ranks_are_alike_by_machine_and_labels() -> None:
    machine = this_machine()
    other = replace(machine, network=1)
    offers = [
        Offer(machine, ("", ""), "s0"),
        Offer(other, ("", ""), "s1"),
        Offer(machine, ("", ""), "s2"),
        Offer(machine, ("", ""), "", "no socket"),
        Offer(None, ("", ""), "s4"),
        Offer(other, ("", ""), "s5"),
        Offer(machine, ("h", ""), "s6"),
    ]
    assert alike(offers) == [(0, 2), (1, 5), (3,), (4,), (6,)]


def test_a_machine_is_crowded_where_more_ranks_than_cores_are_on_it() -> None:
    machine = this_machine()
    other = replace(machine, network=1)

    def crowded(*cores: int, limit: float = math.inf, elsewhere: int = 0b1) -> bool:
        offers = [Offer(machine, ("", ""), "", cores=mask) for mask in cores]
        offers += [Offer(other, ("", ""), "", cores=elsewhere), Offer(None, ("", ""), "")]
        return is_crowded(0, offers, limit)

    assert not crowded(0b11, 0b11)
    assert crowded(0b11, 0b11, 0b11)
    assert not crowded(0b01, 0b10), "each has one of its own"
    assert crowded(0b10, 0b10), "both have the same one"
    assert crowded(0b1111, 0b1111, limit=1.5)
    assert not crowded(0b1111, 0b1111, limit=2.0)
    assert not crowded(0b1)
    assert not is_crowded(0, [Offer(None, ("", ""), "")] * 3, 1.0), "who knows"


def test_an_offer_says_which_cores_it_has() -> None:
    own = open_sharing(Options(link="udp"), 2)
    assert own.offer.cores == core_mask()
    assert Offer.from_json(json.loads(json.dumps(own.offer.to_json()))).cores == core_mask()
    own.close()


def test_a_host_is_a_set_of_which_each_has_each_others() -> None:
    everyone = [[0, 1, 2, 3]]
    all_of_all = [{0, 1, 2, 3} - {rank} for rank in range(4)]
    assert hosts_of(everyone, all_of_all) == [0, 0, 0, 0]
    assert hosts_of(everyone, [{1}, {0}, {3}, {2}]) == [0, 0, 1, 1], "cloned images"
    assert hosts_of(everyone, [{1, 2, 3}, {0, 2, 3}, {0, 1}, {0, 1, 2}]) == [0, 0, 0, 1]
    assert hosts_of(everyone, [set(), {0, 2, 3}, {0, 1, 3}, {0, 1, 2}]) == [0, 1, 1, 1]
    assert hosts_of([[0, 2], [1, 3]], all_of_all) == [0, 1, 0, 1], "only those that are alike"


def test_hosts_are_cliques_whatever_failed() -> None:
    draw = random.Random(1)
    for _ in range(300):
        world = draw.randint(1, 8)
        taken = [{r for r in range(world) if draw.random() < 0.7} for _ in range(world)]
        hosts = hosts_of([list(range(world))], taken)
        for a in range(world):
            for b in range(world):
                if a != b and hosts[a] == hosts[b]:
                    assert b in taken[a]
                    assert a in taken[b]
