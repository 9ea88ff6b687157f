"""The short forms of a process group's methods, as gloo has them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lossycoll.backend.overloads import METHODS, long_form
from tests.support.harness import init, run_good

SECONDS = timedelta(seconds=20)


def short_calls(group: Any, rank: int, world: int) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Each makes a call and returns the tensors that it fills."""
    most, total = dist.ReduceOp.MAX, dist.ReduceOp.SUM
    root = world - 1

    def mine(n: int = 6) -> torch.Tensor:
        return torch.arange(n, dtype=torch.float32) + 10 * rank

    def many(n: int = 6) -> list[torch.Tensor]:
        return [mine(n) + 100 * i for i in range(world)]

    def filled(method: Callable[..., Any], *given: Any, **named: Any) -> list[torch.Tensor]:
        method(*given, **named).wait()
        values = [*given, *named.values()]
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        return tensors + [t for v in values if isinstance(v, list) for t in v if torch.is_tensor(t)]

    def at_root(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors if rank == root else []

    rows = 2 * world
    return {
        "allreduce(t)": lambda: filled(group.allreduce, mine()),
        "allreduce(t, op)": lambda: filled(group.allreduce, mine(), most),
        "allreduce([t], op)": lambda: filled(group.allreduce, [mine()], most),
        "allreduce([t])": lambda: filled(group.allreduce, [mine()]),
        "allreduce(tensor=, op=)": lambda: filled(group.allreduce, tensor=mine(), op=most),
        "allreduce(t, op, s)": lambda: filled(group.allreduce, mine(), total, SECONDS),
        "broadcast(t, root)": lambda: filled(group.broadcast, mine(), root),
        "broadcast(t, root=)": lambda: filled(group.broadcast, mine(), root=root, timeout=SECONDS),
        "reduce(t, root)": lambda: at_root(filled(group.reduce, mine(), root)),
        "reduce(t, root, op)": lambda: at_root(filled(group.reduce, mine(), root, most)),
        "allgather(ts, t)": lambda: filled(group.allgather, many(), mine()),
        "allgather(ts, t, s)": lambda: filled(group.allgather, many(), mine(), SECONDS),
        "gather(ts, t, root)": lambda: filled(group.gather, at_root(many()), mine(), root),
        "scatter(t, ts, root)": lambda: filled(group.scatter, mine(), at_root(many()), root),
        "reduce_scatter(t, ts)": lambda: filled(group.reduce_scatter, mine(), many()),
        "reduce_scatter(t, ts, op)": lambda: filled(group.reduce_scatter, mine(), many(), most),
        "alltoall_base(t, t, [], [])": lambda: filled(
            group.alltoall_base, mine(rows), mine(rows), [], []
        ),
        "alltoall_base(..., s)": lambda: filled(
            group.alltoall_base, mine(rows), mine(rows), [], [], SECONDS
        ),
        "barrier()": lambda: filled(group.barrier),
        "barrier(timeout=)": lambda: filled(group.barrier, timeout=SECONDS),
    }


def rank_short_forms(rank: int, world: int) -> list[str]:
    init()
    lossy, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    of_lossy, of_gloo = short_calls(lossy, rank, world), short_calls(gloo, rank, world)
    for name, call in of_lossy.items():
        for got, wanted in zip(call(), of_gloo[name](), strict=True):
            assert torch.equal(got, wanted), (name, got, wanted)
    dist.destroy_process_group()
    return list(of_lossy)


def test_short_forms_give_what_gloo_gives() -> None:
    done = run_good(rank_short_forms, 2, {"LOSSYCOLL_LOG": "off"})
    short = {row.also or name for name, row in METHODS.items() if row.values}
    assert not {name for name in short if not any(one.startswith(name) for one in done[0])}


def rank_join(rank: int, world: int) -> list[float]:
    from torch import nn
    from torch.distributed.algorithms.join import Join

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    torch.manual_seed(0)
    init()
    model = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Join([model]):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            model(torch.full((3, 4), float(step))).sum().backward()
            optimizer.step()
    dist.destroy_process_group()
    return [p.sum().item() for p in model.parameters()]


def test_ranks_of_unlike_length_join_with_parameters_that_nobody_used() -> None:
    first, second = run_good(rank_join, 2, {"LOSSYCOLL_LOG": "off"})
    assert first == second, "the last one to join hands out its model"
    assert len(first) == 4


@pytest.mark.parametrize(
    ("name", "given", "named", "what"),
    [
        ("broadcast", (torch.ones(1),), {}, "'root'"),
        ("allgather", ([torch.ones(1)],), {}, "'input_tensors'"),
        ("allreduce", (torch.ones(1), None, None, 3), {}, "1 arguments more"),
        ("allreduce", (torch.ones(1),), {"root": 3}, "1 arguments more"),
    ],
)
def test_what_has_neither_form_is_a_type_error(
    name: str, given: tuple[Any, ...], named: dict[str, Any], what: str
) -> None:
    with pytest.raises(TypeError, match=what):
        long_form(name, METHODS[name], given, named)
