"""A call like one before is served by what was decided then: what ranks compare, results and errors
are those of the whole pipeline, and calls that only look alike go through it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lossycoll
from tests.support.harness import EXACT, init, run_good


class Recorder:
    """Notes every call as it is submitted, and whether it came by ``run_again``."""

    def __init__(self, group: Any, *, again: bool) -> None:
        dispatcher = group._dispatcher
        self.calls: list[tuple[object, ...]] = []
        self.again = 0
        issue, run_again = dispatcher.health.issue, dispatcher.run_again

        def noted(call: Any) -> None:
            self.calls.append((*call.key, call.operations))
            issue(call)

        def counted(tensors: Any, opts: Any) -> Any:
            work = run_again(tensors, opts) if again else None
            self.again += work is not None
            return work

        dispatcher.health.issue, dispatcher.run_again = noted, counted


def rank_calls(rank: int, world: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    init()
    ops = dist.ReduceOp
    scale = dist._make_nccl_premul_sum(2.0)
    values = {
        "small": lambda: torch.full((7,), 1.0 + rank),
        "large": lambda: torch.full((9_000,), 1.0 + rank),
        "double": lambda: torch.full((9_000,), 1.0 + rank, dtype=torch.float64),
        "integers": lambda: torch.full((9_000,), 1 + rank),
        "complex": lambda: torch.full((9_000,), complex(1, rank)),
        "columns": lambda: torch.full((100, 90), 1.0 + rank).t(),
        "negative": lambda: torch._neg_view(torch.full((9_000,), -1.0 - rank)),
        "sparse": lambda: torch.full((9_000,), 1.0 + rank).to_sparse(),
        "empty": lambda: torch.empty(0),
    }
    found: dict[str, Any] = {}
    for again in (False, True):
        group = dist.new_group()
        recorder, results = Recorder(group, again=again), []
        for _ in range(3):
            for name, make in values.items():
                for op in (ops.SUM, ops.AVG, ops.MAX, scale):
                    if op is scale and name in ("integers", "sparse"):
                        continue
                    if name in ("complex", "sparse") and op == ops.MAX:
                        continue
                    for scope in (nullcontext, lossycoll.reliable, lossycoll.lossy):
                        tensor = make()
                        with scope():
                            dist.all_reduce(tensor, op, group=group)
                        dense = tensor.to_dense() if tensor.is_sparse else tensor
                        results.append((name, dense.resolve_neg().flatten()[:1].tolist()))
        torch.use_deterministic_algorithms(True)  # changes the group's options
        dist.all_reduce(values["large"](), group=group)
        torch.use_deterministic_algorithms(False)
        found[f"results {again}"], found[f"calls {again}"] = results, recorder.calls
        found[f"again {again}"] = recorder.again
    dist.destroy_process_group()
    return found


def test_calls_like_those_before_are_served_alike() -> None:
    for found in run_good(rank_calls, 2, EXACT):
        assert found["calls True"] == found["calls False"]
        assert found["results True"] == found["results False"]
        assert found["again False"] == 0
        # Two of three rounds of small, large, double and complex (as pairs of floats) by SUM and
        # AVG, outside of scopes.
        assert found["again True"] == 16
