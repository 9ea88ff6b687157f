"""What lossycoll adds to training, with models on a GPU: each method's own promises.

Without loss a method learns what one process learns of all ranks' data. With it, replicas, errors
that are remembered and drift are what they are for CPU tensors.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import lossycoll
from lossycoll.cli.demo.model import ByteGPT, next_byte_loss
from tests.gpu.checks import Rank, Table
from tests.support.dropcompute_cases import Shuffled, check_close, dropping, inputs_of, oracle
from tests.support.dropcompute_cases import gradients as gradients_of
from tests.support.dropcompute_cases import loss_of as loss_of_drop
from tests.support.sharded_cases import batch, check_equal, flat, loss_of, network, sharded, share

TABLE = Table(init={"pg_options": {"delivery": "reliable"}})

STEPS, CONTEXT = 4, 32
PATIENT = {"lossy_min_bytes": 0, "reorder_min": 0.5, "deadline_min": 5.0, "repair": 0}
"""What a busy machine delivers late isn't lost."""
LOSS = {
    **PATIENT,
    "reorder_min": 0.02,
    "deadline_min": 2.0,
    "mtu": 576,
    "inject": "loss=0.2,seed=7",
}
HOSTS = {**PATIENT, "link": "udp", "mtu": 576}
"""As if each rank were a host: only what leaves one is encoded."""
NEAR = {"rtol": 1e-3, "atol": 2e-5}
ADAM = {"lr": 1e-3, "eps": 1e-5}
"""A gradient that is zero but for rounding moves nothing."""
Parts = list[Tensor]


@contextlib.contextmanager
def _group(**options: Any) -> Iterator[Any]:
    """A group of all ranks; if its options inject loss, there must have been some."""
    group = dist.new_group(pg_options=lossycoll.Options(**options))
    yield group
    lost = lossycoll.stats(group).packets_injected
    dist.destroy_process_group(group)
    assert (lost > 0) == ("inject" in options)


def _gpt(rank: Rank) -> nn.Module:
    torch.manual_seed(3)
    return ByteGPT(layers=2, width=64, context=CONTEXT).to(rank.device)


def _mlp(rank: Rank, hidden: int = 37) -> nn.Module:
    return network(hidden).to(rank.device)


def _loss(model: Any, rank: Rank, step: int, *, whole: bool) -> Tensor:
    """Of this rank's part of the step's batch, or of all of it."""
    if any(isinstance(module, ByteGPT) for module in model.modules()):
        draws = torch.Generator().manual_seed(step)
        every = torch.randint(0, 256, (4 * rank.world, CONTEXT + 1), generator=draws)
        rows = every if whole else every[4 * rank.rank : 4 * rank.rank + 4]
        rows = rows.to(rank.device)
        return next_byte_loss(model(rows[:, :-1]), rows[:, 1:])
    pair = batch(step, rank.world)
    x, y = pair if whole else share(pair, rank.rank)
    return loss_of(model, (x.to(rank.device), y.to(rank.device)))


def _train(
    rank: Rank, model: Any, optimizer: Any, *, whole: bool = False, steps: int = STEPS
) -> Parts:
    for step in range(steps):
        optimizer.zero_grad()
        _loss(model, rank, step, whole=whole).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAM)


def _alone(
    rank: Rank, make: Callable[[Rank], nn.Module], optimizer: Callable[..., Any] = _sgd, **rest: Any
) -> Parts:
    """What one process learns of everybody's data."""
    model = make(rank)
    return _train(rank, model, optimizer(model), whole=True, **rest)


def _ddp(rank: Rank, model: nn.Module, group: Any = None, **rest: Any) -> DDP:
    devices = [rank.device] if rank.cuda else None
    rest = {"bucket_cap_mb": 0.02, **rest}
    return DDP(model, device_ids=devices, process_group=group, **rest)


def _close(got: Sequence[Tensor], want: Sequence[Tensor], **tolerance: float) -> None:
    for place, (one, other) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(
            one,
            other,
            **{**NEAR, **tolerance},
            msg=lambda text, place=place: f"{place}: {text}",
        )


def _rows(rank: Rank, tensors: Sequence[Tensor]) -> Tensor:
    """All ranks', float32 (world, n)."""
    own = torch.cat([t.detach().reshape(-1).float() for t in tensors])
    rows = [torch.empty_like(own) for _ in range(rank.world)]
    dist.all_gather(rows, own)
    return torch.stack(rows)


def _alike(rank: Rank, tensors: Sequence[Tensor]) -> bool:
    """Whether all ranks have the same bits."""
    rows = _rows(rank, tensors)
    return bool((rows.view(torch.int32) == rows[0].view(torch.int32)).all())


# ---- DriftBound, measure_drift ----


@TABLE.check()
def drift_bound(rank: Rank) -> None:
    """Without loss it changes nothing, also of a model that was compiled or has state."""
    want = _alone(rank, _gpt)
    for rest in ({"period": 1}, {"period": 3, "state": True}):
        ddp = _ddp(rank, _gpt(rank))
        with lossycoll.DriftBound(ddp, optimizer := _sgd(ddp), **rest):
            got = _train(rank, ddp, optimizer)
        _close(got, want)
        assert _alike(rank, got)
        assert lossycoll.measure_drift(ddp).total == 0


@TABLE.check(limit=150, long=True)
def compiled_under_drift_bound(rank: Rank) -> None:
    import torch._dynamo

    want = _alone(rank, _gpt)
    ddp = _ddp(rank, _gpt(rank), bucket_cap_mb=1)
    compiled = torch.compile(ddp, backend="inductor" if rank.cuda else "aot_eager")
    with lossycoll.DriftBound(compiled, optimizer := _sgd(ddp), 2):
        got = _train(rank, compiled, optimizer)
    _close(got, want, rtol=5e-3, atol=2e-4)
    assert lossycoll.measure_drift(compiled).total == 0
    torch._dynamo.reset()


@TABLE.check()
def drift_under_loss_is_bounded(rank: Rank) -> None:
    """And it is gone after a sweep in which nothing is lost."""
    drifts = []
    for bounded in (False, True):
        with _group(**LOSS) as group:
            ddp = _ddp(rank, _mlp(rank, 96), group)
            optimizer = _sgd(ddp)
            bound = lossycoll.DriftBound(ddp, optimizer, 2) if bounded else None
            _train(rank, ddp, optimizer, steps=12)
            if bound is not None:
                bound.finish()
            drifts.append(lossycoll.measure_drift(ddp).total)
            if bound is not None:
                for group_ in optimizer.param_groups:
                    group_.update(lr=0.0)
                with bound, lossycoll.reliable():
                    for _ in range(bound.period):
                        optimizer.step()
                assert lossycoll.measure_drift(ddp).total == 0
                assert _alike(rank, list(ddp.parameters()))
    free, held = drifts
    assert 0 < held < free / 3, drifts


@TABLE.check()
def drift_bound_takes_owners_values(rank: Rank) -> None:
    """Every element, and the optimizer's state of it, comes from one rank; what was changed since
    it was sent stays."""
    model = nn.ParameterList([nn.Parameter(rank.full((300, 70), 0)), rank.full(1001, 0)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, rank.rank + 1.0)
    optimizer.step()
    optimizer.zero_grad()  # so that steps change nothing
    bound = lossycoll.DriftBound(model, optimizer, 3, state=True)
    owners = []
    for sweep in range(rank.world):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(10.0 * sweep + rank.rank)
        for step in range(3):
            optimizer.step()
            if step == 2 and sweep == rank.world - 1:
                with torch.no_grad():
                    model[1][990:] = -5.0 - rank.rank
            bound.finish()
        values = torch.cat([p.detach().reshape(-1) for p in model.parameters()])[:-11]
        assert _alike(rank, [values])
        owners.append(values - 10.0 * sweep)
        assert owners[-1].unique().tolist() == [float(one) for one in range(rank.world)]
    assert torch.equal(sum(owners[1:], owners[0]), torch.full_like(owners[0], 1.0))
    assert (model[1][990:] == -5.0 - rank.rank).all()
    state = optimizer.state[model[0]]["exp_avg"]
    assert _alike(rank, [state])
    assert len(state.unique()) == rank.world
    bound.detach()


class _Mixed(nn.Module):
    """Parameters of several types, one of them permuted."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(seed)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
            values = torch.randn(37, 11, generator=draws, dtype=torch.float64).to(dtype)
            self.register_parameter(f"of_{str(dtype)[6:]}", nn.Parameter(values))
        image = torch.randn(2, 3, 4, 5, generator=draws)
        self.image = nn.Parameter(image.to(memory_format=torch.channels_last))


@TABLE.check()
def drift_is_exact(rank: Rank) -> None:
    """As numpy finds it, where all replicas are known."""
    models = [_Mixed(one) for one in range(rank.world)]
    wide = [
        {name: p.detach().to(torch.complex128).numpy() for name, p in model.named_parameters()}
        for model in models
    ]
    pairs = [(a, b) for place, a in enumerate(wide) for b in wide[place + 1 :]]
    each = {
        name: float(np.mean([np.sum(np.abs(a[name] - b[name]) ** 2) for a, b in pairs]))
        for name in wide[0]
    }
    norm = sum(
        float(np.sum(np.abs(np.mean([of[name] for of in wide], axis=0)) ** 2)) for name in each
    )
    own = models[rank.rank].to(rank.device)
    got = lossycoll.measure_drift(own)
    assert dict(got.per_parameter) == pytest.approx(each, rel=1e-12)
    assert got.total == pytest.approx(sum(each.values()), rel=1e-12)
    assert got.relative_rms == pytest.approx(math.sqrt(sum(each.values()) / norm), rel=1e-12)
    assert lossycoll.measure_drift(_Mixed(9).to(rank.device)).total == 0
    if rank.rank == 1:
        with torch.no_grad():
            own.image[0, 1, 2, 3] = math.nan
    spoilt = lossycoll.measure_drift(own)
    assert math.isnan(spoilt.total)
    assert [n for n, value in spoilt.per_parameter.items() if math.isnan(value)] == ["image"]


# ---- ShardedOptimizer ----


@TABLE.check()
def sharded_optimizer(rank: Rank) -> None:
    """With modules that wait for their parameters, too; the random state is nobody's business."""
    for make, plain, kind, options in (
        (_gpt, _adam, torch.optim.AdamW, ADAM),
        (_mlp, _sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ):
        want = _alone(rank, make, plain)
        for waits in (False, True):
            model = make(rank)
            if rank.cuda:
                before = torch.cuda.get_rng_state(rank.device)
            rest = {"model": model} if waits else {}
            mine = sharded(model.parameters(), kind, bucket_bytes=50_000, **options, **rest)
            if rank.cuda:
                assert torch.equal(before, torch.cuda.get_rng_state(rank.device))
            got = _train(rank, model, mine)
            mine.wait_parameters()
            _close(got, want, rtol=5e-3, atol=1e-4)
            assert _alike(rank, got)


@TABLE.check()
def sharded_optimizer_clips_and_accumulates(rank: Rank) -> None:
    model, plain = _mlp(rank), _mlp(rank)
    mine, theirs = sharded(model.parameters(), torch.optim.AdamW, **ADAM), _adam(plain)
    for step in range(STEPS):
        mine.zero_grad()
        theirs.zero_grad()
        with mine.no_sync():
            _loss(model, rank, step, whole=False).backward()
        _loss(model, rank, step + 50, whole=False).backward()
        for of in (step, step + 50):
            _loss(plain, rank, of, whole=True).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(mine.clip_grad_norm_(0.1).float(), norm, rtol=1e-4, atol=1e-6)
        mine.step()
        theirs.step()
    check_equal(model, plain, rtol=1e-3, atol=1e-4)


@TABLE.check()
def sharded_optimizer_under_loss(rank: Rank) -> None:
    """No value is older than it may be; what is due comes, and in the end replicas are equal."""
    for age in (0, 1):
        with _group(**LOSS) as group:
            model = _mlp(rank, 96)
            mine = sharded(model.parameters(), torch.optim.AdamW, group, lr=0.003, max_age=age)
            for step in range(8):
                mine.zero_grad()
                _loss(model, rank, step, whole=False).backward()
                mine.clip_grad_norm_(1.0)
                mine.step()
                assert len(mine.ages()) - 1 <= age
            assert _alike(rank, list(model.parameters())) == (age == 0)
            assert (mine.stats().stale > 0) == (age > 0)
            mine.synchronize_parameters()
            assert _alike(rank, list(model.parameters()))


def _pulls(rank: Rank, group: Any, **rest: Any) -> float:
    """Of all gradients nothing is lost: it was stepped with, or is still to come. Returns how much
    is."""
    weights = [nn.Parameter(rank.full(size, 0)) for size in (4000, 1000)]
    mine = sharded(
        weights, torch.optim.SGD, group, lr=1.0, error_feedback=True, bucket_bytes=8000, **rest
    )
    given = [torch.zeros_like(w.data) for w in weights]
    for step in range(8):
        mine.zero_grad()
        draws = torch.Generator().manual_seed(100 * step + rank.rank)
        parts = [torch.randn(w.shape, generator=draws).to(rank.device) for w in weights]
        used = 1 if step == 5 or (step + rank.rank) % 3 == 0 else 2
        sums = [(w * part).sum() for w, part in zip(weights, parts, strict=True)]
        torch.stack(sums[:used]).sum().backward()
        mine.step()
        for have, part in zip(given[:used], parts, strict=False):
            have.add_(part)
    left = [torch.zeros_like(w.data) for w in weights]
    for shard, values in zip(mine._store.shards, mine._reducer.residuals(), strict=True):
        for member in shard.bucket.members:
            left[member.index] += values[member.begin : member.end]
    mine.synchronize_parameters()
    assert _alike(rank, weights)
    for weight, have, kept in zip(weights, given, left, strict=True):
        stepped = _rows(rank, [have - kept]).mean(0)
        torch.testing.assert_close(weight.data, -stepped, rtol=1e-4, atol=1e-4)
    return mine.residual_norm()


@TABLE.check()
def sharded_optimizer_with_error_feedback(rank: Rank) -> None:
    """What packets lose, or few bits, is in the residuals to the last bit but rounding's."""
    for options, wire in ((LOSS, None), (LOSS, "int4/int8"), (HOSTS, "int4/int8")):
        with _group(**options) as group:
            assert _pulls(rank, group, wire=wire) > 0


@TABLE.check()
def sharded_optimizer_in_few_bits(rank: Rank) -> None:
    """Replicas hold the same after each step, near to what one process learns, for fewer bytes;
    parameters are exact in the end."""
    sent: dict[str | None, int] = {}
    want = _alone(rank, lambda rank: _mlp(rank, 96), _adam, steps=10)
    for wire in (None, "int8", "int4/int6", "same/int8"):
        with _group(**HOSTS) as group:
            model = _mlp(rank, 96)
            rest = {"wire": wire, "max_age": 0, **ADAM}
            mine = sharded(model.parameters(), torch.optim.AdamW, group, **rest)
            before = lossycoll.stats(group).bytes_sent
            for step in range(10):
                mine.zero_grad()
                _loss(model, rank, step, whole=False).backward()
                mine.step()
                assert _alike(rank, list(model.parameters())), (wire, step)
            sent[wire] = lossycoll.stats(group).bytes_sent - before
            mine.synchronize_parameters()
            near = {"rtol": 0.0, "atol": 0.008} if wire else NEAR
            _close([p.detach() for p in model.parameters()], want, **near)
    assert sent["int8"] < 0.5 * sent[None]
    assert sent["int4/int6"] < sent["int8"] < sent["same/int8"]


@TABLE.check()
def sharded_optimizer_with_a_grad_scaler(rank: Rank) -> None:
    """A rank's infinity has all of them leave the step out, and halve the scale alike."""
    model, plain = _mlp(rank), _mlp(rank)
    mine, theirs = sharded(model.parameters(), torch.optim.AdamW, **ADAM), _adam(plain)
    scaler = torch.amp.GradScaler(rank.device.partition(":")[0], init_scale=8.0, growth_interval=2)
    scales = []
    for step in range(6):
        before = flat(model.parameters()).clone()
        mine.zero_grad()
        bad = step == 3
        factor = math.inf if bad and rank.rank == rank.world - 1 else 1.0
        scaler.scale(_loss(model, rank, step, whole=False) * factor).backward()
        if step % 2:
            scaler.unscale_(mine)
            mine.clip_grad_norm_(1e9)
        scaler.step(mine)
        scaler.update()
        scales.append(scaler.get_scale())
        assert torch.equal(before, flat(model.parameters())) == bad
        if not bad:
            theirs.zero_grad()
            _loss(plain, rank, step, whole=True).backward()
            theirs.step()
    assert scales == [8.0, 16.0, 16.0, 8.0, 8.0, 16.0], scales
    check_equal(model, plain, rtol=5e-3, atol=1e-4)
    assert _alike(rank, list(model.parameters()))


def _everywhere(value: Any) -> Any:
    """Rank 0's, with its tensors in host memory, as of a file that was loaded there."""
    held = [value]
    dist.broadcast_object_list(held, 0)
    file = io.BytesIO()
    torch.save(held[0], file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)


@TABLE.check()
def sharded_optimizer_checkpoint(rank: Rank) -> None:
    """State goes to the plain optimizer, to another sharded one, and to what is unfrozen later."""
    model = _mlp(rank)
    mine = sharded(model.parameters(), torch.optim.AdamW, **ADAM)
    _train(rank, model, mine)
    mine.consolidate_state_dict()
    book = _everywhere(mine.state_dict() if rank.rank == 0 else None)
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    theirs = _adam(plain)
    theirs.load_state_dict(copy.deepcopy(book))
    last = list(other.parameters())[-2:]
    for parameter in last:
        parameter.requires_grad_(False)
    again = sharded(other.parameters(), torch.optim.AdamW, **ADAM)
    again.load_state_dict(copy.deepcopy(book))
    for parameter in last:
        parameter.requires_grad_(True)
    again.add_param_group({"params": last})
    for each, net, whole in ((mine, model, False), (theirs, plain, True), (again, other, False)):
        for step in range(10, 13):
            each.zero_grad()
            _loss(net, rank, step, whole=whole).backward()
            each.step()
    check_equal(model, plain, rtol=1e-3, atol=5e-5)
    check_equal(other, plain, rtol=1e-3, atol=5e-5)


# ---- ARC-Top-K ----


def _compressed(group: Any = None, **rest: Any) -> Any:
    options = {"start_iter": 1, "ratio": 0.2, "dense_below": 200, **rest}
    return lossycoll.ARCTopKState(group, **options)


def _hooked(rank: Rank, state: Any, device: str, group: Any = None) -> tuple[DDP, Any]:
    there = Rank(rank.rank, rank.world, device)
    ddp = _ddp(there, _mlp(there, 96), group)
    ddp.register_comm_hook(state, lossycoll.arc_topk_hook)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


@TABLE.check()
def arc_topk_is_what_it_is_on_the_cpu(rank: Rank) -> None:
    """Also after its memory was loaded into host memory."""
    for rule in ("ef14", "ef21m"):
        found = []
        for device in ("cpu", rank.device):
            state = _compressed(error_feedback=rule)
            ddp, optimizer = _hooked(rank, state, device)
            there = Rank(rank.rank, rank.world, device)
            _train(there, ddp, optimizer, steps=5)
            file = io.BytesIO()
            torch.save(state.state_dict(), file)
            file.seek(0)
            state.load_state_dict(torch.load(file, map_location="cpu", weights_only=False))
            got = _train(there, ddp, optimizer, steps=3)
            assert state.iter == 8
            assert _alike(rank, got)
            found.append([p.cpu() for p in got])
            assert state.traffic()["rows"] > 0
        _close(found[1], found[0])


@TABLE.check()
def arc_topk_under_loss(rank: Rank) -> None:
    """Replicas are equal to the bit; all have the mean of what each remembers."""
    with _group(**LOSS) as group:
        state = _compressed(group, error_feedback="ef21m")
        ddp, optimizer = _hooked(rank, state, rank.device, group)
        for _ in range(3):
            _train(rank, ddp, optimizer)
            assert _alike(rank, list(ddp.parameters()))
        memories = state.state_dict()["memories"]
        assert any(memories.values())
        for memory in filter(None, memories.values()):
            assert memory["own"].device == torch.device(rank.device)
            mean = _rows(rank, [memory["own"]]).mean(0)
            torch.testing.assert_close(memory["all"].view(-1), mean, rtol=1e-4, atol=1e-4)
        assert state.traffic()["lost"] > 0


@TABLE.check()
def arc_topk_loses_nothing_for_good(rank: Rank) -> None:
    """What all ranks have used and what they remember is all that they had; in few bits, too."""
    shapes = [(60, 40), (300,), (32, 8, 3, 3), (7, 2)]
    for options, wire in ((LOSS, None), (LOSS, "int4/int8"), (HOSTS, "int8")):
        with _group(**options) as group:
            state = _compressed(
                group, error_feedback="ef14", start_iter=0, dense_below=0, wire=wire
            )
            total = [rank.full(shape, 0) for shape in shapes]
            used = [rank.full(shape, 0) for shape in shapes]
            for step in range(8):
                draws = torch.Generator().manual_seed(100 * step + rank.rank)
                grads = [torch.randn(s, generator=draws).to(rank.device) for s in shapes]
                torch._foreach_add_(total, grads)
                state.mean_(grads)
                torch._foreach_add_(used, grads)
                assert _alike(rank, grads)
            held = state.state_dict()
            for place, shape in enumerate(shapes):
                owed = held["owed"].get(str(place), rank.full(shape, 0)).view(shape)
                memory = held["memories"].get(str(place), {})
                if memory:
                    owed = owed + memory["error"].view(shape)
                expected = _rows(rank, [total[place] - owed]).mean(0)
                torch.testing.assert_close(used[place].view(-1), expected, rtol=1e-4, atol=1e-4)
            assert state.traffic()["lost"] > 0


@TABLE.check()
def sharded_optimizer_compressed(rank: Rank) -> None:
    """With all rows, and nothing remembered, it is the optimizer alone; what isn't a number is
    refused on all ranks, which go on."""
    want = _alone(rank, _mlp)
    model = _mlp(rank)
    state = _compressed(ratio=1.0, momentum=1.0, on_nonfinite="raise")
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, compression=state)
    _close(_train(rank, model, mine), want)
    mine.zero_grad()
    factor = math.nan if rank.rank else 1.0
    with pytest.raises(lossycoll.NonFiniteError):
        (_loss(model, rank, 0, whole=False) * factor).backward()
    mine.zero_grad()
    _train(rank, model, mine)
    assert _alike(rank, list(model.parameters()))
    assert flat(model.parameters()).isfinite().all()
    state = _compressed(error_feedback="ef14")
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1, compression=state)
    _train(rank, model, mine)
    assert _alike(rank, list(model.parameters()))
    assert state.traffic()["rows"] > 0


# ---- hooks, wire_allreduce_ ----


@TABLE.check()
def dispersing_hook(rank: Rank) -> None:
    """Without loss it is the mean. With it, each element is the mean or a rank's own."""
    want = _alone(rank, lambda rank: _mlp(rank, 96))
    for options in (PATIENT, LOSS):
        with _group(**options) as group:
            ddp = _ddp(rank, _mlp(rank, 96), group)
            ddp.register_comm_hook(group, lossycoll.dispersing_hook)
            if options is PATIENT:
                got = _train(rank, ddp, _sgd(ddp))
                _close(got, want)
                assert _alike(rank, got)
                continue
            own = _mlp(rank, 96)
            _loss(own, rank, 0, whole=False).backward()
            rows = _rows(rank, [p.grad for p in own.parameters()])  # type: ignore[misc]
            for _ in range(3):  # in other buckets from the second on
                ddp.zero_grad()
                _loss(ddp, rank, 0, whole=False).backward()
                got = flat(p.grad for p in ddp.parameters())  # type: ignore[misc]
                allowed = torch.cat([rows, rows.mean(0, keepdim=True)])
                off = (got - allowed).abs()
                assert off.min(0).values.max() < 1e-6
                assert off[-1].max() > 1e-4, "nothing was lost"


class _Given(nn.Module):
    """Its parameters get the gradients that it is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(64, dtype=dtype))

    def forward(self, wanted: Parts) -> Tensor:
        parts = zip((self.weight, self.bias), wanted, strict=True)
        return torch.stack([(part * given).sum() for part, given in parts]).sum()


def _given(rank: int, step: int, dtype: torch.dtype) -> Parts:
    """One large element for each group, so that most others are smaller than half a step."""
    draws = torch.Generator().manual_seed(1000 * step + rank)
    weight = 0.01 * torch.randn(64, 64, generator=draws) + 0.002
    weight[:, 0] = 1 + rank
    return [weight.to(dtype), (0.01 * torch.randn(64, generator=draws) + 0.002).to(dtype)]


@TABLE.check()
def wire_feedback_hook(rank: Rank) -> None:
    """The bits of CPU tensors; what rounding takes in one step comes with the next ones."""
    with _group(**{**HOSTS, "delivery": "reliable"}) as group:
        for dtype in (torch.float32, torch.bfloat16):
            sums = []
            for device in ("cpu", rank.device):
                there = Rank(rank.rank, rank.world, device)
                ddp = _ddp(there, _Given(dtype).to(device), group)
                state = lossycoll.WireFeedbackState("int4/int8", group=group)
                ddp.register_comm_hook(state, lossycoll.wire_feedback_hook)
                total = torch.zeros(64 * 65)
                for step in range(12):
                    ddp.zero_grad()
                    own = _given(rank.rank, step, dtype)
                    ddp([part.to(device) for part in own]).backward()
                    total += flat(p.grad for p in ddp.parameters()).float().cpu()  # type: ignore[misc]
                sums.append(total)
            assert torch.equal(sums[0], sums[1])
            assert _alike(rank, [sums[1]])
            truth = torch.stack([
                sum(flat(_given(one, step, dtype)).float() for step in range(12))  # type: ignore[misc]
                for one in range(rank.world)
            ]).mean(0)  # fmt: skip
            off = float((sums[1] - truth).abs().max())
            assert 0 < off < 0.2, "a step's error, not that of all"


@TABLE.check()
def wire_all_reduce(rank: Rank) -> None:
    """The bits of CPU tensors, the same on all ranks."""
    with _group(**HOSTS) as group:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            draws = torch.Generator().manual_seed(7)
            everyone = torch.randn(rank.world, 3, 3333, generator=draws).to(dtype)
            for wire, rest in (
                ("int8", {}),
                ("int4", {"wire_group": 32, "average": True}),
                ("int2", {"wire_spikes": 1}),
                ("same", {}),
            ):
                want, mine = everyone[rank.rank].clone(), everyone[rank.rank].to(rank.device)
                lossycoll.wire_allreduce_(want, wire, group, **rest)
                mine = mine.clone()
                assert lossycoll.wire_allreduce_(mine, wire, group, **rest) is mine
                assert torch.equal(mine.cpu(), want), (dtype, wire)
                assert _alike(rank, [mine])


# ---- DropCompute ----

MICRO, THRESHOLD = 4, 9.5
SECONDS = ((1.0, 5.0), (20.0, 1.0), (1.0, 1.0))
COUNTS = ((4, 2), (1, 4), (4, 4))
"""By step and rank: how long micro-batches take, and how many are completed."""


def _wrapped(rank: Rank, way: str, model: nn.Module) -> tuple[Any, Any]:
    """What is trained, and what DropCompute is given."""
    if way == "plain":
        return model, model
    if way == "sharded":
        return model, sharded(model.parameters(), torch.optim.SGD, lr=0.5)
    rest = {"find_unused_parameters": True} if way == "unused" else {}
    rest = {"static_graph": True} if way == "static" else rest
    wrapped = _ddp(rank, model, bucket_cap_mb=0.004, **rest)
    return wrapped, wrapped


@TABLE.check()
def drop_compute(rank: Rank) -> None:
    """Gradients are those of the micro-batches that were completed, whoever averages."""
    for way in ("plain", "ddp", "unused", "static", "sharded"):
        partly = way in ("unused", "static")
        model, plain = (Shuffled(partly=partly).to(rank.device) for _ in range(2))
        trained, given = _wrapped(rank, way, model)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
        drop = dropping(given, MICRO, THRESHOLD)
        for step, counts in enumerate(COUNTS):
            for number in drop(iter(range(MICRO))):
                x = inputs_of(rank.rank, step, number).to(rank.device)
                (loss_of_drop(trained, x) / MICRO).backward()
                drop.clock.now += SECONDS[step][rank.rank]
            last = drop.report().last
            assert (last.completed, last.total_completed) == (counts[rank.rank], sum(counts))
            want = _wanted(rank, plain, step, counts)
            if way == "sharded":
                for parameter, grad in zip(plain.parameters(), want, strict=True):
                    parameter.grad = grad
                theirs.step()
                theirs.zero_grad()
                given.step()
                given.zero_grad()
                check_equal(model, plain, way, rtol=1e-9, atol=1e-9)
                continue
            check_close(gradients_of(model), want, f"{way}, step {step}")
            model.zero_grad()
        found = [report.completed for report in drop.gather_report()]
        assert found == [sum(counts[one] for counts in COUNTS) for one in range(rank.world)]


def _wanted(rank: Rank, plain: nn.Module, step: int, counts: Sequence[int]) -> list[Any]:
    """What one process finds; inputs are made on the CPU."""
    on_cpu = copy.deepcopy(plain).cpu()
    return [None if g is None else g.to(rank.device) for g in oracle(on_cpu, step, counts)]


@TABLE.check()
def drop_compute_with_a_slow_rank(rank: Rank) -> None:
    """By the true clock, which waits for kernels: on a GPU nothing but they take long."""
    model, plain = (Shuffled().to(rank.device) for _ in range(2))
    loss_of_drop(model, inputs_of(0, 0, 0).to(rank.device)).backward()  # loads what there is
    model.zero_grad()
    drop = lossycoll.DropCompute(_ddp(rank, model), MICRO, 0.4)
    for number in drop(iter(range(MICRO))):
        x = inputs_of(rank.rank, 0, number).to(rank.device)
        (loss_of_drop(model, x) / MICRO).backward()
        if rank.rank == 1 and rank.cuda:
            torch.cuda._sleep(500_000_000)  # 0.25 s at 2 GHz
        elif rank.rank == 1:
            time.sleep(0.25)
    last = drop.report().last
    assert last is not None
    if rank.rank == 1:
        assert last.dropped > 0
    completed = [report.completed for report in drop.gather_report()]
    assert completed[rank.rank] == last.completed
    check_close(gradients_of(model), _wanted(rank, plain, 0, completed))


def _peer(rank: Rank, **how: Any) -> tuple[Parts, Any]:
    """The model after steps as a peer of a swarm of all ranks, on a stream of the caller's, and the
    report of a round that ran beside the last of them."""
    secret = "a secret of tests"
    address: list[Any] = [None]
    first = lossycoll.Swarm("127.0.0.1:0", secret=secret) if rank.rank == 0 else None
    if first is not None:
        address = [first.address]
    dist.broadcast_object_list(address, 0)
    with first or lossycoll.Swarm(join=address, secret=secret) as swarm:
        model = _mlp(rank)
        averager = lossycoll.MoshpitAverager(swarm, model.parameters(), grid=(rank.world,))
        with torch.cuda.stream(torch.cuda.Stream() if rank.cuda else None):
            optimizer = lossycoll.MoshpitSGD(model, _sgd(model), averager, timeout=30.0, **how)
            dist.barrier()
            found = _train(rank, model, optimizer)
            report = optimizer.finish()
        rank.wait_for_device()
        dist.barrier()  # nobody leaves before
    return found, report


@TABLE.check()
def rounds_of_gradients_in_a_swarm(rank: Rank) -> None:
    found, _ = _peer(rank, average="gradients")
    _close(found, _alone(rank, _mlp))


@TABLE.check()
def rounds_beside_the_steps_of_a_swarm(rank: Rank) -> None:
    found, report = _peer(rank, every=2, delayed=True)
    assert (report.failure, report.kept) == ("", 0.0)
    rows = _rows(rank, found)
    _close(list(rows[1:]), [rows[0]] * (rank.world - 1))
