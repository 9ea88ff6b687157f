"""Complex numbers are pairs of floats in every collective, whoever makes the pairs.

torch itself hands ``all_reduce`` and some others floats (view_as_real); what it doesn't, the
backend treats alike: as lossy, and as exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

import lossycoll
from tests.support.harness import init, run_good

ENV = {
    "LOSSYCOLL_LOG": "off",
    "LOSSYCOLL_INJECT": "loss=0.2,seed=7",
    "LOSSYCOLL_DEADLINE_MIN": "0.02",
    "LOSSYCOLL_MTU": "1500",
}
ELEMENTS = 120_000


def rank_complex(rank: int, world: int) -> dict[str, tuple[int, bool]]:
    """By call: packets that went missing at this rank, and whether the result is exact."""
    init(timeout=30)
    own = torch.full((ELEMENTS,), complex(rank + 1, -rank))
    total = complex(sum(range(1, world + 1)), -sum(range(world)))
    out: dict[str, tuple[int, bool]] = {}

    def ask(name: str, call: Callable[[], Any], want: complex) -> None:
        before = lossycoll.stats().packets_missing
        result = call()
        missing = lossycoll.stats().packets_missing - before
        out[name] = missing, bool((result == want).all())

    def all_reduce() -> torch.Tensor:
        value = own.clone()
        dist.all_reduce(value)
        return value

    def coalesced() -> torch.Tensor:
        values = [own.clone(), own.clone()]
        dist.all_reduce_coalesced(values)
        return torch.cat(values)

    def reduce_scatter() -> torch.Tensor:
        value = torch.zeros(ELEMENTS // world, dtype=own.dtype)
        dist.reduce_scatter_single(value, own.clone())
        return value

    def reduce() -> torch.Tensor:
        value = own.clone()
        dist.reduce(value, 0)
        return value if rank == 0 else torch.tensor(total)

    def broadcast() -> torch.Tensor:
        value = own.clone()
        dist.broadcast(value, 0)
        return value

    def all_gather() -> torch.Tensor:
        rows = torch.zeros(world, ELEMENTS, dtype=own.dtype)
        dist.all_gather_single(rows, own)
        return rows[0]

    def functional() -> torch.Tensor:
        return fc.all_reduce(own, "sum", dist.group.WORLD) + 0  # only now is it waited for

    for name, call in (
        ("all_reduce", all_reduce),
        ("coalesced", coalesced),
        ("functional", functional),
        ("reduce_scatter", reduce_scatter),
    ):
        with lossycoll.lossy():
            ask(name, call, total)
        with lossycoll.reliable():
            ask(f"reliable {name}", call, total)
    ask("reduce", reduce, total)
    for name, call in (("broadcast", broadcast), ("all_gather", all_gather)):
        ask(f"reliable {name}", call, 1 + 0j)
        with lossycoll.lossy():
            ask(name, call, 1 + 0j)
    dist.destroy_process_group()
    return out


def rank_uneven(rank: int, world: int) -> None:
    """GroupContext of different sizes, one of them empty."""
    init(timeout=30)
    sizes = [3 * r for r in range(world)]
    for dtype in (torch.complex64, torch.complex128):
        parts = [torch.full((n,), complex(rank, n), dtype=dtype).conj() for n in sizes]
        output = torch.zeros(sizes[rank], dtype=dtype)
        dist.reduce_scatter(output, parts)
        want = complex(sum(range(world)), -world * sizes[rank])
        assert output.tolist() == [want] * sizes[rank]
    dist.destroy_process_group()


def test_complex_parts_of_different_sizes() -> None:
    run_good(rank_uneven, 3, {"LOSSYCOLL_LOG": "off"})


def test_complex_calls_lose_packets_and_are_exact_as_floats_are() -> None:
    outs = run_good(rank_complex, 2, ENV)
    for name in outs[0]:
        lost = max(out[name][0] for out in outs)
        exact = all(out[name][1] for out in outs)
        if name.startswith("reliable") or name == "reduce":
            assert (lost, exact) == (0, True), name
        else:
            assert lost > 0, name
            assert not exact, name
