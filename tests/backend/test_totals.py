"""stats() without a group is of all groups of the process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.runtime.collectives.group_stats import Counted, total
from lossycoll.runtime.engine.reports import PeerStats, Stats
from tests.support.harness import init, run_good

LOSSY = {
    "LOSSYCOLL_LOG": "off",
    "LOSSYCOLL_INJECT": "loss=20%,seed=7",
    "LOSSYCOLL_DEADLINE_MIN": "0.02",
    "LOSSYCOLL_MTU": "1500",
}


def peer(rank: int, received: int, missing: int = 0, **rest: Any) -> PeerStats:
    return PeerStats(
        rank,
        f"10.0.0.{rank}:1",
        packets_sent=received,
        packets_received=received,
        packets_missing=missing,
        rtt_ns=received,
        deadline_ns=0,
        delivery_rate=received / max(1, received + missing),
        **rest,
    )


def test_totals_are_sums_and_ranks_are_the_jobs() -> None:
    nobody, socket = peer(0, 0), object()
    pair = Stats(
        packets_missing=5, calls=2, foreign=3, world=2, lost=(1,), peers=(nobody, peer(1, 80, 20))
    )
    whole = Stats(
        packets_missing=7,
        calls=4,
        foreign=4,
        world=4,
        lost=(3,),
        peers=(nobody, peer(1, 9), peer(2, 9), peer(3, 20, offered=6, delivered=5)),
    )
    other = Stats(foreign=10, calls=1, world=1)
    found = total(
        [
            Counted(whole, range(4), socket),
            Counted(pair, [0, 3], socket),
            Counted(other, [0], object()),
        ],
        rank=0,
        world=5,
    )
    assert (found.packets_missing, found.calls, found.world, found.lost) == (12, 7, 5, (3,))
    assert found.foreign == 4 + 10, "groups of one socket count the same packets"
    assert found.groups == (whole, pair, other)
    assert found.peers[2] == peer(2, 9)
    third = found.peers[3]
    assert (third.packets_received, third.packets_missing, third.offered) == (100, 20, 6)
    assert (third.rank, third.rtt_ns, third.delivery_rate) == (3, 80, 100 / 120)
    assert (found.peers[4].packets_sent, found.peers[4].delivery_rate) == (0, 1.0)


def rank_groups(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows = mesh.get_group("dp")
    dist.all_reduce(torch.ones(60_000), group=rows)
    default, whole = lossycoll.stats(dist.group.WORLD), lossycoll.stats()
    out = {
        "default": (default.packets_missing, default.group, default.groups),
        "missing": (whole.packets_missing, lossycoll.stats(rows).packets_missing),
        "calls": (whole.calls, sum(each.calls for each in whole.groups)),
        "names": [each.description for each in whole.groups],
        "peers": [each.packets_missing > 0 for each in whole.peers],
        "place": (whole.rank, whole.world),
    }
    dist.destroy_process_group(rows)
    out["after"] = (lossycoll.stats().packets_missing, len(lossycoll.stats().groups))
    dist.destroy_process_group()
    with pytest.raises(lossycoll.UnsupportedError, match="got one of backend 'none'"):
        lossycoll.stats()
    return out


def test_losses_in_a_meshs_groups_are_in_the_totals() -> None:
    for rank, found in enumerate(run_good(rank_groups, 4, LOSSY)):
        assert found["default"] == (0, "0", ())
        missing, of_rows = found["missing"]
        assert missing == of_rows > 0
        assert found["calls"][0] == found["calls"][1] > 0
        assert found["names"] == ["default_pg", "mesh_dp", "mesh_tp"]
        assert found["peers"] == [one == (rank + 2) % 4 for one in range(4)]
        assert found["place"] == (rank, 4)
        assert found["after"] == (0, 2)


def rank_gloo_first(rank: int, world: int) -> tuple[int, int, int, int]:
    dist.init_process_group("gloo")
    with pytest.raises(lossycoll.UnsupportedError, match="backend 'gloo'"):
        lossycoll.stats()
    group = dist.new_group([0, 2], backend="lossy")
    if rank != 1:
        dist.all_reduce(torch.ones(60_000), group=group)
        found = lossycoll.stats()
        lost = found.packets_missing, found.peers[2 - rank].packets_missing
        out = (*lost, found.rank, found.world)
    else:
        out = (0, 0, rank, world)
    dist.destroy_process_group()
    return out


def test_the_default_group_may_be_of_another_backend() -> None:
    found = run_good(rank_gloo_first, 3, LOSSY)
    for rank in (0, 2):
        missing, of_peer, *place = found[rank]
        assert missing == of_peer > 0
        assert place == [rank, 3]
