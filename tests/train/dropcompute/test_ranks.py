"""DropCompute on three ranks that are late by turns: every gradient against one process that knows
what each rank has completed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from lossycoll.simulate import choose
from tests.support.dropcompute_cases import (
    ROWS,
    WIDTH,
    Shuffled,
    check_close,
    dropping,
    endless,
    gradients,
    inputs_of,
    loss_of,
    oracle,
)
from tests.support.harness import init, run_good
from tests.support.sharded_cases import sharded

M, WORLD, THRESHOLD = 4, 3, 9.5
SECONDS = (
    ((3, 3, 3, 3), (1, 1, 1, 1), (9, 1, 9, 9)),
    ((1, 1, 1, 1), (20, 1, 1, 1), (5, 5, 5, 5)),
    ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
)
"""By step, rank and micro-batch."""
COUNTS = ((4, 4, 2), (4, 1, 2), (4, 4, 4))
"""How many of them each rank completes."""
GIVEN = ((4, 4, 4), (4, 4, 4), (4, 0, 3))
"""How many it is given: one has nothing left in the last step, another one less."""


def counts(step: int) -> list[int]:
    return [min(pair) for pair in zip(COUNTS[step], GIVEN[step], strict=True)]


def late(drop: Any, model: nn.Module, rank: int, step: int, scaler: Any = None) -> None:
    """A loop of which ``counts`` are completed."""
    xs = (inputs_of(rank, step, number) for number in range(GIVEN[step][rank]))
    for number, x in enumerate(drop(xs)):
        loss = loss_of(model, x) / M
        (loss if scaler is None else scaler.scale(loss)).backward()
        drop.clock.now += SECONDS[step][rank][number]
    last = drop.report().last
    total = sum(counts(step))
    assert (last.completed, last.total_completed) == (counts(step)[rank], total)
    assert last.factor == M * WORLD / total or drop._settings.fixed_divisor


# ---- the ways of averaging ----


def every_way(rank: int, gloo: Any) -> list[str]:
    done = []
    ddp: dict[str, dict[str, Any]] = {
        "ddp": {},
        "unused": {"find_unused_parameters": True},
        "views": {"gradient_as_bucket_view": True},
        "static": {"static_graph": True},
    }
    for name, given in ddp.items():
        for group in (None, gloo):
            for divisor in ("completed", "fixed") if name == "ddp" else ("completed",):
                partly = name in ("unused", "static")
                model, plain = Shuffled(partly=partly), Shuffled(partly=partly)
                wrapped = DistributedDataParallel(
                    model, process_group=group, bucket_cap_mb=0.004, **given
                )
                drop = dropping(wrapped, M, THRESHOLD, divisor=divisor)
                check(f"{name} {divisor}", drop, wrapped, model, plain, rank)
                done.append(name)
    for group in (None, gloo):
        for divisor in ("completed", "fixed"):
            model, plain = Shuffled(partly=True), Shuffled(partly=True)
            drop = dropping(model, M, THRESHOLD, divisor=divisor, group=group)
            check(f"plain {divisor}", drop, model, model, plain, rank)
            done.append("plain")
    return done


def check(
    name: str, drop: Any, trained: nn.Module, model: nn.Module, plain: nn.Module, rank: int
) -> None:
    for step in range(len(COUNTS)):
        late(drop, trained, rank, step)
        divisor = M * WORLD if drop._settings.fixed_divisor else None
        wanted = oracle(plain, step, counts(step), divisor)
        check_close(gradients(model), wanted, f"{name}, step {step}, gradient")
        model.zero_grad(set_to_none=step != 0)
        if step == 0:
            for parameter in plain.parameters():
                # What has zeros, and was used by nobody, keeps them.
                parameter.grad = None


def sharded_too(rank: int, gloo: Any) -> int:
    """With clipping, a GradScaler and an epoch's worth of learning rates, against one process."""
    steps = 0
    for group in (None, gloo):
        for scaled in (False, True):
            model, plain = Shuffled(partly=True), Shuffled(partly=True)
            optimizer = sharded(model.parameters(), torch.optim.AdamW, group, lr=0.1)
            alone = torch.optim.AdamW(plain.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
            schedule, same = (
                torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, alone)
            )
            drop = dropping(optimizer, M, THRESHOLD)
            for step in range(len(COUNTS)):
                late(drop, model, rank, step, scaler)
                wanted = oracle(plain, step, counts(step))
                for parameter, grad in zip(plain.parameters(), wanted, strict=True):
                    parameter.grad = grad
                norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
                if scaler is not None:
                    scaler.unscale_(optimizer)
                torch.testing.assert_close(optimizer.clip_grad_norm_(0.01), norm)
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                alone.step()
                optimizer.zero_grad()
                alone.zero_grad()
                schedule.step()
                same.step()
                optimizer.synchronize_parameters()
                pairs = zip(model.parameters(), plain.parameters(), strict=True)
                for mine, theirs in pairs:
                    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
                steps += 1
    return steps


def amp_and_clipping(rank: int) -> float:
    """DDP: what is clipped is the weighted mean."""
    model, plain = Shuffled(), Shuffled()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    drop = dropping(wrapped, M, THRESHOLD)
    late(drop, wrapped, rank, 0, scaler)
    scaler.unscale_(optimizer)
    found = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    for parameter, grad in zip(plain.parameters(), oracle(plain, 0, counts(0)), strict=True):
        parameter.grad = grad
    torch.testing.assert_close(found, nn.utils.clip_grad_norm_(plain.parameters(), 1e-3))
    check_close(gradients(model), gradients(plain), "clipped")
    before = model.last.weight.clone()
    scaler.step(optimizer)
    assert not torch.equal(before, model.last.weight)
    return float(found)


# ---- what DDP does besides ----


def buffers(rank: int) -> bool:
    """Rank 0's buffers reach a rank that has nothing to do, too: all issue the same collectives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8)).double()
    wrapped = DistributedDataParallel(model)
    drop = dropping(wrapped, M, THRESHOLD)
    bound = lossycoll.DriftBound(wrapped, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    for step in (2, 0, 2, 1):
        late(drop, wrapped, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    with bound:
        wrapped(inputs_of(rank, 0, 0))  # buffers of rank 0 to all
    drift = lossycoll.measure_drift(model)
    own = torch.cat([model[1].running_mean, model[1].running_var])
    return drift.total == 0 and own.isfinite().all().item()


def sparse(rank: int) -> bool:
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, sparse=True)
    wrapped = DistributedDataParallel(model)
    drop = dropping(wrapped, M, 99.0)
    for step in range(2):
        for number in drop(iter(range(rank))):
            wrapped(torch.tensor([number])).sum().div(M).backward()
        grad = model.weight.grad.to_dense()
        wanted = torch.zeros(10, 4)
        wanted[0], wanted[1] = 2 / 3, 1 / 3  # of three micro-batches
        torch.testing.assert_close(grad, wanted)
        model.zero_grad(set_to_none=step == 0)
    return True


def hooks_of_users(rank: int) -> list[int]:
    """They are called once more, those of the tensor with zeros."""
    model, plain = Shuffled(), Shuffled()
    wrapped = DistributedDataParallel(model)
    calls = [0, 0]

    def double(grad: Tensor) -> Tensor:
        calls[0] += 1
        return 2 * grad

    def count(parameter: Tensor) -> None:
        calls[1] += 1

    model.last.bias.register_hook(double)
    model.last.weight.register_post_accumulate_grad_hook(count)
    late(dropping(wrapped, M, THRESHOLD), wrapped, rank, 0)
    wanted = oracle(plain, 0, counts(0))
    names = [name for name, _ in plain.named_parameters()]
    bias = wanted[names.index("last.bias")]
    assert bias is not None
    bias *= 2
    check_close(gradients(model), wanted, "hooked")
    return calls


def compiled(rank: int) -> bool:
    """Both ways to compile: what DDP wraps, and DDP."""
    for outside in (False, True):
        model, plain = Shuffled(), Shuffled()
        if outside:
            trained: Any = torch.compile(DistributedDataParallel(model), backend="aot_eager")
        else:
            inner = torch.compile(model, backend="aot_eager", fullgraph=True)
            trained = DistributedDataParallel(inner)
        drop = dropping(trained, M, THRESHOLD)
        for step in (0, 1):
            late(drop, trained, rank, step)
            check_close(gradients(model), oracle(plain, step, counts(step)), "compiled")
            model.zero_grad()
    return True


def epochs(rank: int) -> tuple[list[int], list[int]]:
    """Ranks whose loaders are of different lengths end with the same step."""
    model = DistributedDataParallel(nn.Linear(WIDTH, 1).double())
    drop = dropping(model, M, 2.5)
    sizes, seen = [], []
    for step in drop.steps(iter(range(3 + 4 * rank))):
        count = 0
        for number in step:
            (loss_of(model, inputs_of(rank, 0, number)) / M).backward()
            drop.clock.now += 1
            seen.append(number)
            count += 1
        sizes.append(count)
        model.zero_grad()
    return sizes, seen


def left_early(rank: int) -> list[int]:
    """One rank breaks, one fails: the others don't wait for more than they have."""
    model, plain = Shuffled(), Shuffled()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    drop = dropping(wrapped, M, 99.0)
    totals = []
    for step in range(2):
        try:
            for number, x in enumerate(drop(inputs_of(rank, step, n) for n in range(M))):
                if rank == 1 and number == 2:
                    break
                (loss_of(wrapped, x) / M).backward()
                if rank == 2 and number == step:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            assert rank == 2
        check_close(gradients(model), oracle(plain, step, [M, 2, step + 1]), "left early")
        totals.append(drop.report().last.total_completed)
        optimizer.zero_grad()
    return totals


def reported(rank: int) -> list[Any]:
    model = DistributedDataParallel(Shuffled())
    drop = dropping(model, M, THRESHOLD)
    for step in range(3):
        late(drop, model, rank, step)
        model.zero_grad()
    reports = drop.gather_report()
    assert reports[rank].saved == drop.report().saved
    assert all(report.drop_rate == drop.report().drop_rate for report in reports)
    return [
        (r.rank, r.steps, r.completed, r.dropped, r.seconds, r.saved, r.threshold) for r in reports
    ]


def auto(rank: int) -> dict[str, Any]:
    """Measured on all ranks, agreed, and measured again when one of them has changed."""
    model = DistributedDataParallel(nn.Linear(WIDTH, 1).double())
    drop = dropping(model, M, skip=2, warm_up=6, window=4)
    draws = torch.Generator().manual_seed(0)
    # The same on all ranks, so that each can tell what is chosen. ns, as they are shared.
    times = 1 + torch.empty(40, WORLD, M).exponential_(1.2, generator=draws).double()
    times = (times * 1e9).round() / 1e9
    times[20:, 1] *= 2
    out: dict[str, Any] = {"thresholds": [], "choices": [], "completed": []}
    for step in range(40):
        for number, x in enumerate(drop(endless(inputs_of(rank, step, 0)))):
            (loss_of(model, x) / M).backward()
            drop.clock.now += times[step, rank, number].item()
        model.zero_grad()
        # All wait for the slowest, and 0.25 s pass before the next step begins.
        slowest = own = times[step, rank, : drop.report().last.completed].sum()
        dist.all_reduce(slowest := slowest.clone(), dist.ReduceOp.MAX)
        drop.clock.now += (slowest - own).item() + 0.25
        out["thresholds"].append(drop.threshold)
        out["choices"].append(drop.report().choices)
        out["completed"].append(drop.report().last.completed)
    wanted = choose(times[2:8].numpy(), 0.25, cut="started")
    out["wanted"] = (wanted.threshold, wanted.drop_rate)
    out["first"] = next(t for t in out["thresholds"] if math.isfinite(t))
    cumulated = times.cumsum(-1)
    begun = torch.cat([torch.zeros(40, WORLD, 1, dtype=torch.float64), cumulated[:, :, :-1]], -1)
    out["predicted"] = (begun[8:20, rank] <= out["first"]).sum(-1).tolist()
    return out


def refusals(rank: int) -> dict[str, tuple[str, str]]:
    def error(**given: Any) -> tuple[str, str]:
        try:
            lossycoll.DropCompute(nn.Linear(2, 2), **{"micro_batches": M, **given})
        except lossycoll.LossyError as caught:
            return type(caught).__name__, str(caught)
        return "", ""

    out = {
        "counts": error(micro_batches=M + (rank == 2)),
        "thresholds": error(threshold=1.0 + rank),
        "divisor": error(divisor="fixed" if rank == 1 else "completed"),
    }
    ddp = DistributedDataParallel(model := nn.Linear(2, 2))
    for name, given in (
        ("group", {"model": ddp, "group": dist.group.WORLD}),
        ("nested", {"model": nn.Sequential(ddp)}),
    ):
        try:
            lossycoll.DropCompute(micro_batches=M, **given)
        except lossycoll.LossyError as caught:
            out[name] = (type(caught).__name__, str(caught))
    drop = dropping(ddp, M, 1.0)
    joined = DistributedDataParallel(nn.Linear(2, 2))
    try:
        with joined.join():
            dropping(joined, M, 1.0)([])
    except lossycoll.LossyError as caught:
        out["join"] = (type(caught).__name__, str(caught))
    model.bias.requires_grad_(False)
    try:
        list(drop([]))
    except lossycoll.LossyError as caught:
        out["frozen"] = (type(caught).__name__, str(caught))
    try:
        dropping(ddp, M, 1.0)
    except lossycoll.LossyError as caught:
        out["frozen before"] = (type(caught).__name__, str(caught))
    return out


def everything(rank: int, world: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    init()
    gloo = dist.new_group(backend="gloo")
    out: dict[str, Any] = {
        "ways": every_way(rank, gloo),
        "sharded": sharded_too(rank, gloo),
        "norm": amp_and_clipping(rank),
        "buffers": buffers(rank),
        "sparse": sparse(rank),
        "hooks": hooks_of_users(rank),
        "compiled": compiled(rank),
        "epochs": epochs(rank),
        "left early": left_early(rank),
        "reported": reported(rank),
        "auto": auto(rank),
        "refused": refusals(rank),
    }
    dist.barrier()
    dist.destroy_process_group()
    return out


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_good(everything, WORLD, {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_LOSSY_MIN_BYTES": "0"})


def test_gradients_are_the_mean_over_what_was_completed(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(found["ways"]) == (2 + 3) * 2 + 2 * 2
        assert found["sharded"] == 2 * 2 * 3
        assert found["norm"] > 1e-3


def test_what_goes_on_around_it(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert found["buffers"]
        assert found["sparse"]
        assert found["compiled"]
        assert found["hooks"] == [counts(0)[rank] + 1] * 2
        assert found["left early"] == [M + 2 + 1, M + 2 + 2]


def test_all_ranks_end_an_epoch_with_the_same_step(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        sizes, seen = found["epochs"]
        assert seen == list(range(3 + 4 * rank))
        assert sizes == [min(3, max(0, 3 + 4 * rank - 3 * step)) for step in range(4)]


def test_every_rank_gets_the_reports_of_all(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["reported"] == ranks[0]["reported"]
        for rank, steps, completed, dropped, seconds, saved, threshold in found["reported"]:
            assert (steps, threshold) == (3, THRESHOLD)
            assert completed == sum(counts(step)[rank] for step in range(3))
            done = [SECONDS[step][rank][: counts(step)[rank]] for step in range(3)]
            assert seconds == sum(map(sum, done))
            assert dropped == sum(
                GIVEN[step][rank] - counts(step)[rank] for step in range(3) if counts(step)[rank]
            )
            assert (saved > 0) == (dropped > 0)


def test_the_threshold_is_measured_and_measured_again(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        auto = found["auto"]
        assert auto["thresholds"] == ranks[0]["auto"]["thresholds"]
        assert auto["first"] == pytest.approx(auto["wanted"][0], rel=1e-6)
        assert auto["wanted"][1] > 0.01
        assert all(math.isinf(t) for t in auto["thresholds"][:8])
        assert auto["completed"][:8] == [M] * 8
        assert auto["completed"][8:20] == auto["predicted"]
        assert auto["choices"][19] == 1
        # Rank 1 takes twice as long from step 20 on, and all measure again.
        assert auto["choices"][-1] >= 2
        assert any(math.isinf(t) for t in auto["thresholds"][20:])
        assert auto["thresholds"][-1] > 1.05 * auto["first"]
    completed = [sum(found["auto"]["completed"][8:20]) for found in ranks]
    assert sum(completed) < 12 * WORLD * M


def test_what_can_not_be_is_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        refused = found["refused"]
        assert refused["counts"][0] == "MismatchError"
        own, theirs, other = (5, 4, 0) if rank == 2 else (4, 5, 2)
        assert refused["counts"][1].startswith(
            f"rank {rank}/{WORLD}: DropCompute is made differently: micro_batches = {own} here, "
            f"micro_batches = {theirs} on rank {other} (127.0.0.1:"
        )
        other = 1 if rank == 0 else 0
        assert (
            f": threshold = {1.0 + rank} here, threshold = {1.0 + other} on rank {other} ("
            in (refused["thresholds"][1])
        )
        mine, theirs = ("fixed", "completed") if rank == 1 else ("completed", "fixed")
        assert f": divisor = '{mine}' here, divisor = '{theirs}' on rank" in refused["divisor"][1]
        assert refused["group"] == (
            "OptionError",
            "group was passed, but DistributedDataParallel knows its own; leave it out",
        )
        assert refused["nested"][0] == "UnsupportedError"
        assert "0 is a DistributedDataParallel within" in refused["nested"][1]
        assert refused["join"][0] == "UnsupportedError"
        assert "can't be used within DistributedDataParallel.join()" in refused["join"][1]
        assert refused["frozen"][0] == refused["frozen before"][0] == "TrainingError"
        assert "parameter 1 of shape (2,) was frozen" in refused["frozen"][1]
        assert "has 1 parameters that require gradients, and had 2" in refused["frozen before"][1]
    assert ROWS > 1
