"""The whole surface of torch.distributed: every collective, type, layout and mode, exact.

The expected values are computed by each rank from the seeds of all. Packets are lost on purpose:
what is below ``lossy_min_bytes``, and what isn't a sum of floats, must be exact all the same.
"""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from tests.support.harness import free_port, init, run_good
from tests.support.versions import TORCH

LOSS = {
    "LOSSYCOLL_LOG": "off",
    "LOSSYCOLL_INJECT": "loss=0.05,seed=3",
    "LOSSYCOLL_DEADLINE_MIN": "0.02",
    "LOSSYCOLL_MTU": "1500",
    "LOSSYCOLL_LOSSY_MIN_BYTES": "1000000",
}


EVERY_NTH = {1: 1, 2: 2, 3: 1, 4: 3}
"""Of how many cases one is run, by world: three ranks have all of what can differ."""


def rank_table(rank: int, world: int) -> dict[str, Any]:
    from tests.support import surface_cases as cases
    from tests.support.surface_kit import EVERY, LAYOUTS, SUMMABLE, Table, operations

    warnings.simplefilter("ignore", FutureWarning)
    init(timeout=30)
    table = Table(rank, world, EVERY_NTH[world])
    for case in cases.COPIES:
        for dtype in EVERY:
            table.kit(case.__name__, case, dtype, LAYOUTS[table.turn % len(LAYOUTS)])
        for layout in LAYOUTS:
            table.kit(case.__name__, case, layout=layout)
    for case in cases.REDUCTIONS:
        for dtype in SUMMABLE:
            for op in operations(dtype):
                layout = LAYOUTS[table.turn % len(LAYOUTS)]
                table.kit(
                    f"{case.__name__} {op}",
                    lambda kit, case=case, op=op: case(kit, op),
                    dtype,
                    layout,
                )
        for layout in LAYOUTS:
            table.kit(case.__name__, case, layout=layout)
    for case, dtypes in cases.ODD:
        for dtype in dtypes:
            table.kit(case.__name__, case, dtype)

    dropped = lossycoll.stats().packets_injected if world > 1 else 0
    dist.destroy_process_group()
    return {"done": table.done, "failures": table.failures, "dropped": dropped}


@pytest.mark.in_clear
@pytest.mark.parametrize(
    "world",
    [1, pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)],
)
def test_every_collective_type_and_layout(world: int) -> None:
    outs = run_good(rank_table, world, LOSS)
    _no_failures(outs)
    assert min(out["done"] for out in outs) > 600 // EVERY_NTH[world]
    assert world == 1 or sum(out["dropped"] for out in outs) > 0, "the fault did not happen"


def rank_refused(rank: int, world: int) -> dict[str, Any]:
    from tests.support.surface_kit import Table
    from tests.support.surface_refusals import refusals

    warnings.simplefilter("ignore")
    init(timeout=30)
    group = dist.group.WORLD
    table = Table(rank, world)
    calls = lossycoll.stats().calls
    for name, call, error in refusals(group, rank, world):

        def refused(call: Any = call, error: Any = error) -> None:
            ours = error is lossycoll.UnsupportedError
            with pytest.raises(error, match=f"rank {rank}/{world}" if ours else ""):
                call()

        table.case(name, refused)
        table.case(f"{name}: no call", lambda: _equal(lossycoll.stats().calls, calls))
    t = torch.full((5,), float(rank))
    dist.all_reduce(t)
    assert (t == sum(range(world))).all()
    dist.destroy_process_group()
    return {"done": table.done, "failures": table.failures}


def _equal(got: object, want: object) -> None:
    assert got == want, (got, want)


def test_what_cannot_be_served_is_refused_and_the_group_goes_on() -> None:
    outs = run_good(rank_refused, 3, {"LOSSYCOLL_LOG": "off"})
    _no_failures(outs)
    assert min(out["done"] for out in outs) > 150


def _no_failures(outs: list[dict[str, Any]]) -> None:
    failures = [f"rank {rank}: {text}" for rank, out in enumerate(outs) for text in out["failures"]]
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:40])


# ---- groups ----


def _split_by_torch(ranks: list[list[int]]) -> Any:
    return dist.split_group(split_ranks=ranks) if TORCH >= (2, 15) else None


def rank_groups(rank: int, world: int) -> dict[str, Any]:
    from tests.support import surface_cases as cases
    from tests.support.surface_kit import Table

    warnings.simplefilter("ignore", FutureWarning)
    init(timeout=30)

    def without_the_others() -> Any:
        """A group of which the last rank need not know."""
        return dist.new_group([0, 1, 2], use_local_synchronization=True) if rank < 3 else None

    # Torch 2.13 names such a group by the number of groups that a rank is in, newer ones count it
    # where it is made: it has to be the first, or the last.
    local = without_the_others() if TORCH < (2, 14) else None
    pairs = [dist.new_group([i, (i + 1) % world]) for i in range(world)]
    groups: dict[str, Any] = {
        "local": local,
        "named": dist.new_group(backend="lossy", group_desc="a name"),
        "disjoint": [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2],
        "overlapping": pairs[rank],
        "overlapping too": pairs[(rank - 1) % world],
        "nested": dist.new_group([1, 2, 3]),
        "in the nested": dist.new_group([2, 3]),
        "of one": [dist.new_group([i]) for i in range(world)][rank],
        "not sorted": dist.new_group([3, 0, 2], sort_ranks=False),
        "subgroups": dist.new_subgroups(2)[0],
        "enumerated": dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])[0],
        "split": dist.group.WORLD.split_group([0, 1, 3], group_desc="a split"),
        "split by torch": _split_by_torch([[0, 1, 3], [2]]),
        "reliable": dist.new_group(pg_options={"delivery": "reliable"}),
    }
    if TORCH >= (2, 14):
        groups["local"] = without_the_others()
    table = Table(rank, world)
    mine = {
        name: group
        for name, group in groups.items()
        if group not in (None, dist.GroupMember.NON_GROUP_MEMBER)
    }
    # All at once: several groups in flight, from a thread each.
    with ThreadPoolExecutor(len(mine)) as pool:
        lines = [pool.submit(_in_group, cases, group, table, name) for name, group in mine.items()]
    for line in lines:
        line.result()  # raises what no case has caught
    table.case("description", lambda: _equal(groups["named"].group_desc, "a name"))
    table.case("backend", lambda: _equal(dist.get_backend(groups["named"]), "lossy"))
    if mine.get("split") is not None:
        table.case("split", lambda: _equal(groups["split"].group_desc, "a split"))

    def sparse_gradients() -> None:
        torch.manual_seed(1)
        bag = torch.nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
        parallel = torch.nn.parallel.DistributedDataParallel(bag, process_group=groups["named"])
        for step in range(2):
            parallel.zero_grad()
            parallel(torch.tensor([[rank, step, 7]])).sum().backward()
            want = torch.zeros(20)
            for place in [*range(world), *[step] * world, *[7] * world]:
                want[place] += 1 / world
            assert bag.weight.grad is not None
            torch.testing.assert_close(bag.weight.grad.to_dense(), want[:, None].expand(20, 4))

    table.case("sparse gradients", sparse_gradients)
    dist.destroy_process_group()
    return {"done": table.done, "failures": table.failures, "groups": len(mine)}


def _in_group(cases: Any, group: Any, table: Any, name: str) -> None:
    from tests.support.surface_kit import Kit

    for turn in range(2):
        for case in (cases.all_reduce, cases.all_gather, cases.all_to_all_single, cases.sparse):
            kit = Kit(
                *(group.rank(), group.size()),
                dtype=torch.float32,
                layout="dense",
                mode="async",
                group=group,
            )
            table.case(f"{name} {case.__name__} {turn}", lambda case=case, kit=kit: case(kit))


def test_groups_of_every_kind_at_the_same_time() -> None:
    outs = run_good(rank_groups, 4, LOSS)
    _no_failures(outs)
    split_by_torch = int(TORCH >= (2, 15))
    assert [out["groups"] - split_by_torch for out in outs] == [11, 11, 12, 12]


# ---- beginnings and ends ----


def rank_lives(rank: int, world: int) -> list[tuple[str, str]]:
    tcp, later, shared = (int(port) for port in os.environ["SURFACE_PORTS"].split(","))
    folder = os.environ["SURFACE_FOLDER"]
    place = {"rank": rank, "world_size": world}
    store = dist.TCPStore("127.0.0.1", shared, world, rank == 0, timedelta(seconds=30))
    names = []
    for how in (
        {"init_method": f"tcp://127.0.0.1:{tcp}", **place},
        {"init_method": f"file://{folder}/first", **place},
        {"backend": "cpu:lossy", "init_method": f"tcp://127.0.0.1:{later}", **place},
        {"store": dist.PrefixStore("one", store), **place},
        {"store": dist.PrefixStore("two", store), **place},
        {"store": dist.FileStore(f"{folder}/second", world), **place},
        {"backend": "cpu:lossy", **place},  # by the environment
    ):
        init(timeout=30, **how)
        t = torch.full((30_000,), float(rank))
        dist.all_reduce(t)
        assert (t == sum(range(world))).all()
        part = dist.new_group([world - 1, 0])
        if part is not dist.GroupMember.NON_GROUP_MEMBER:
            whole = torch.tensor([rank])
            dist.all_reduce(whole, group=part)
            assert whole == world - 1
        names.append((dist.get_backend(), dist.get_backend_config()))
        dist.barrier()
        dist.destroy_process_group()
    return names


def test_every_way_to_begin_and_to_begin_again(tmp_path: Path) -> None:
    ports = ",".join(str(free_port()) for _ in range(3))
    env = {"LOSSYCOLL_LOG": "off", "SURFACE_PORTS": ports, "SURFACE_FOLDER": str(tmp_path)}
    for names in run_good(rank_lives, 2, env, own_store=True):
        plain = ("lossy", "cpu:lossy,cuda:lossy")
        mapped = ("cpu:lossy", "cpu:lossy")
        assert names == [plain, plain, mapped, plain, plain, plain, mapped]
