"""Groups of ranks that share hosts: what they find and what it costs, and that sums are right."""

from __future__ import annotations

import gc
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.backend import sharing
from tests.support.failure_cases import CALM, QUIET, catch, holdings, left_over, must_name_the_lost
from tests.support.harness import EXACT, Ranks, init, note, run_good, run_ranks

LOUD = {**CALM, "LOSSYCOLL_LOG": "info"}


def sums(group: Any = None) -> float:
    """The first of 100,000 ones over a group, all of which must be the same."""
    t = torch.ones(100_000)
    with_all = dist.all_reduce(t, group=group, async_op=True)
    with_all.wait()
    assert (t == t[0]).all()
    return float(t[0])


def rank_of_two_hosts(rank: int, world: int) -> dict[str, Any]:
    init()
    dist.destroy_process_group()  # what is made once per process is made
    before = holdings()
    init()
    out: dict[str, Any] = {"new": holdings() - before, "world": lossycoll.topology().hosts}
    assert sums() == world
    few = dist.new_group([1, 2, 3])
    if rank:
        out["few"] = lossycoll.topology(few).hosts
        assert sums(few) == 3
    for name, options in (
        ("injected", {"inject": "dup=0.1"}),
        ("udp", {"link": "udp"}),
        ("one host", {"host": "all"}),
    ):
        group = dist.new_group(pg_options=options)
        out[name] = lossycoll.topology(group).hosts
        assert sums(group) == world
        dist.destroy_process_group(group)
    assert sums() == world
    dist.destroy_process_group()
    del few, group  # each has the store's connection
    gc.collect()
    out["left"] = left_over(before)
    return out


def test_ranks_of_two_hosts_know_it_alike_and_so_do_their_groups() -> None:
    hosts = {rank: {"LOSSYCOLL_HOST": "ab"[rank // 2]} for rank in range(4)}
    flat = (0, 1, 2, 3)
    large = {**CALM, "LOSSYCOLL_MTU": "65535"}  # of packets larger than what memory carries
    for rank, found in enumerate(run_good(rank_of_two_hosts, 4, large, per_rank=hosts)):
        assert found["world"] == (0, 0, 1, 1)
        assert found.get("few", (0, 1, 1)) == (0, 1, 1)
        assert (found["injected"], found["udp"], found["one host"]) == (flat, flat, (0,) * 4)
        assert not found["left"], rank
        threads = {name: n for name, n in found["new"].items() if name.startswith("thread")}
        others = sum(n for name, n in found["new"].items() if not name.startswith("thread"))
        assert sum(threads.values()) <= 4, threads
        assert others <= 15 + 3 * 3, found["new"]


def rank_that_asks(rank: int, world: int) -> list[Any]:
    out = []
    for options in ({}, {"link": "udp"}, {"inject": "dup=0.1"}, {"site": "ab"[rank]}):
        import torch.distributed as dist

        init(pg_options=options)
        topology = lossycoll.topology()
        assert sums() == world
        out.append((topology.hosts, topology.sites))
        dist.destroy_process_group()
    return out


def test_ranks_share_their_machine_unless_they_are_told_not_to() -> None:
    for outcome in run_ranks(rank_that_asks, 2, LOUD):
        assert not outcome.error, str(outcome)
        apart = ((0, 1), (0, 0))
        assert outcome.value == [((0, 0), (0, 0)), apart, apart, ((0, 1), (0, 1))]
        events = [line for line in outcome.stderr.splitlines() if "event=apart" in line]
        assert len(events) == 2, outcome.stderr
        assert "link is 'udp'" in events[0]
        assert "inject is set" in events[1]
        ready = [line for line in outcome.stderr.splitlines() if "event=ready" in line]
        assert "hosts=1 local=0,1" in ready[0]
        assert "hosts=" not in ready[1]
        assert "sites=2" in ready[3]


def rank_of_a_clone(rank: int, world: int) -> Any:
    """Rank 1 says a name at which nobody listens, as from another machine of the same boot id."""
    if rank == 1:

        class Elsewhere(sharing.DescriptorExchange):
            def __init__(self, most: int) -> None:
                super().__init__(most)
                self.name = "lossycoll-elsewhere"

        sharing.DescriptorExchange = Elsewhere  # type: ignore[misc]
    init()
    hosts = lossycoll.topology().hosts
    assert sums() == world
    dist.destroy_process_group()
    return hosts


def test_ranks_that_only_look_as_if_they_shared_a_machine_use_udp() -> None:
    for outcome in run_ranks(rank_of_a_clone, 3, LOUD):
        assert not outcome.error, str(outcome)
        assert outcome.value == (0, 1, 0)
        assert outcome.stderr.count("event=apart") == 1, outcome.stderr


def rank_with_a_site(rank: int, world: int) -> tuple[str, str]:
    caught = catch(init)
    return caught.kind, caught.text


@pytest.mark.parametrize("alone", [0, 2])
def test_a_site_of_one_rank_alone_ends_init_on_all(alone: int) -> None:
    site = {alone: {"LOSSYCOLL_SITE": "east"}}
    for kind, text in run_good(rank_with_a_site, 3, CALM, per_rank=site):
        assert kind == "RendezvousError"
        assert f"option site is 'east' on rank {alone} and not set on rank" in text


def rank_that_sums_for_long(rank: int, world: int) -> Any:
    init()
    hosts = lossycoll.topology().hosts
    t = torch.ones(1 << 20)

    def sum_for_ever() -> None:
        while True:
            t.fill_(1)
            dist.all_reduce(t)
            assert (t == world).all(), "memory of a rank that was killed was added up"
            note("ready")

    return hosts, catch(sum_for_ever), catch(dist.barrier).kind


@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_rank_killed_while_others_read_its_memory_is_named_and_no_sum_is_wrong(
    victim: int,
) -> None:
    per_rank = {rank: {"LOSSYCOLL_HOST": "ab"[rank // 2]} for rank in range(4)}
    with Ranks(rank_that_sums_for_long, 4, {**QUIET, **EXACT}, per_rank=per_rank) as ranks:
        for number in range(4):
            ranks.wait_for(number, "ready")
        since = ranks.signal(victim, signal.SIGKILL)
        survivors = ranks.collect(60, but=[victim])
    for outcome in survivors:
        assert not outcome.error, str(outcome)
        hosts, caught, again = outcome.value
        assert hosts == (0, 0, 1, 1)
        must_name_the_lost(
            caught, "all_reduce", rank=outcome.rank, world=4, victim=victim, since=since
        )
        assert again == "PeerLostError"


def rank_that_may_be_alone(rank: int, world: int) -> Any:
    init()
    hosts = lossycoll.topology().hosts
    assert sums() == world
    with lossycoll.reliable():
        assert sums() == world
    parts = [torch.empty(50_000) for _ in range(world)]
    dist.all_gather(parts, torch.full((50_000,), float(rank)))
    assert [float(part[0]) for part in parts] == list(range(world))
    t = torch.full((50_000,), float(rank))
    dist.broadcast(t, world - 1)
    assert (t == world - 1).all()
    into = torch.empty(50_000)
    dist.reduce_scatter(into, [torch.ones(50_000) for _ in range(world)])
    assert (into == world).all()
    dist.destroy_process_group()
    return hosts


@pytest.mark.parametrize(
    "names", ["aab", pytest.param("abb", marks=pytest.mark.long), "abab", "aabccc"]
)
def test_hosts_of_any_sizes_get_the_same_sums(names: str) -> None:
    """A rank that is alone has no memory that it shares."""
    per_rank = {rank: {"LOSSYCOLL_HOST": name} for rank, name in enumerate(names)}
    env = {**CALM, **EXACT}
    wanted = tuple(sorted(set(names)).index(name) for name in names)
    for hosts in run_good(rank_that_may_be_alone, len(names), env, per_rank=per_rank):
        assert hosts == wanted
