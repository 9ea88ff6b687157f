"""measure_drift and DriftBound on models that fully_shard spreads over a mesh with copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lossycoll
from tests.support.harness import init, run_good
from tests.train.drift.test_measure import LOSS, bounded, close, oracle, regress


def sharded(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    init()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    out = {"measured": measured(mesh, world), "bound": bound(rank, mesh, world)}
    dist.destroy_process_group()
    return out


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_good(sharded, 4, LOSS)


def measured(mesh: Any, world: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    out: dict[str, Any] = {}
    torch.manual_seed(0)
    replicas = [nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    model.load_state_dict(replicas[0].state_dict())
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    out["equal"] = lossycoll.measure_drift(model)
    here = mesh.get_local_rank("replicate")
    with torch.no_grad():
        for parameter, wanted in zip(model.parameters(), replicas[here].parameters(), strict=True):
            part: Any = parameter
            parts = list(wanted.chunk(world // 2, 0)) + [wanted[:0]] * world
            local = part.to_local()
            local.copy_(parts[mesh.get_local_rank("shard")])
    want = oracle([dict(replica.named_parameters()) for replica in replicas])
    out["far"] = (lossycoll.measure_drift(model), want)
    with torch.no_grad():
        model(torch.ones(2, 7))  # leaves the root's parameters whole
    out["after forward"] = lossycoll.measure_drift(model)
    only = init_device_mesh("cpu", (world,))
    plain = nn.Linear(7, 5)
    fully_shard(plain, mesh=only)
    out["one replica"] = lossycoll.measure_drift(plain)
    try:
        lossycoll.measure_drift(plain, dist.group.WORLD)
    except lossycoll.UnsupportedError as error:
        out["group"] = str(error)
    uneven = nn.Sequential(nn.Linear(7, 5, bias=dist.get_rank() == 2))
    fully_shard(uneven, mesh=mesh)
    try:
        lossycoll.measure_drift(uneven)
    except lossycoll.MismatchError as error:
        out["differ"] = (error.peer, str(error))
    out["none"] = lossycoll.measure_drift(nn.Sequential()).total
    return out


def test_drift_of_sharded_models(ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]["measured"]
    for got in (rank["measured"] for rank in ranks):
        assert got["equal"].total == 0.0
        close(*got["far"])
        assert got["far"][0] == got["after forward"] == first["far"][0]
        assert got["one replica"].total == 0.0
        assert "leave it out" in got["group"]
        assert got["none"] == 0.0
    # Rank 1 shares no group with rank 2; those of all others have it as rank 0 or 1 of two.
    assert [rank["measured"]["differ"][0] for rank in ranks] == [1, None, 0, 0]
    texts = [rank["measured"]["differ"][1] for rank in ranks]
    assert all("ranks hold different parameters" in text for text in texts)
    assert "nothing more here, 0.bias torch.float32 [5], of which torch.float32 [3]" in texts[0]
    assert "nothing more here, 0.bias torch.float32 [5] on rank 0" in texts[3]


def bound(rank: int, mesh: Any, world: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    out: dict[str, Any] = {}
    for name, rest in (("without", {}), ("with", {"period": 4})):
        model = nn.Sequential(nn.Linear(40, 61), nn.Tanh(), nn.Linear(61, 40))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
        out[name] = regress(rank, model, model, 40, **rest)
    whole = nn.Linear(4, 4)
    fully_shard(whole, mesh=mesh)
    optimizer = _still(whole)
    with torch.no_grad():
        for parameter in whole.parameters():
            part: Any = parameter
            part.to_local().fill_(rank)
    with lossycoll.DriftBound(whole, optimizer, 1, repair=255):
        optimizer.step()
    values = {v for p in whole.parameters() for v in p.to_local().flatten().tolist()}  # type: ignore[attr-defined]
    out["values"] = values
    out["drift"] = lossycoll.measure_drift(whole).total
    only = nn.Linear(4, 4)
    fully_shard(only, mesh=init_device_mesh("cpu", (world,)))
    try:
        lossycoll.DriftBound(only, _still(only))
    except lossycoll.UnsupportedError as error:
        out["refused"] = str(error)
    out["injected"] = lossycoll.stats(mesh.get_group("replicate")).packets_injected
    return out


def test_hsdp_stays_together_among_copies_of_a_part(ranks: list[dict[str, Any]]) -> None:
    for rank, got in enumerate(rank["bound"] for rank in ranks):
        assert got["injected"] > 100
        assert bounded(got["with"], got["without"], 4), (got["with"], got["without"])
        assert not bounded(got["without"], got["without"], 4)
        # Ranks 0 and 2 hold copies of one part, and 1 and 3 of the other.
        assert got["values"] <= {float(rank % 2), float(rank % 2 + 2)}
        assert got["drift"] == 0.0
        assert "has no copies" in got["refused"]
    both = [rank["bound"]["values"] for rank in ranks]
    assert both[0] == both[2]
    assert len(both[0] | both[1]) > 2


def _still(model: nn.Module) -> torch.optim.SGD:
    """An optimizer whose steps change nothing."""
    return torch.optim.SGD(model.parameters(), lr=0.0)
