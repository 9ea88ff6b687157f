"""Runs of one program give the same bits, whatever order packets come in; by every link, topology
and encoding, and under injected loss. Processes and links are real, and ranks late at random."""

from __future__ import annotations

import hashlib
import os
import random
import time
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from tests.support.harness import init, run_good, run_ranks

ENV = {"LOSSYCOLL_LOG": "warning", "OMP_NUM_THREADS": "1"}
ENV |= {"LOSSYCOLL_REORDER_MIN": "0.1", "LOSSYCOLL_DEADLINE_MIN": "20"}  # late is not lost
ASKED = {**ENV, "LOSSYCOLL_DETERMINISTIC": "1"}
SHUFFLED = "reorder=0.3,dup=0.05,seed=5"
UDP = {"link": "udp", "mtu": 1500}
GROUPS: dict[str, dict[str, Any]] = {
    "as launched": {},
    "udp": {**UDP, "inject": SHUFFLED},
    "ring": {**UDP, "algorithm": "ring"},
    "int8": {**UDP, "wire": "int8", "inject": SHUFFLED},
    "fp16, loss": {**UDP, "wire": "fp16", "inject": f"loss=0.1,{SHUFFLED}"},
    "parity, loss": {**UDP, "repair": 1, "fec": 0.2, "inject": f"loss=0.2,burst=3,{SHUFFLED}"},
}


def rough(rank: int, count: int, seed: int = 0) -> Any:
    """Of every magnitude: the order of a sum shows."""
    draw = torch.Generator().manual_seed(100 * seed + rank)
    values = torch.randn(count, generator=draw)
    return values * 2.0 ** torch.randint(-6, 7, (count,), generator=draw)


def in_rank_order(world: int, count: int) -> Any:
    total = rough(0, count)
    for rank in range(1, world):
        total = total + rough(rank, count)
    return total


def bits(tensor: Any) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def rank_sums(rank: int, world: int) -> dict[str, Any]:
    """Hashes of results by name, and what was counted."""
    warnings.simplefilter("ignore", FutureWarning)  # the names of torch 2.12
    init()
    late, out, count = random.Random(), {}, 16_384 * world
    for name, options in GROUPS.items():
        group = dist.new_group(pg_options=options) if options else None
        for dtype in (torch.float32, torch.bfloat16)[: 1 + ("wire" not in options)]:
            time.sleep(late.random() * 0.01)
            whole, own = rough(rank, count).to(dtype), torch.empty(count // world, dtype=dtype)
            pending = dist.reduce_scatter_tensor(own, whole, group=group, async_op=True)
            total = whole.clone()
            dist.all_reduce(total, group=group)
            pending.wait()
            out[f"{name} {dtype}"] = bits(total.float()), bits(own.float())
        if name == "udp":
            with lossycoll.reliable():
                twice = [rough(rank, count) for _ in range(2)]
                for one in twice:
                    dist.all_reduce(one, group=group)
            out["one sum"] = all(torch.equal(one, in_rank_order(world, count)) for one in twice)
        others = (dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT)
        for op in others if name in ("as launched", "udp") else ():
            with lossycoll.reliable():
                total, at_root = rough(rank, count), rough(rank, count)
                dist.all_reduce(total, op, group=group)
                dist.reduce(at_root, 0, op, group=group)
            rooted = bits(at_root) if rank == 0 else ""
            out[f"{name} {op}"] = bits(total), rooted
    stats = lossycoll.stats()
    dist.destroy_process_group()
    counted = ("order_kept", "packets_reordered", "packets_injected", "packets_recovered")
    return {"bits": out, **{one: getattr(stats, one) for one in counted}}


def run(world: int, env: dict[str, str], hosts: Sequence[str] = ()) -> list[dict[str, Any]]:
    per_rank = {r: {"LOSSYCOLL_HOST": host} for r, host in enumerate(hosts)}
    found: list[dict[str, Any]] = run_good(rank_sums, world, env, per_rank=per_rank)
    return found


def replicas_are_equal(found: list[dict[str, Any]]) -> None:
    """What lost nothing is the same everywhere."""
    for one in found:
        for name, (total, _) in ((n, b) for n, b in one["bits"].items() if isinstance(b, tuple)):
            if "loss" not in name:
                assert total == found[0]["bits"][name][0], name


LONG = [pytest.param(*at, marks=pytest.mark.long) for at in ((4, ""), (8, "aabbaabb"))]


@pytest.mark.parametrize(("world", "hosts"), [(2, ""), (4, "abab"), *LONG])
def test_runs_give_the_same_bits(world: int, hosts: str) -> None:
    first, second = (run(world, ASKED, hosts) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one["bits"] == other["bits"]
        assert one["bits"]["one sum"], "not in the order of ranks"
    replicas_are_equal(first)
    assert all(one["packets_reordered"] > 0 < one["packets_injected"] for one in first)
    assert sum(one["packets_recovered"] for one in first) > 0
    assert (sum(one["order_kept"] for one in first) > 0) == (world > 2), "nothing was shuffled"


@pytest.mark.long
def test_without_the_option_they_differ() -> None:
    """So what is compared depends on what comes first."""
    runs = [run(4, {**ENV, "LOSSYCOLL_DETERMINISTIC": "0"}) for _ in range(2)]
    found = [[one["bits"] for one in each] for each in runs]
    assert found[0] != found[1]
    assert not any(one["order_kept"] for each in runs for one in each)


def around_the_ring(world: int, count: int) -> Any:
    """gloo's sum: part ``p`` of the tensor begins at the rank before ``p`` and goes down."""
    parts = []
    for part in range(world):
        total, *rest = (
            rough((part - step) % world, count).chunk(world)[part] for step in range(1, world + 1)
        )
        for each in rest:
            total = total + each
        parts.append(total)
    return torch.cat(parts)


def rank_gloo(rank: int, world: int) -> dict[str, bool]:
    init()
    gloo, one = dist.new_group(backend="gloo"), rough(rank, 50_000)
    two = one.clone()
    dist.all_reduce(one)
    dist.all_reduce(two, group=gloo)
    dist.destroy_process_group()
    return {
        "alike": torch.equal(one, two),
        "in rank order": torch.equal(one, in_rank_order(world, one.numel())),
        "gloo around its ring": torch.equal(two, around_the_ring(world, one.numel())),
    }


@pytest.mark.parametrize("world", [2, 4])
def test_two_ranks_give_gloos_bits(world: int) -> None:
    """With more, gloo adds each part of a tensor in another order: around its ring."""
    wanted = {"alike": world == 2, "in rank order": True, "gloo around its ring": True}
    assert run_good(rank_gloo, world, ASKED) == [wanted] * world


def rank_trains(rank: int, world: int) -> dict[str, Any]:
    """Plain DDP, as frameworks use it, of several buckets; each rank has data of its own."""
    from torch.nn.parallel import DistributedDataParallel

    init(backend=os.environ["BACKEND"])
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)
    )
    model = DistributedDataParallel(network, bucket_cap_mb=0.05)
    optimizer, late = torch.optim.Adam(model.parameters(), lr=0.01), random.Random()
    for step in range(8):
        time.sleep(late.random() * 0.02)
        inputs = rough(rank, 32 * 64, step).view(32, 64)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), inputs.roll(1, 1)).backward()
        optimizer.step()
    after = torch.nn.utils.parameters_to_vector(network.parameters()).detach()
    is_lossy = dist.get_backend() == "lossy"
    found = {
        "bits": bits(after),
        "kept": lossycoll.stats().order_kept if is_lossy else 0,
        "missing": lossycoll.stats().packets_missing if is_lossy else 0,
    }
    # DDP's reducer would take gloo's group with it, hold the GIL, and await a thread that needs it.
    del model
    dist.destroy_process_group()
    return found


def trained(backend: str, **variables: str) -> list[dict[str, Any]]:
    """What four ranks have after a training."""
    found: list[dict[str, Any]] = run_good(
        rank_trains, 4, {**ASKED, "BACKEND": backend, **variables}
    )
    return found


def test_four_ranks_of_ddp_get_the_same_parameters_in_every_run() -> None:
    """Not gloo's: its ring has another order of sums."""
    first, second = trained("lossy"), trained("lossy")
    (parameters,) = {one["bits"] for one in first + second}
    assert any(one["kept"] for one in first), "all contributions came in the order of ranks"
    assert not any(one["missing"] for one in first)
    (gloos,) = {one["bits"] for one in trained("gloo")}
    assert parameters != gloos


@pytest.mark.long
def test_four_ranks_of_ddp_lose_the_same_in_every_run() -> None:
    """Replicas differ then, each in the same way."""
    lossy = {"LOSSYCOLL_INJECT": f"loss=0.1,{SHUFFLED}", "LOSSYCOLL_LINK": "udp"}
    first, second = (trained("lossy", **lossy) for _ in range(2))
    assert [one["bits"] for one in first] == [one["bits"] for one in second]
    assert all(one["missing"] for one in first)


def rank_switch(rank: int, world: int) -> dict[str, Any]:
    """torch's switch counts at each call; what is written counts more."""
    init()
    kept, written = [], dist.new_group(pg_options={**UDP, "deterministic": 0})
    asked = dist.new_group(pg_options=UDP)

    def waited(group: Any) -> int:
        before = lossycoll.stats(group).order_kept
        for _ in range(5):
            time.sleep(0.002 * (world - rank))
            dist.all_reduce(rough(rank, 200_000), group=group)
        return lossycoll.stats(group).order_kept - before

    kept.append(waited(asked))
    torch.use_deterministic_algorithms(True)
    kept += [waited(asked), waited(written)]
    with lossycoll.lossy(deterministic=0):
        kept.append(waited(asked))
    torch.use_deterministic_algorithms(False)
    kept.append(waited(asked))
    dist.destroy_process_group()
    return {"kept": kept}


def test_torch_switch() -> None:
    found = [one["kept"] for one in run_good(rank_switch, 3, ENV)]
    sums = [sum(each) for each in zip(*found, strict=True)]
    assert [n > 0 for n in sums] == [False, True, False, False, False], sums


def rank_promise(rank: int, world: int) -> int:
    init()
    torch.use_deterministic_algorithms(True)
    for _ in range(3):
        dist.all_reduce(rough(rank, 100_000))
    time.sleep(1.2)  # figures are looked at once a second
    missing = lossycoll.stats().packets_missing
    dist.destroy_process_group()
    return missing


@pytest.mark.parametrize("how", ["seed", "measured", "reliable"])
def test_a_promise_that_cant_be_kept_is_told_once(how: str) -> None:
    """A seed's losses come again in each run; what brings them back as measured doesn't."""
    loss = {"LOSSYCOLL_INJECT": "loss=0.2,seed=3", "LOSSYCOLL_LIVENESS": "1"}
    loss |= {"LOSSYCOLL_LINK": "udp"}
    more = {
        "seed": {},
        "measured": {"LOSSYCOLL_MAX_MISSING": "0.1"},
        "reliable": {"LOSSYCOLL_DELIVERY": "reliable"},
    }[how]
    for outcome in run_ranks(rank_promise, 2, {**ENV, **loss, **more}):
        assert not outcome.error, outcome
        assert (outcome.value > 0) == (how != "reliable")
        said = outcome.stderr.count("torch.use_deterministic_algorithms(True) can't be kept")
        assert said == (how == "measured"), outcome.stderr
