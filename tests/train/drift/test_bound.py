"""DriftBound: what it exchanges, to the element, and what it refuses."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from lossycoll.train.common.collectives import Collectives
from lossycoll.train.common.delivery import MAX_MISSING, Recovery
from lossycoll.train.drift.slices import ALIGN
from tests.support.harness import Ranks, die, init, run_good

WORLD = 3
LIVENESS = 5.0
"""Seconds. A dead link is noticed after twice as long."""

# ---- what is exchanged, on three ranks without loss ----


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(30, 20)
        self.tied = self.first
        self.frozen = nn.Parameter(torch.zeros(50), requires_grad=False)
        self.short = nn.Parameter(torch.zeros(41, dtype=torch.bfloat16))
        self.long = nn.Parameter(torch.zeros(29, dtype=torch.float64))
        image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
        self.image = nn.Parameter(image)


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def elements(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def still(model: nn.Module) -> torch.optim.SGD:
    """An optimizer whose steps change nothing."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def quiet(rank: int, world: int) -> dict[str, Any]:
    """All that needs no loss, in one group of processes. The last of it ends the group."""
    out: dict[str, Any] = {"refused": refusals(rank)}
    out["exchanged"] = exchanged(rank, world)
    out["changed"] = changes(rank)
    out["hook"] = [hooked(rank, hook) for hook in (None, lossycoll.dispersing_hook)]
    out["finite"] = finite(rank)
    out["between"] = between(rank, world)
    out["resent"] = resent(rank)
    out["nothing"] = hears_nothing(rank)
    out["joined"] = joined(rank)
    out["scaled"] = scaled(rank)
    return out


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    env = {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_LIVENESS": str(LIVENESS)}
    return run_good(quiet, WORLD, env, timeout=200)


def exchanged(rank: int, world: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, group in (("lossy", None), ("gloo", dist.new_group(backend="gloo"))):
        model = Mixed()
        optimizer = still(model)
        bound = lossycoll.DriftBound(model, optimizer, 4, group=group)
        memory = bound._staging.data_ptr()
        rows = []
        for sweep in range(world + 1):
            # Where a value comes from shows in it; all differ from those of the sweep before.
            fill(model, 10.0 * sweep + rank + 1)
            for _ in range(4):
                optimizer.step()
                bound.finish()
                rows.append(elements(model).tolist())
        assert bound._staging.data_ptr() == memory
        out[name] = (rows, bound.bytes_per_step, bound.steps)
        bound.detach()
        bound.detach()
        calls = lossycoll.stats().calls
        optimizer.step()
        assert lossycoll.stats().calls == calls
    return out


def changes(rank: int) -> dict[str, Any]:
    """What is added, unfrozen, replaced or stateful."""
    out: dict[str, Any] = {}
    model = nn.Module()
    model.a = nn.Parameter(torch.full((64,), float(rank)))
    model.b = nn.Parameter(torch.full((64,), float(rank)), requires_grad=False)
    optimizer = still(model)
    with lossycoll.reliable(), lossycoll.DriftBound(model, optimizer, 2) as bound:
        optimizer.step()
        model.b.requires_grad_()
        model.c = nn.Parameter(torch.full((64,), float(rank)))
        optimizer.add_param_group({"params": [model.c]})
        optimizer.step()
        out["first sweep"] = [len(set(p.tolist())) for p in (model.b, model.c)]
        out["own"] = [set(p.tolist()) == {float(rank)} for p in (model.b, model.c)]
        optimizer.step()
        optimizer.step()
        bound.finish()
        out["second sweep"] = lossycoll.measure_drift(model).total
        optimizer.step()
        model.a.data = torch.full((64,), float(rank), dtype=torch.float64)  # in mid sweep
        optimizer.step()
        optimizer.step()
        optimizer.step()
        bound.finish()
        out["replaced"] = lossycoll.measure_drift(model).total
        out["steps"] = bound.steps
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    model = nn.Linear(9, 9)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1 * (rank + 1))
    with lossycoll.DriftBound(model, adam, 1, state=True):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, rank + 1.0)
        adam.step()
    states = [adam.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
    shown = torch.cat([state.flatten() for state in states])
    most = shown.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    out["state"] = (torch.equal(shown, most), len(set(shown.tolist())))
    out["model"] = lossycoll.measure_drift(model).total
    return out


@pytest.mark.parametrize("name", ["lossy", "gloo"])
def test_every_element_is_sent_once_a_sweep_by_each_rank_in_turn(
    ranks: list[dict[str, Any]], name: str
) -> None:
    world, period = WORLD, 4
    every = [got["exchanged"][name] for got in ranks]
    rows = [torch.tensor(got[0]) for got in every]
    whole = 30 * 20 * 4 + 20 * 4 + 41 * 2 + 29 * 8 + 2 * 3 * 4 * 5 * 4
    assert all(got[1] <= whole / period + world * ALIGN * 5 for got in every)
    assert all(got[2] == (world + 1) * period for got in every)
    owners = []
    for sweep in range(world + 1):
        last = [row[(sweep + 1) * period - 1] for row in rows]
        known = (last[0] == last[1]) & (last[1] == last[2])
        # All but the frozen ones have one value, which some rank had.
        assert int((~known).sum()) == 50
        owners.append(last[0][known] - 10 * sweep - 1)
        assert set(owners[-1].tolist()) == {0.0, 1.0, 2.0}
        shares = torch.bincount(owners[-1].long()) / len(owners[-1])
        assert shares.max() < 0.4, shares  # a third each
        agreed = []
        for step in range(period):
            now = [row[sweep * period + step] for row in rows]
            agreed.append(int(((now[0] == now[1]) & (now[1] == now[2])).sum()))
        new = [b - a for a, b in zip([0, *agreed], agreed, strict=False)]
        assert max(new) <= sum(new) / period * 1.5, new  # about a quarter at each step
    for element in zip(*(turn.tolist() for turn in owners[:world]), strict=True):
        assert set(element) == {0.0, 1.0, 2.0}
    assert torch.equal(owners[0], owners[world])


def test_what_is_added_unfrozen_or_replaced_comes_along(ranks: list[dict[str, Any]]) -> None:
    for got in (rank["changed"] for rank in ranks):
        assert got["first sweep"] == [1, 1]
        assert got["own"] == [True, True]
        assert got["second sweep"] == got["replaced"] == 0.0
        assert got["steps"] == 8
        alike, values = got["state"]
        assert alike
        assert values > 2  # a rank's own are two
        assert got["model"] == 0.0


# ---- gradients in another order ----


def hooked(rank: int, hook: Any) -> list[float]:
    """Weights after three steps in which nothing is lost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90), nn.Tanh(), nn.Linear(90, 70))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01)  # several buckets
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    draws = torch.Generator().manual_seed(rank)
    for _ in range(3):
        inputs = torch.randn(8, 70, generator=draws)
        (wrapped(inputs) - inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return elements(model).tolist()


def test_the_hook_that_disperses_averages_as_ddp_does(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        plain, other = rank["hook"]
        assert rank["hook"] == ranks[0]["hook"]
        assert other == pytest.approx(plain, rel=1e-5, abs=1e-6)


# ---- a replica that isn't finite ----


def finite(rank: int) -> list[list[float]]:
    """One rank's model of a diverged one, after each of two sweeps."""
    model = nn.Linear(50, 40, bias=False)
    with torch.no_grad():
        model.weight.fill_(float(rank))
        if rank == 1:
            model.weight[3:9] = math.nan
            model.weight[20, 7] = -math.inf
    optimizer = still(model)
    out = []
    with lossycoll.reliable(), lossycoll.DriftBound(model, optimizer, 2) as bound:
        for _ in range(3):
            optimizer.step()
            optimizer.step()
            bound.finish()
            out.append(model.weight.detach().flatten().tolist())
    return out


def test_what_is_not_finite_does_not_spread_and_is_healed(ranks: list[dict[str, Any]]) -> None:
    sweeps = [rank["finite"] for rank in ranks]
    for rank in (0, 2):
        assert all(math.isfinite(value) for sweep in sweeps[rank] for value in sweep)
    left = [sum(not math.isfinite(value) for value in sweep) for sweep in sweeps[1]]
    # Rank 1 owns a third of what it has lost in the first sweep, and another third in the next.
    assert 0 < left[0] < 6 * 50 + 1
    assert left[1:] == [0, 0]


# ---- from one step to the next ----


class Lowering(torch.optim.Optimizer):
    """A step takes 100 from each element, and notes the first one before."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.seen: list[list[float]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (parameter,) = self.param_groups[0]["params"]
        self.seen.append(parameter.flatten().tolist())
        parameter.sub_(100)


def between(rank: int, world: int) -> dict[str, Any]:
    """What a model of one slice holds at each point between its steps."""
    out: dict[str, Any] = {}
    model = nn.Linear(50, 12, bias=False)
    fill(model, float(rank))
    optimizer = Lowering(model)

    def held() -> list[float]:
        return model.weight.detach().flatten().tolist()

    with lossycoll.reliable(), lossycoll.DriftBound(model, optimizer, 1) as bound:
        optimizer.step()
        dist.barrier()  # all has come
        out["after"] = held()
        optimizer.step()
        out["updated"] = optimizer.seen[1]
        bound.finish()
        with torch.no_grad():
            model.weight.add_(rank)  # apart again
        optimizer.step()
        with torch.no_grad():
            model.weight[:2] = 7.0 + rank
        sent = held()
        bound.finish()
        out["sent"], out["changed"] = sent, held()
        optimizer.step()
        bound.finish()
        bound.finish()
        out["next"] = held()
        optimizer.step()
    out["ended"] = held()
    fill(model, float(rank))
    try:
        with lossycoll.DriftBound(model, optimizer, 1):
            optimizer.step()
            raise KeyError
    except KeyError:
        out["raised"] = held()
    return out


def test_a_slice_is_taken_before_the_next_update_but_for_what_was_changed_meanwhile(
    ranks: list[dict[str, Any]],
) -> None:
    every = [got["between"] for got in ranks]
    for rank, got in enumerate(every):
        assert set(got["after"]) == {rank - 100.0}
        assert set(got["updated"]) == {-100.0, -99.0, -98.0}  # each owns a third
        assert got["updated"] == every[0]["updated"]
        assert got["changed"][:100] == [7.0 + rank] * 100
        assert got["changed"][100:] == every[0]["changed"][100:] != got["sent"][100:]
        assert got["next"] == every[0]["next"]
        assert got["ended"] == every[0]["ended"]
        assert set(got["raised"]) == {rank - 100.0}  # what had been sent may never come


# ---- gradients are resent as well ----


def resent(rank: int) -> dict[str, Any]:
    """The share of gradients that three ranks do without, as bounds come and go."""
    out: dict[str, Any] = {}
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)

    def share(group: Any) -> tuple[int, float]:
        before = lossycoll.stats(group).peers
        for _ in range(8):
            dist.all_reduce(torch.ones(300_000), group=group)
        pairs = list(zip(lossycoll.stats(group).peers, before, strict=True))
        offered = sum(now.offered - was.offered for now, was in pairs)
        delivered = sum(now.delivered - was.delivered for now, was in pairs)
        return group.lossy_options().repair, 1 - delivered / offered

    faults = {"inject": "loss=0.3,seed=8", "mtu": 1500}
    group = dist.new_group(pg_options=lossycoll.Options(**faults))
    out["none"] = share(group)
    first = lossycoll.DriftBound(one, still(one), 2, group=group, repair=2)
    out["one"] = share(group)
    second = lossycoll.DriftBound(other, still(other), 2, group=group, repair=1)
    out["two"] = group.lossy_options().repair
    first.detach()
    out["the second"] = share(group)
    with lossycoll.lossy(repair=3):
        out["block"] = group.lossy_options().repair
    second.detach()
    second.detach()
    out["none again"] = group.lossy_options().repair
    written = dist.new_group(pg_options=lossycoll.Options(repair=0, **faults))
    lossycoll.DriftBound(one, still(one), 2, group=written, repair=2)
    out["written"] = share(written)
    out["dials"] = dials(group, written)
    return out


def dials(group: Any, written: Any) -> list[Any]:
    """The share that may be missing of gradients, as bounds come and go, and that is."""
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    out = [group.lossy_options().max_missing]
    with lossycoll.DriftBound(one, still(one), 2, group=group):
        out.append(group.lossy_options().max_missing)
    # Rounds that are given stay: no path chooses to resend.
    first = lossycoll.DriftBound(one, still(one), 2, group=group, max_missing=0.01, repair=0)
    for _ in range(8):  # the path's loss becomes known
        dist.all_reduce(torch.ones(300_000), group=group)
    before = lossycoll.stats(group)
    for _ in range(8):
        dist.all_reduce(torch.ones(300_000), group=group)
    after = lossycoll.stats(group)
    missing = after.packets_missing - before.packets_missing
    out.append(missing / (after.packets_received - before.packets_received + missing))
    out.append(after.packets_resent - before.packets_resent)
    second = lossycoll.DriftBound(other, still(other), 2, group=group, max_missing=0.003)
    out.append(group.lossy_options().max_missing)
    first.detach()
    second.detach()
    out.append(group.lossy_options().max_missing)
    with lossycoll.DriftBound(one, still(one), 2, group=written):
        out.append(written.lossy_options().max_missing)
    return out


def test_gradients_are_resent_as_often_as_slices_unless_the_group_says_otherwise(
    ranks: list[dict[str, Any]],
) -> None:
    for got in (rank["resent"] for rank in ranks):
        for name, rounds in (("none", 0), ("one", 2), ("the second", 1), ("written", 0)):
            repair, missing = got[name]
            assert repair == rounds
            # What is resent is lost anew with the same chance.
            assert 0.7 < missing / 0.3 ** (1 + rounds) < 1.4, (name, missing)
        assert (got["two"], got["block"], got["none again"]) == (2, 3, 0)


def test_parity_keeps_to_the_share_that_may_be_missing_and_nothing_is_resent(
    ranks: list[dict[str, Any]],
) -> None:
    for got in (rank["resent"]["dials"] for rank in ranks):
        before, asked, missing, packets_resent, least, after, written = got
        assert (before, asked, least, after) == ("none", MAX_MISSING, 0.003, "none")
        assert written == "none"  # whoever gave the group a repair has said what is to be done
        assert packets_resent == 0
        assert missing < 0.12  # of 0.3, in 32 sets that come back whole or not at all


# ---- steps that are skipped ----


def scaled(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    out: dict[str, Any] = {}
    model = nn.Linear(20, 20)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bound = lossycoll.DriftBound(wrapped, optimizer, 2)

    def train(scaler: torch.amp.GradScaler) -> None:
        for step in range(6):
            scaler.scale(wrapped(torch.ones(3, 20)).square().mean()).backward()
            if step == 2 and rank == 1:  # as if one rank's mean had lost what others' has
                assert model.bias.grad is not None
                model.bias.grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    train(ShardedGradScaler(device="cpu"))
    out["agreed"] = bound.steps
    try:
        train(torch.amp.GradScaler("cpu"))
    except (lossycoll.LossyError, RuntimeError) as error:
        out["alone"] = (type(error).__name__, str(error))
    out["steps"] = bound.steps
    return out


def test_ranks_that_skip_apart_are_reported_and_sharded_grad_scaler_keeps_them_together(
    ranks: list[dict[str, Any]],
) -> None:
    for rank, got in enumerate(rank["scaled"] for rank in ranks):
        assert got["agreed"] == 5
        # A rank that is slow to its third step hears there that the others have failed.
        assert got["steps"] - (5 + 2) in ((0,) if rank == 1 else (0, 1))
        kind, text = got["alone"]
        assert kind in ("MismatchError", "RuntimeError")  # the latter where DDP passes it on
        assert "all_gather_blocks uint8[" in text
        assert "all_reduce float32[" in text


def joined(rank: int) -> dict[str, Any]:
    """How DistributedDataParallel.join ends, with a rank that has two batches less; first without
    DriftBound, where it is well."""
    out: dict[str, Any] = {}
    for name in ("plain", "bounded"):
        group = dist.new_group()
        wrapped = DistributedDataParallel(nn.Linear(20, 20), process_group=group)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        bound = lossycoll.DriftBound(wrapped, optimizer, 2) if name == "bounded" else None
        steps, kind, text = 0, "", ""
        try:
            with wrapped.join():
                for _ in range(3 if rank == 0 else 5):
                    optimizer.zero_grad()
                    wrapped(torch.ones(3, 20)).square().mean().backward()
                    optimizer.step()
                    steps += 1
        except (lossycoll.LossyError, RuntimeError) as error:
            kind, text = type(error).__name__, str(error)
        if bound is not None:
            bound.detach()
        out[name] = steps, kind, text
        dist.destroy_process_group(group)
    return out


def test_uneven_steps_under_join_are_an_error_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank, got in enumerate(rank["joined"] for rank in ranks):
        assert got["plain"] == (3 if rank == 0 else 5, "", "")
        steps, kind, text = got["bounded"]
        # A step doesn't wait for what is sent after it.
        assert steps in ((3,) if rank == 0 else (3, 4))
        assert kind in ("MismatchError", "RuntimeError")  # the latter where DDP passes it on
        assert "all_gather_blocks uint8[" in text
        assert "all_reduce float32[" in text


# ---- a rank dies; nothing arrives ----


def train_on(rank: int, world: int) -> dict[str, Any]:
    init()
    model = nn.Linear(60, 60, bias=False)
    fill(model, float(rank))
    optimizer = still(model)
    bound = lossycoll.DriftBound(model, optimizer, 2)
    optimizer.step()
    die(1)
    for _ in range(7):
        optimizer.step()
    drift = lossycoll.measure_drift(model)
    bound.detach()
    fill(model, float(rank))
    apart = lossycoll.measure_drift(model)
    lost = lossycoll.stats().lost
    dist.destroy_process_group()
    return {"drift": drift.total, "apart": apart.total, "lost": lost}


def test_goes_on_without_a_rank_that_dies() -> None:
    env = {"LOSSYCOLL_ON_PEER_LOSS": "continue", "LOSSYCOLL_LIVENESS": "4", "LOSSYCOLL_LOG": "off"}
    with Ranks(train_on, 3, env) as ranks:
        outcomes = ranks.collect(90)
    assert outcomes[1].code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.code == 0, outcome
        assert outcome.value == {"drift": 0.0, "apart": 4 * 3600.0, "lost": (1,)}


def hears_nothing(rank: int) -> tuple[str, int, int]:
    """What rank 1 reports of a link from rank 0 that loses everything, after how many steps of
    DriftBound, and how many packets were lost."""
    options = lossycoll.Options(inject="link=0-1:1,loss=0.5", deadline_max=2.0)
    lost = dist.new_group(pg_options=options)
    model = nn.Linear(60, 60, bias=False)
    optimizer = still(model)
    bound = lossycoll.DriftBound(model, optimizer, 2)
    bound._collectives = Collectives(lost, recovery=Recovery(repair=2, exact=True))  # from here on
    end = time.monotonic() + 60
    text = ""
    while not text and time.monotonic() < end:
        fill(model, float(rank))
        try:
            optimizer.step()
        except lossycoll.LinkError as error:
            text = f"{error.peer}: {error}"
        except lossycoll.PeerLostError:
            break  # the one that raised has left
    injected = lossycoll.stats(lost).packets_injected
    bound.detach()
    dist.destroy_process_group(lost)
    return text, bound.steps, injected


def test_a_link_of_which_nothing_comes_is_an_error(ranks: list[dict[str, Any]]) -> None:
    reported = [got["nothing"] for got in ranks]
    assert [bool(text) for text, _, _ in reported] == [False, True, False]
    text, steps, injected = reported[1]
    found = re.fullmatch(
        r"0: rank 1/3: of (\d+) packets of parameters that rank 0 \(127.0.0.1:\d+\) sent in the "
        r"last (\d+) steps \(period 2\) none has come for (\S+) s, .*that link is dead.*checkpoint",
        text,
    )
    assert found, text
    assert 256 <= int(found[1]) <= injected
    assert 4 <= int(found[2]) <= steps
    assert float(found[3]) >= 2 * LIVENESS


# ---- what is refused ----


def refusals(rank: int) -> dict[str, str]:
    out: dict[str, str] = {}

    def ask(name: str, kind: type[Exception], call: Callable[[], Any]) -> None:
        try:
            call()
        except kind as error:
            out[name] = str(error)

    model = nn.Linear(3, 3)
    optimizer = still(model)
    ask("no group", lossycoll.UnsupportedError, lambda: lossycoll.DriftBound(model, optimizer))
    init()
    bad: list[Any] = [0, -1, 1.5, True, "16", None]
    for period in bad:
        ask(
            f"period {period!r}",
            ValueError,
            lambda period=period: lossycoll.DriftBound(model, optimizer, period),
        )
    for name, asked in (
        ("repair", {"repair": 256}),
        ("max_missing", {"max_missing": 1.5}),
        ("text", {"max_missing": "none"}),
    ):
        ask(name, ValueError, lambda asked=asked: lossycoll.DriftBound(model, optimizer, **asked))
    ask("no optimizer", TypeError, lambda: lossycoll.DriftBound(model, model))  # type: ignore[arg-type]
    other = nn.Linear(3, 3)
    ask("other", lossycoll.UnsupportedError, lambda: lossycoll.DriftBound(other, optimizer))
    for name, value in (
        ("expanded", torch.zeros(3, 1).expand(3, 4)),
        ("gaps", torch.zeros(4, 6)[:, ::2]),
        ("device", torch.zeros(3, device="meta")),
    ):
        one = nn.Linear(3, 3)
        one.extra = nn.Parameter(value)
        ask(name, lossycoll.UnsupportedError, lambda one=one: lossycoll.DriftBound(one, still(one)))
    uneven = nn.Linear(3, 3 + rank)
    ask(
        "shapes",
        lossycoll.MismatchError,
        lambda: lossycoll.DriftBound(uneven, still(uneven)),
    )
    sharded = lossycoll.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    ask("sharded", lossycoll.UnsupportedError, lambda: lossycoll.DriftBound(model, sharded))
    return out


def test_what_is_refused_says_why(ranks: list[dict[str, Any]]) -> None:
    for rank, got in enumerate(rank["refused"] for rank in ranks):
        assert "init_process_group" in got["no group"]
        for period in ("0", "-1", "1.5", "True", "'16'", "None"):
            assert f"period is {period}, wanted an integer, 1 to" in got[f"period {period}"]
        assert "repair is 256, wanted a number of rounds, 0 to 255, or None" in got["repair"]
        assert "max_missing is 1.5, wanted 0, 0.0001 to 1" in got["max_missing"]
        assert "max_missing is 'none', wanted a share, 0 to 1, or None" in got["text"]
        assert "optimizer is a Linear" in got["no optimizer"]
        assert "steps none of the model's parameters" in got["other"]
        assert "stride (1, 0)" in got["expanded"]
        assert "stride (6, 2)" in got["gaps"]
        assert "extra on meta" in got["device"]
        there = int(rank == 0)  # the first rank that differs
        assert (
            f"rank {rank}/3: ranks hold different parameters: weight torch.float32 [{3 + rank}, 3] "
            f"here, weight torch.float32 [{3 + there}, 3] on rank {there} (" in got["shapes"]
        )
        assert "keeps replicas together by itself" in got["sharded"]
