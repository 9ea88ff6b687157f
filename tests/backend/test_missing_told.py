"""Loss that nothing makes up for is said once while a job trains, and once at its end."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.runtime.collectives.group_stats import DeadLinks
from lossycoll.runtime.engine.reports import PeerStats
from tests.support.deaf_sockets import drop_from, drop_share
from tests.support.harness import Outcome, init, run_ranks

LOSSY = {
    "LOSSYCOLL_INJECT": "loss=5%,seed=7",
    "LOSSYCOLL_DEADLINE_MIN": "0.02",
    "LOSSYCOLL_MTU": "1500",
    "LOSSYCOLL_LIVENESS": "4",
}
STEPS = 12


def train(method: str, seconds: float, share: float = 0.0) -> tuple[int, float]:
    """Packets that were missing here, and the drift at the end. ``share``: of datagrams that a
    network drops, where nothing is injected."""
    from torch.nn.parallel import DistributedDataParallel

    init()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(400, 400))
    if share:
        assert len(set(lossycoll.topology().hosts)) == 2
        assert drop_share(share)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if method == "bound":
        lossycoll.DriftBound(model, optimizer, repair=0, max_missing=0.5)
    torch.manual_seed(1 + dist.get_rank())
    end = time.monotonic() + seconds
    for step in range(10_000):
        optimizer.zero_grad()
        model(torch.randn(4, 400)).square().mean().backward()
        optimizer.step()
        done = torch.tensor([step >= STEPS and time.monotonic() > end])
        dist.broadcast(done, 0)
        if done:
            break
    out = lossycoll.stats().packets_missing, lossycoll.measure_drift(model).relative_rms
    dist.destroy_process_group()
    return out


def rank_plain(rank: int, world: int) -> tuple[int, float]:
    return train("none", seconds=3.0)


def rank_of_two_hosts(rank: int, world: int) -> tuple[int, float]:
    return train("none", seconds=3.0, share=0.05)


def rank_in_a_group_of_its_own(rank: int, world: int) -> int:
    """Ranks 1 and 2 sum in a group that has no local rank 0, as along a dimension of a mesh."""
    init()
    group = dist.new_group([1, 2])
    missing, end, done = 0, time.monotonic() + 2.5, torch.tensor([rank == 0])
    while not done:
        for _ in range(20):
            dist.all_reduce(torch.ones(100_000), group=group)
        missing = lossycoll.stats(group).packets_missing
        done = torch.tensor([time.monotonic() > end])
        dist.broadcast(done, 1, group=group)
    dist.barrier()
    dist.destroy_process_group()
    return missing


def rank_bound(rank: int, world: int) -> tuple[int, float]:
    return train("bound", seconds=1.0)


def rank_deaf(rank: int, world: int) -> tuple[int, bool]:
    """Packets that were missing here, all from a peer that this rank doesn't hear any more."""
    init()
    dist.all_reduce(torch.ones(100_000))
    ports = [int(peer.address.rpartition(":")[2]) for peer in lossycoll.stats().peers]
    dist.barrier()
    assert drop_from([ports[1 - rank]])
    end, silent = time.monotonic() + 2.0, False
    while time.monotonic() < end or not silent:
        dist.all_reduce(torch.ones(100_000))
        time.sleep(0.1)
        silent = lossycoll.stats().peers[1 - rank].silence > 0
        assert time.monotonic() < end + 60
    missing = lossycoll.stats().packets_missing
    time.sleep(1.0)
    assert drop_from([])
    dist.destroy_process_group()
    return missing, silent


def told_by(outcome: Outcome) -> list[str]:
    return [line for line in outcome.stderr.splitlines() if "of the packets were missing" in line]


@pytest.mark.parametrize("hosts", [1, 2])
def test_plain_ddp_is_told_of_what_is_missing_and_of_the_method(hosts: int) -> None:
    """Of two hosts, whose ranks add up among themselves first, it is missing between them."""
    if hosts == 1:
        outcomes = run_ranks(rank_plain, 2, LOSSY)
    else:
        calm = {name: value for name, value in LOSSY.items() if name != "LOSSYCOLL_INJECT"}
        names = {rank: {"LOSSYCOLL_HOST": "ab"[rank // 2]} for rank in range(4)}
        outcomes = run_ranks(rank_of_two_hosts, 4, calm, per_rank=names)
    for outcome in outcomes:
        assert not outcome.error, outcome
        missing, drift = outcome.value
        assert missing > 100
        assert drift > 0
    told = told_by(outcomes[0])
    assert len(told) == 2, outcomes[0].stderr
    first, last = told
    assert "at this rank so far" in first
    assert "at all ranks, now that the group ends" in last
    for line in told:
        assert "group 0: " in line
        assert "lossycoll.DriftBound(model, optimizer)" in line
    assert not any(told_by(outcome) for outcome in outcomes[1:])


def test_a_group_without_a_local_rank_0_is_told_too() -> None:
    outcomes = run_ranks(rank_in_a_group_of_its_own, 3, LOSSY)
    assert not any(outcome.error for outcome in outcomes), list(map(str, outcomes))
    assert outcomes[1].value > 100
    assert [len(told_by(outcome)) for outcome in outcomes] == [0, 2, 0], outcomes[1].stderr
    assert "at this rank so far" in told_by(outcomes[1])[0]


def test_a_job_with_a_method_that_makes_up_for_it_is_not() -> None:
    for outcome in run_ranks(rank_bound, 2, LOSSY):
        assert not outcome.error, outcome
        assert outcome.value[0] > 100
        assert "of the packets were missing" not in outcome.stderr, outcome.stderr


def test_what_a_dead_link_takes_is_left_to_its_own_warning() -> None:
    """Some of it may be missing before the link is known to be dead."""
    seen = DeadLinks()

    def look(missing: int, silence: int = 0, other: int = 5) -> tuple[int, int]:
        peers = [peer(0, other, 0), peer(1, missing, silence)]
        seen.look(peers)
        return seen.missing, seen.unsure

    assert look(0, other=0) == (0, 0)
    assert look(50, other=0) == (0, 50)
    assert look(60, silence=1) == (60, 5)
    assert look(900, silence=1) == (900, 0)
    assert look(1000) == (1000, 0)  # it healed since the last look
    assert look(1010) == (1000, 10)
    assert look(1010) == (1000, 0)


def test_a_dead_link_is_named_and_no_method_against_loss() -> None:
    env = {
        "LOSSYCOLL_DEADLINE_MIN": "0.1",
        "LOSSYCOLL_DEADLINE_MAX": "0.5",
        "LOSSYCOLL_LINK": "udp",
    }
    more = {"LOSSYCOLL_LIVENESS": "4", "LOSSYCOLL_MTU": "1500"}
    outcomes = run_ranks(rank_deaf, 2, {**env, **more})
    assert not any(outcome.error for outcome in outcomes), list(map(str, outcomes))
    assert all(outcome.value[0] > 100 and outcome.value[1] for outcome in outcomes)
    said = outcomes[0].stderr
    assert "nothing comes from rank 1" in said
    assert told_by(outcomes[0]) == [], said


def peer(rank: int, missing: int, silence: int) -> PeerStats:
    return PeerStats(
        rank, "", 0, 0, missing, rtt_ns=0, deadline_ns=0, delivery_rate=1.0, silence=silence
    )
