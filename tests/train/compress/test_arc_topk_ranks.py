"""ARC-Top-K among real ranks: over gloo, and over a group that loses 30% of its packets."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from lossycoll.train.compress import selection
from tests.support import arc_cases, harness
from tests.support.harness import run_good

WORLD = 4
LOSSY = {
    "LOSSYCOLL_LOG": "off",
    "LOSSYCOLL_LIVENESS": "30",
    "LOSSYCOLL_MTU": "576",  # many packets
    "LOSSYCOLL_INJECT": "loss=0.3,seed=7",
}
HIDDEN = 96
BUCKET_MIB = 0.05


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(),
        nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 24),
    )  # fmt: skip


def replica(state: Any, model: nn.Module | None = None, **rest: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model or network(), bucket_cap_mb=BUCKET_MIB, **rest)
    if state is not None:
        ddp.register_comm_hook(state, lossycoll.arc_topk_hook)
    return ddp


def train(ddp: Any, rank: int, steps: int, first: int = 0) -> list[float]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.6)
    losses = []
    for step in range(first, first + steps):
        draw = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(16, 24, generator=draw)
        loss = (ddp(x) - x.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def rows(tensor: Tensor) -> Tensor:
    """All ranks' ``tensor``, (world, n), reliably."""
    own = tensor.detach().reshape(-1).contiguous()
    out = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    with lossycoll.reliable():
        dist.all_gather(out, own)
    return torch.stack(out)


def same(*tensors: Tensor) -> bool:
    found = rows(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))
    return all(torch.equal(row, found[0]) for row in found)


def made(**rest: Any) -> Any:
    return lossycoll.ARCTopKState(**{"start_iter": 3, "ratio": 0.2, **rest})


# ---- over a group that loses packets ----


class Chosen:
    """Notes what rows are chosen."""

    def __init__(self) -> None:
        self.indices: list[Tensor] = []
        self._best = selection.best

    def __enter__(self) -> Chosen:
        def best(scores: Tensor, k: int) -> Tensor:
            self.indices.append(self._best(scores, k))
            return self.indices[-1]

        selection.best = best  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        selection.best = self._best


def hooked(rank: int, rule: str) -> dict[str, Any]:
    """Replicas are equal, ranks choose the same rows, and torch's random state is
    nobody's business."""
    state = made(error_feedback=rule, ratio=0.1)
    ddp = replica(state)
    torch.manual_seed(rank)
    before = torch.random.get_rng_state()
    losses, equal = [], True
    with Chosen() as chosen:
        for step in range(40):
            losses += train(ddp, rank, 1, step)
            if step % 4 == 3:  # ranks that had parted once would not meet again
                equal &= same(*ddp.parameters())
    assert torch.equal(before, torch.random.get_rng_state())
    assert state.iter == 40
    assert same(torch.cat(chosen.indices))
    assert len(chosen.indices) >= 36 * 3
    return {"losses": losses, "equal": equal, "lost": state.traffic()["lost"]}


def conserved(rank: int, rule: str, wire: str | None = None) -> int:
    """What all ranks have used and what they remember is all that they had."""
    state = made(error_feedback=rule, start_iter=0, momentum=0.3, dense_below=0, wire=wire)
    shapes = [(60, 40), (300,), (32, 8, 3, 3), (7, 2)]
    total = [torch.zeros(shape) for shape in shapes]
    used = [torch.zeros(shape) for shape in shapes]
    for step in range(12):
        draw = torch.Generator().manual_seed(100 * step + rank)
        gradients = [torch.randn(shape, generator=draw) for shape in shapes]
        total = [a + b for a, b in zip(total, gradients, strict=True)]
        state.mean_(gradients)
        assert same(*gradients)
        used = [a + b for a, b in zip(used, gradients, strict=True)]
    held = state.state_dict()
    for i, shape in enumerate(shapes):
        owed = held["owed"].get(str(i), torch.zeros(shape)).view(shape)
        memory = held["memories"].get(str(i), {})
        if memory and rule != "ef14":
            mean = rows(memory["own"]).mean(0)
            torch.testing.assert_close(memory["all"].view(-1), mean, rtol=1e-4, atol=1e-4)
            assert torch.equal(memory["all"].view(shape), gradients[i])
            continue
        if memory:
            owed = owed + memory["error"].view(shape)
        expected = rows(total[i] - owed).mean(0)
        torch.testing.assert_close(used[i].view(-1), expected, rtol=1e-4, atol=1e-4)
    return int(state.traffic()["lost"])


def shifted(rank: int, world: int) -> float:
    """The robust shifted objective with a rank for each node."""
    signs = torch.tensor([1.0 if i < world // 2 else -1.0 for i in range(world)])
    state = made(
        ratio=0.05, sketch_dim=2, error_feedback="ef21", start_iter=0, dense_below=0, seed=3
    )
    w = torch.zeros(arc_cases.BLOCKS, arc_cases.BLOCK)
    velocity = torch.zeros_like(w)
    for _ in range(250):
        velocity = 0.5 * velocity + arc_cases.shifted_gradients(w, signs)[rank]
        gradient = velocity.clone()
        state.mean_([gradient])
        w = w - 1e-3 * gradient
    assert same(w)
    return arc_cases.distance(w)


def resumes(rank: int) -> None:
    """A state that is saved and loaded continues as if nothing had happened, also in a model whose
    DDP has other buckets at first."""
    named = made()
    ddp = replica(named)
    named.name(ddp.module.named_parameters())
    train(ddp, rank, 8)
    weights = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    saved = pickle.loads(pickle.dumps(named.state_dict()))
    pickled = pickle.dumps(named)
    with lossycoll.reliable():
        train(ddp, rank, 4, 8)
    for way in ("state_dict", "pickle"):
        if way == "pickle":
            state = pickle.loads(pickled)
        else:
            state = made()
            state.load_state_dict(saved)
        other = replica(state)
        state.name(other.module.named_parameters())
        other.module.load_state_dict(weights)
        with lossycoll.reliable():
            train(other, rank, 4, 8)
        assert state.iter == 12
        for one, two in zip(ddp.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    with pytest.raises(lossycoll.CheckpointError, match="ef21"):
        made(error_feedback="ef21").load_state_dict(saved)
    with pytest.raises(lossycoll.CheckpointError, match="world"):
        made().load_state_dict({**saved, "world": 9})


def bad_gradients(rank: int, world: int, wire: str | None = None) -> None:
    state = made(start_iter=0, dense_below=0, error_feedback="ef14", wire=wire)
    shapes = ((40, 30), (20, 30), (5,))
    for step in range(6):
        draw = torch.Generator().manual_seed(10 * step + rank)
        gradients = [torch.randn(shape, generator=draw) for shape in shapes]
        before = state.state_dict()["memories"]
        if step == 3 and rank == 1:
            gradients[0][3, 3] = float("inf")
        if step == 4 and rank == 2:
            gradients[2][1] = float("nan")
        state.mean_(gradients)
        assert bool(gradients[0].isnan().all()) == (step == 3)
        assert bool(gradients[2].isnan().all()) == (step == 4)
        assert bool(gradients[1].isfinite().all())
        if step == 3:
            after = state.state_dict()["memories"]
            assert torch.equal(before["0"]["error"], after["0"]["error"])
            assert not torch.equal(before["1"]["error"], after["1"]["error"])
        assert same(gradients[1])
    loud = made(start_iter=0, dense_below=0, on_nonfinite="raise")
    loud.mean_([torch.ones(40, 30)])
    with pytest.raises(lossycoll.NonFiniteError, match="parameter 0"):
        loud.mean_([torch.full((40, 30), float("nan") if rank == 0 else 1.0)])
    with pytest.raises(lossycoll.TrainingError, match=r"\(40, 31\).*\(40, 30\)"):
        loud.mean_([torch.ones(40, 31)])
    with pytest.raises(lossycoll.UnsupportedError, match="sparse"):
        loud.mean_([torch.zeros(40, 30).to_sparse()])
    with pytest.raises(lossycoll.UnsupportedError, match="gaps"):
        made().mean_([torch.zeros(40, 60)[:, ::2]])
    with pytest.raises(lossycoll.MismatchError, match="ratio"):
        made(ratio=0.1 if rank else 0.2).mean_([torch.ones(40, 30)])
    made().mean_([torch.ones(40, 30)])  # nobody hangs, and the group is as good as before


def lossy(rank: int, world: int) -> dict[str, Any]:
    harness.init()
    out: dict[str, Any] = {rule: hooked(rank, rule) for rule in ("none", "ef14", "ef21", "ef21m")}
    out["conserved"] = [conserved(rank, rule) for rule in ("ef14", "ef21", "ef21m")]
    out["few bits"] = [conserved(rank, rule, "int4/int8") for rule in ("ef14", "ef21m")]
    out["shifted"] = shifted(rank, world)
    resumes(rank)
    bad_gradients(rank, world)
    bad_gradients(rank, world, "int8")
    out["injected"] = lossycoll.stats().packets_injected
    dist.destroy_process_group()
    return out


@pytest.fixture(scope="module")
def values() -> list[dict[str, Any]]:
    return run_good(lossy, WORLD, LOSSY, timeout=200)


@pytest.mark.parametrize("rule", ["none", "ef14", "ef21", "ef21m"])
def test_replicas_are_equal_and_learn_where_packets_are_lost(
    values: list[dict[str, Any]], rule: str
) -> None:
    for value in values:
        seen = value[rule]
        assert value["injected"] > 1000
        assert seen["equal"]
        assert (seen["lost"] > 1000) == (rule != "none")
        # A tenth of the rows learns slowly without memory of the others.
        share = 0.95 if rule == "none" else 0.85
        assert sum(seen["losses"][-5:]) < share * sum(seen["losses"][:5]), seen["losses"]


def test_what_was_used_and_what_is_remembered_is_all_there_was(
    values: list[dict[str, Any]],
) -> None:
    assert all(lost > 100 for value in values for lost in value["conserved"])
    assert all(lost > 10_000 for value in values for lost in value["few bits"]), "few are on a grid"


def on_hosts(rank: int, world: int) -> list[int]:
    """What rounding takes from the sum of a host is remembered by the rank that has sent it."""
    del world
    options = lossycoll.Options(host="aabb"[rank], lossy_min_bytes=0)
    dist.init_process_group("lossy", pg_options=options)
    assert lossycoll.topology().hosts == (0, 0, 1, 1)
    found = [conserved(rank, rule, wire) for rule in ("ef14", "ef21m") for wire in (None, "int4")]
    dist.destroy_process_group()
    return found


def test_nothing_is_counted_twice_where_ranks_share_hosts() -> None:
    for found in run_good(on_hosts, WORLD, {"LOSSYCOLL_LOG": "off", **harness.EXACT}):
        assert found[0] == found[2] == 0
        assert min(found[1], found[3]) > 1000


def test_the_shifted_objective_is_solved_where_packets_are_lost(
    values: list[dict[str, Any]],
) -> None:
    assert len({value["shifted"] for value in values}) == 1
    assert values[0]["shifted"] < 0.1


# ---- over gloo ----


def counted(rank: int) -> None:
    """A step hands m r + K n numbers of each matrix to all-reduces, and the rest whole."""
    model = network()
    state = made(ratio=0.1, start_iter=2, error_feedback="ef21m")
    ddp = replica(state, model)
    train(ddp, rank, 3)  # the first whole ones are EF21's, too
    numbers, real = [], dist.all_reduce

    def all_reduce(tensor: Tensor, *rest: Any, **named: Any) -> Any:
        numbers.append(tensor.numel())
        return real(tensor, *rest, **named)

    before = state.traffic()
    dist.all_reduce = all_reduce
    try:
        train(ddp, rank, 1, 3)
    finally:
        dist.all_reduce = real
    after = state.traffic()
    shapes = [p.shape for p in model.parameters()]
    sketch = sum(m * 4 for m, *rest in shapes if rest)
    chosen = sum(-(-m // 10) * rest[0] for m, *rest in shapes if rest)
    whole = sum(m for m, *rest in shapes if not rest)
    sent = {name: after[name] - before[name] for name in after}
    # Each all-reduce is padded to a multiple of the world.
    buckets = len(numbers) // 2
    assert buckets >= 2
    assert 0 <= sum(numbers) - (sketch + chosen + whole) < WORLD * buckets
    assert (sent["sketch"], sent["rows"], sent["whole"]) == (sketch, chosen, whole)
    assert sent["bytes"] == 4 * (sketch + chosen + whole)
    assert sent["flags"] == sent["indices"] == sent["lost"] == 0
    held = sum(m * rest[0] for m, *rest in shapes if rest)
    assert state.memory_bytes() == 4 * 3 * held


def all_rows_are_dense(rank: int) -> None:
    """ratio 1 and momentum 1: DDP's own gradients, bit for bit."""
    plain = replica(None)
    plain.register_comm_hook(None, plain_mean)
    mine = replica(made(ratio=1.0, momentum=1.0, start_iter=0))
    assert train(plain, rank, 5) == train(mine, rank, 5)
    for one, two in zip(plain.parameters(), mine.parameters(), strict=True):
        assert torch.equal(one, two)


def plain_mean(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    def divide(future: torch.futures.Future[Any]) -> Tensor:
        return future.value()[0].div_(WORLD)  # type: ignore[no-any-return]

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(divide)


# DDP wants its own classes, not their names.
plain_mean.__annotations__.update(
    {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
)


class Branches(nn.Module):
    """Of which a rank may not use all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(24, HIDDEN), nn.Linear(24, HIDDEN)
        self.out = nn.Linear(HIDDEN, 24)

    def forward(self, x: Tensor, right: bool) -> Tensor:
        hidden = self.left(x) + self.right(x) if right else self.left(x)
        out: Tensor = self.out(hidden)
        return out


def missing_gradients(rank: int) -> None:
    """A rank that doesn't use a parameter contributes zeros."""
    state = made(start_iter=0, error_feedback="ef14", ratio=0.5)
    ddp = replica(state, Branches(), find_unused_parameters=True)
    for _ in range(4):
        x = torch.full((4, 24), 1.0 + rank)
        ddp.zero_grad()
        ddp(x, right=rank == 0).sum().backward()
        assert same(*(p.grad for p in ddp.parameters() if p.grad is not None))
        assert bool(ddp.module.right.weight.grad.any())


def mixed_types(rank: int) -> None:
    """bfloat16 gradients with float32 memories: what rounding takes is remembered."""
    state = made(start_iter=0, dense_below=0, error_feedback="ef14", sketch_dtype=torch.bfloat16)
    total, used = torch.zeros(40, 30), torch.zeros(40, 30)
    for step in range(8):
        draw = torch.Generator().manual_seed(10 * step + rank)
        gradient = torch.randn(40, 30, generator=draw).bfloat16()
        other = torch.randn(20, 20, generator=draw, dtype=torch.float64)
        total += gradient.float()
        state.mean_([gradient, other])
        used += gradient.float()
        assert gradient.dtype == torch.bfloat16
    error = state.state_dict()["memories"]["0"]["error"]
    assert error.dtype == torch.float32
    expected = rows(total - error).mean(0)
    torch.testing.assert_close(used.view(-1), expected, rtol=0.02, atol=0.05)


def channels_last(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3))
    model = model.to(memory_format=torch.channels_last)
    ddp = replica(made(start_iter=1, error_feedback="ef14"), model)
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(2, 8, 8, 8, generator=draw).to(memory_format=torch.channels_last)
        ddp.zero_grad()
        ddp(x).square().sum().backward()
        assert same(*(p.grad.contiguous() for p in ddp.parameters()))
    weight = ddp.module[0].weight.grad
    assert 0 < int(weight.flatten(1).any(1).sum()) <= 7, "a fifth of 32 filters"


def refused_sparse() -> None:
    model = nn.Sequential(nn.EmbeddingBag(50, 16, sparse=True, mode="sum"), nn.Linear(16, 4))
    ddp = replica(made(), model)
    with pytest.raises(Exception, match="sparse=False"):
        ddp(torch.arange(8).view(2, 4)).sum().backward()


def gloo(rank: int, world: int) -> dict[str, Any]:
    harness.init(backend="gloo")
    out = {}
    counted(rank)
    all_rows_are_dense(rank)
    missing_gradients(rank)
    mixed_types(rank)
    channels_last(rank)
    for method in ("randk", "topk"):
        state = made(method=method, error_feedback="ef14", start_iter=1)
        ddp = replica(state)
        out[method] = train(ddp, rank, 30)
        assert same(*ddp.parameters())
        assert (state.traffic()["indices"] > 0) == (method == "topk")
    refused_sparse()
    dist.destroy_process_group()
    return out


@pytest.mark.long
def test_over_gloo() -> None:
    for value in run_good(gloo, WORLD, timeout=150):
        for losses in value.values():
            assert sum(losses[-5:]) < 0.85 * sum(losses[:5]), losses
