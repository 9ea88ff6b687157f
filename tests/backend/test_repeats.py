"""A call like one before is served by what was decided then.

What ranks compare, results and errors are those of the whole pipeline. Calls that only look alike
go through it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

import lossycoll
from lossycoll.backend import collectives
from lossycoll.backend.description import Description
from tests.support.harness import EXACT, init, run_good


class Recorder:
    """Notes every call as it is submitted, and whether it was a repeat."""

    def __init__(self, group: Any, *, again: bool) -> None:
        dispatcher = group._dispatcher
        self.calls: list[tuple[object, ...]] = []
        self.again = 0
        issue, run = dispatcher.health.issue, group._again

        def noted(call: Any) -> None:
            self.calls.append((*call.key, call.operations))
            issue(call)

        def counted(*call: Any) -> Any:
            work = run(*call) if again else None
            self.again += work is not None
            return work

        dispatcher.health.issue, group._again = noted, counted


def rank_calls(rank: int, world: int) -> dict[str, Any]:
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


def rank_other_kinds(rank: int, world: int) -> dict[str, Any]:
    init()
    n = 9_000
    memory = torch.empty(world * n)

    def parts() -> torch.Tensor:
        return torch.arange(world * n, dtype=torch.float32) + rank

    def scatter(output: torch.Tensor, whole: torch.Tensor, group: Any) -> torch.Tensor:
        dist.reduce_scatter_single(output, whole, group=group)
        return output

    def gather(whole: torch.Tensor, part: torch.Tensor, group: Any) -> torch.Tensor:
        dist.all_gather_single(whole, part, group=group)
        return whole

    def copied(tensor: torch.Tensor, root: int, group: Any) -> torch.Tensor:
        dist.broadcast(tensor, root, group=group)
        return tensor

    def own(whole: torch.Tensor, shift: int = 0) -> torch.Tensor:
        return whole[rank * n + shift :][: n - 4]

    def overlapping(group: Any) -> torch.Tensor:
        """The input lies where the output will be: at its own place, or at another."""
        memory[:] = 7
        own(memory, 4).fill_(rank)
        return gather(memory[: world * (n - 4)], own(memory, 4), group)

    def in_place(group: Any) -> torch.Tensor:
        memory[:] = 7
        part = memory[rank * n : (rank + 1) * n].fill_(rank)
        return gather(memory, part, group)

    calls = {
        "scatter": lambda group: scatter(torch.empty(n), parts(), group),
        "scatter others": lambda group: scatter(torch.empty(n).double(), parts().double(), group),
        "scatter columns": lambda group: scatter(
            torch.empty(n), parts().view(-1, 2).t().contiguous().t(), group
        ),
        "gather": lambda group: gather(torch.empty(world * n), torch.full((n,), 1.0 * rank), group),
        "gather bytes": lambda group: gather(
            torch.empty(world * n, dtype=torch.uint8), torch.full((n,), rank).byte(), group
        ),
        "gather in place": in_place,
        "gather overlapping": overlapping,
        "root 0": lambda group: copied(torch.full((n,), 1.0 + rank), 0, group),
        "root 1": lambda group: copied(torch.full((n,), 1.0 + rank), 1, group),
    }
    found: dict[str, Any] = {}
    for again in (False, True):
        group = dist.new_group()
        recorder, results = Recorder(group, again=again), []
        for _ in range(3):
            for name, call in calls.items():
                results.append((name, call(group).double().sum().item()))
        found[f"results {again}"], found[f"calls {again}"] = results, recorder.calls
        found[f"again {again}"] = recorder.again
    dist.destroy_process_group()
    return found


def test_scatters_gathers_and_copies_like_those_before_are_served_alike() -> None:
    for found in run_good(rank_other_kinds, 2, EXACT):
        assert found["calls True"] == found["calls False"]
        assert found["results True"] == found["results False"]
        assert found["again False"] == 0
        # Two of three rounds of all but columns and what overlaps. Calls in place are those of
        # "gather" by what is remembered, so that one is served from the first round on.
        assert found["again True"] == 2 * 7 + 1


def rank_other_terms(rank: int, world: int) -> dict[str, Any]:
    """All-reduces like one before, but for a timeout, or for futures."""
    from datetime import timedelta

    init()
    recorder = Recorder(dist.group.WORLD, again=True)
    tensor, counts = torch.ones(9_000), []
    for timeout in (None, None, timedelta(seconds=77), timedelta(seconds=77)):
        opts = dist.AllreduceOptions()
        if timeout is not None:
            opts.timeout = timeout
        opts.asyncOp = False
        dist.group.WORLD.allreduce([tensor], opts).wait()
        counts.append(recorder.again)
    works = [dist.all_reduce(torch.ones(9_000), async_op=True) for _ in range(20)]
    sums = [work.get_future().wait()[0][0].item() for work in works]
    before = recorder.again
    sums += [
        dist.all_reduce(torch.ones(9_000), async_op=True).get_future().wait()[0][0].item()
        for _ in range(3)
    ]  # now somebody waits for futures, and the engine is told so
    asked = recorder.again - before
    dist.destroy_process_group()
    return {"counts": counts, "sums": sums, "asked": asked}


def test_other_timeouts_and_futures_go_through_the_pipeline_once() -> None:
    for found in run_good(rank_other_terms, 2, EXACT):
        assert found["counts"] == [0, 1, 1, 2]
        assert set(found["sums"]) == {2.0}
        assert found["asked"] == 2


def rank_other_callers(rank: int, world: int) -> dict[str, Any]:
    """A description of somebody else's, of a kind that torch calls too; and a forked child."""
    import os
    import signal

    from lossycoll.errors import ClosedError

    init()
    group = dist.group.WORLD
    recorder = Recorder(group, again=True)
    part, whole = torch.ones(500), torch.empty(world * 500)
    opts = torch._C._distributed_c10d.AllgatherOptions()
    opts.asyncOp = False
    call = Description(collectives.ALL_GATHER, [part], [whole], 4000, part, detail="mine")
    group.run(call, opts).wait()
    dist.all_gather_single(whole, part)
    names = [str(key[3]) for key in recorder.calls]

    dist.all_reduce(whole)
    dist.all_reduce(whole)
    again, child = recorder.again, 0
    with group._endpoint.operations.sequencer.lock:  # as by a thread that submits
        child = os.fork()
        if not child:
            signal.alarm(30)
            try:
                dist.all_reduce(whole)
            except ClosedError as error:
                os._exit(7 if "forked" in str(error) else 8)
            os._exit(9)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.barrier()
    dist.destroy_process_group()
    return {"names": names, "again": again, "ended": ended}


def test_other_callers_descriptions_and_forked_children_are_no_repeats() -> None:
    for found in run_good(rank_other_callers, 2, EXACT):
        assert found["names"] == ["mine", ""]
        assert found["again"] == 1
        assert found["ended"] == 7
