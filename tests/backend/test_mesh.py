"""DeviceMesh: each dimension's group has the options that ``backend_override`` gives it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import lossycoll
from lossycoll.options.fields import Options
from tests.support.harness import init, run_good

LOSS = {"LOSSYCOLL_INJECT": "loss=0.2,seed=7", "LOSSYCOLL_LINK": "udp", "LOSSYCOLL_MTU": "1500"}
ELEMENTS, FIRST, SUMS = 60_000, 5, 30
"""The first sums measure the links' loss, before which no bound can be kept."""
MAX_MISSING = 0.01
INTENTS = {
    "dp": ("lossy", Options(max_missing=MAX_MISSING)),
    "tp": ("lossy", Options(delivery="reliable")),
}


def mesh_of(world: int, override: Any, names: Any = ("dp", "tp")) -> Any:
    shape = (2, world // 2) if world > 2 else (1, world)
    return init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=override)


def sums(group: Any) -> dict[str, Any]:
    """What became of float sums in a group of a mesh."""
    wanted = float(sum(1 + rank for rank in dist.get_process_group_ranks(group)))
    wrong = 0
    for number in range(FIRST + SUMS):
        tensor = torch.full((ELEMENTS,), 1.0 + dist.get_rank())
        dist.all_reduce(tensor, group=group)
        wrong += int((tensor != wanted).sum()) if number >= FIRST else 0
    found = lossycoll.stats(group)
    return {
        "description": found.description,
        "wrong": wrong / (SUMS * ELEMENTS),
        "dropped": found.packets_injected,
        "missing": found.packets_missing,
        "limit": max(peer.max_missing for peer in found.peers),
        "made_up_for": found.parity_sent + found.packets_resent,
    }


def ranks_with_intents(rank: int, world: int) -> list[dict[str, Any]]:
    init()
    mesh = mesh_of(world, INTENTS)
    found = [sums(mesh.get_group(name)) for name in ("dp", "tp")]
    dist.destroy_process_group()
    return found


def test_each_dimension_has_its_own_delivery_and_bound() -> None:
    for gradients, activations in run_good(ranks_with_intents, 4, LOSS):
        assert (gradients["description"], activations["description"]) == ("mesh_dp", "mesh_tp")
        assert gradients["dropped"] > 0
        assert activations["dropped"] > 0
        assert activations["wrong"] == activations["missing"] == 0
        assert activations["limit"] < 0
        assert math.isclose(gradients["limit"], MAX_MISSING, rel_tol=1e-6)
        assert gradients["made_up_for"] > 0
        # About 0.02: 1% on each of two ways. A fifth of the packets was dropped.
        assert gradients["wrong"] < 0.08


def ranks_without(rank: int, world: int) -> list[dict[str, Any]]:
    """A mesh with options of the environment, one by numbers, and one with gloo beside lossy."""
    init()
    plain = mesh_of(world, None)
    numbered = mesh_of(world, {1: ("lossy", Options(delivery="reliable"))}, None)
    named = mesh_of(world, {"dp": "gloo", "tp": ("lossy", Options(max_missing=MAX_MISSING))})
    assert dist.get_backend(named.get_group("dp")) == "gloo"
    ones = torch.ones(3)
    dist.all_reduce(ones, group=named.get_group("dp"))
    assert ones.tolist() == [named.size(0)] * 3
    found = [sums(mesh.get_group(1)) for mesh in (plain, numbered, named)]
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.in_clear
def test_a_dimension_without_options_has_the_environments() -> None:
    for plain, reliable, bounded in run_good(ranks_without, 2, LOSS):
        assert plain["limit"] < 0
        assert plain["wrong"] > 0.1
        assert reliable["wrong"] == 0
        assert bounded["limit"] > 0
        assert bounded["wrong"] < 0.08


def rank_is_refused(rank: int, world: int) -> list[str]:
    init()
    told = []
    for of_one in (("lossy", {"delivery": "reliable"}), Options(delivery="reliable")):
        with pytest.raises((AttributeError, TypeError)) as caught:
            mesh_of(world, {"tp": of_one})
        told.append(str(caught.value))
    dist.destroy_process_group()
    return told


def test_torch_takes_nothing_but_a_pair_with_options() -> None:
    """As docs/backend.md says. If this fails, torch takes more, and the page may say so."""
    for of_dict, of_options in run_good(rank_is_refused, 2):
        assert "_timeout" in of_dict
        assert "cannot unpack" in of_options
