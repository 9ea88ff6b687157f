"""What trains with torch on a GPU: each equals the same training in one process, on one device.

Ranks have halves of a batch; the reference has all of it, so means over ranks are what it computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.gpu.checks import Rank, Table

TABLE = Table(init={"pg_options": {"lossy_min_bytes": 1 << 30}})

WIDTH, DEPTH, BATCH, STEPS = 512, 4, 16, 4
COARSE = 2e-4
"""The tolerance for what is rounded to 16 bits on its way."""
Model = nn.Module


class _WithUnused(nn.Sequential):
    """Has a layer that its forward pass leaves out."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.extra = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.named_children():
            if name != "extra":
                x = layer(x)
        return x


def _model(rank: Rank, *, unused: bool = False) -> Model:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    layers.append(nn.Linear(WIDTH, 8))
    return (_WithUnused if unused else nn.Sequential)(*layers).to(rank.device)


def _batch(rank: Rank, step: int, *, whole: bool = False) -> tuple[Tensor, Tensor]:
    """This rank's part of the step's batch, or all of it."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH * rank.world, WIDTH, generator=generator)
    y = torch.randint(0, 8, (BATCH * rank.world,), generator=generator)
    here = slice(None) if whole else slice(rank.rank * BATCH, (rank.rank + 1) * BATCH)
    return x[here].to(rank.device), y[here].to(rank.device)


def _loss(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _train(
    rank: Rank, model: Any, *, whole: bool, optimizer: Any = None, steps: int = STEPS
) -> list[Tensor]:
    """Trains; returns the parameters."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        _loss(model, _batch(rank, step, whole=whole)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _reference(rank: Rank, **rest: Any) -> list[Tensor]:
    return _train(rank, _model(rank, **rest), whole=True)


def _close(got: list[Tensor], want: list[Tensor], rtol: float = 1e-3, atol: float = 2e-5) -> None:
    assert len(got) == len(want)
    for place, (one, other) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(
            one, other, rtol=rtol, atol=atol, msg=lambda text, place=place: f"{place}: {text}"
        )


def _alike(rank: Rank, tensors: list[Tensor]) -> None:
    """All ranks have the same bits."""
    flat = torch.cat([t.reshape(-1).float() for t in tensors])
    rows = [torch.empty_like(flat) for _ in range(rank.world)]
    dist.all_gather(rows, flat)
    for row in rows:
        assert torch.equal(row, rows[0])


def _ddp(rank: Rank, model: Model | None = None, **rest: Any) -> DDP:
    devices = [rank.device] if rank.cuda else None
    return DDP(model or _model(rank), device_ids=devices, **rest)


# ---- DDP ----


@TABLE.check()
def ddp(rank: Rank) -> None:
    want = _reference(rank)
    alone = _train(rank, _model(rank), whole=False)
    apart = max((one - other).abs().max().item() for one, other in zip(alone, want, strict=True))
    assert apart > 10 * COARSE, "training without reductions would pass for good"
    for rest in (
        {},
        {"bucket_cap_mb": 1},  # several buckets, so that they overlap with the backward pass
        {"bucket_cap_mb": 1, "gradient_as_bucket_view": True},
        {"static_graph": True, "bucket_cap_mb": 1},
        {"find_unused_parameters": True},
    ):
        got = _train(rank, _ddp(rank, **rest), whole=False)
        _close(got, want)
        _alike(rank, got)


@TABLE.check()
def ddp_with_parameters_that_are_not_used(rank: Rank) -> None:
    got = _train(
        rank, _ddp(rank, _model(rank, unused=True), find_unused_parameters=True), whole=False
    )
    want = _train(rank, _model(rank, unused=True), whole=True)
    _close(got, want)


@TABLE.check()
def ddp_that_accumulates(rank: Rank) -> None:
    """Two micro-batches, the first of them without a reduction."""
    model = _ddp(rank, bucket_cap_mb=1, gradient_as_bucket_view=True)
    x, y = _batch(rank, 0)
    half = BATCH // 2
    for _ in range(3):
        model.zero_grad()
        for part in (slice(0, half), slice(half, BATCH)):
            last = part.start > 0
            with contextlib.nullcontext() if last else model.no_sync():
                (_loss(model, (x[part], y[part])) / 2).backward()
        alone = _model(rank)
        _loss(alone, _batch(rank, 0, whole=True)).backward()
        got = [p.grad for p in model.parameters()]
        want = [p.grad for p in alone.parameters()]
        _close(got, want)  # type: ignore[arg-type]


@TABLE.check()
def ddp_with_hooks(rank: Rank) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    want = _reference(rank)

    def halves(group, bucket):  # type: ignore[no-untyped-def] # torch takes no text for a type
        """Sums by a future, and divides in its callback, which reads the bucket."""
        buffer = bucket.buffer()
        future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].div_(rank.world))

    for hook, atol in (
        (default_hooks.allreduce_hook, 2e-5),
        (halves, 2e-5),
        # On the CPU torch lets only NCCL's builds have it.
        *([(default_hooks.bf16_compress_hook, COARSE)] if rank.cuda else []),
        (default_hooks.fp16_compress_hook, COARSE),
    ):
        model = _ddp(rank, bucket_cap_mb=1)
        model.register_comm_hook(None, hook)
        got = _train(rank, model, whole=False)
        _close(got, want, atol=atol)
        _alike(rank, got)


@TABLE.check()
def ddp_with_buffers(rank: Rank) -> None:
    """Batch statistics of rank 0 are broadcast before each step."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
    parallel = _ddp(rank, model.to(rank.device))
    for step in range(3):
        _loss(parallel, _batch(rank, step)).backward()
    parallel.eval()
    parallel.train()
    parallel(_batch(rank, 9)[0])  # broadcasts them once more
    means = parallel.module[1].num_batches_tracked
    assert means.item() == 4
    _alike(rank, [p.grad for p in parallel.parameters() if p.grad is not None])


@TABLE.check()
def join_with_uneven_inputs(rank: Rank) -> None:
    """The rank with fewer batches shadows the others' calls."""
    model = _ddp(rank, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + rank.rank):
            optimizer.zero_grad()
            _loss(model, _batch(rank, step)).backward()
            optimizer.step()
    _alike(rank, [p.detach() for p in model.parameters()])


@TABLE.check(cuda=True)
def ddp_with_a_grad_scaler(rank: Rank) -> None:
    """float16 with scaling: an overflow at one rank is one at all of them, and their step is
    left out; the scale is the same everywhere."""
    model = _ddp(rank, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(6):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        x, y = _batch(rank, step)
        if step == 3 and rank.rank == rank.world - 1:
            x = x * float("inf")
        with torch.autocast("cuda", torch.float16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        unchanged = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert unchanged == (step == 3), step
    assert scales == [1024.0, 2048.0, 2048.0, 1024.0, 1024.0, 2048.0], scales
    _alike(rank, [p.detach() for p in model.parameters()])


@TABLE.check(limit=150, long=True)
def ddp_compiled(rank: Rank) -> None:
    import torch._dynamo

    want = _reference(rank)
    model = _ddp(rank, bucket_cap_mb=1)
    backend = "inductor" if rank.cuda else "aot_eager"
    got = _train(rank, torch.compile(model, backend=backend), whole=False)
    _close(got, want, rtol=5e-3, atol=COARSE)
    _alike(rank, got)
    torch._dynamo.reset()


@TABLE.check(cuda=True)
def sync_batch_norm(rank: Rank) -> None:
    """Statistics over all ranks: as batch norm of the whole batch, and so are gradients."""
    torch.manual_seed(3)
    alone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(rank.device)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(rank.device)
    parallel = _ddp(rank, nn.SyncBatchNorm.convert_sync_batchnorm(model))
    x = torch.randn(4 * rank.world, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    x = x.to(rank.device)
    out = alone(x)
    out.square().mean().backward()
    here = slice(rank.rank * 4, (rank.rank + 1) * 4)
    mine = parallel(x[here])
    mine.square().mean().backward()
    torch.testing.assert_close(mine, out[here], rtol=1e-4, atol=1e-4)
    for one, other in zip(parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(parallel.module[1].running_mean, alone[1].running_mean)


@TABLE.check()
def zero_redundancy_optimizer(rank: Rank) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    want = _reference(rank)
    model = _ddp(rank, bucket_cap_mb=1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    got = _train(rank, model, whole=False, optimizer=optimizer)
    _close(got, want)
    optimizer.consolidate_state_dict(0)
    if rank.rank == 0:
        assert optimizer.state_dict()["state"]


# ---- FSDP2, DTensor ----


def _mesh(rank: Rank, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cuda" if rank.cuda else "cpu", shape, mesh_dim_names=names)


def _fully_sharded(rank: Rank, mesh: Any, **rest: Any) -> Model:
    from torch.distributed.fsdp import fully_shard

    model: Any = _model(rank)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **rest)
    fully_shard(model, mesh=mesh, **rest)
    return model


def _full(parameters: list[Tensor]) -> list[Tensor]:
    return [p.full_tensor() for p in parameters]  # type: ignore[attr-defined]


@TABLE.check()
def fsdp2(rank: Rank) -> None:
    want = _reference(rank)
    mesh = _mesh(rank, (rank.world,), ("shard",))
    for rest in ({}, {"reshard_after_forward": False}):
        got = _full(_train(rank, _fully_sharded(rank, mesh, **rest), whole=False))
        _close(got, want)


@TABLE.check()
def fsdp2_in_bfloat16(rank: Rank) -> None:
    """Parameters are gathered in bfloat16, gradients reduced in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = _mesh(rank, (rank.world,), ("shard",))
    model: Any = _fully_sharded(rank, mesh, mp_policy=policy)
    got = _full(_train(rank, model, whole=False))
    _close(got, _reference(rank), rtol=2e-2, atol=4 * COARSE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _loss(model, _batch(rank, 1)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.full_tensor().isfinite()  # type: ignore[attr-defined]
    optimizer.step()


@TABLE.check()
def hsdp(rank: Rank) -> None:
    """Replicas of shards, in both ways that two ranks can be a mesh of two dimensions."""
    want = _reference(rank)
    for shape in ((rank.world, 1), (1, rank.world)):
        mesh = _mesh(rank, shape, ("replicate", "shard"))
        got = _full(_train(rank, _fully_sharded(rank, mesh), whole=False))
        _close(got, want)


@TABLE.check()
def hsdp_of_two_backends(rank: Rank) -> None:
    """As docs/devices.md has it: shards within a host by its own backend, replicas by this one."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(
        "cuda" if rank.cuda else "cpu",
        (rank.world, 1),
        mesh_dim_names=("replicate", "shard"),
        backend_override={"replicate": "lossy", "shard": "nccl" if rank.cuda else "gloo"},
    )
    for name, backend in (("replicate", "lossy"), ("shard", "nccl" if rank.cuda else "gloo")):
        assert dist.get_backend(mesh.get_group(name)) == backend
    got = _full(_train(rank, _fully_sharded(rank, mesh), whole=False))
    _close(got, _reference(rank))


@TABLE.check()
def dtensor(rank: Rank) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = _mesh(rank, (rank.world,), ("all",))
    whole = torch.arange(24.0 * rank.world, device=rank.device).reshape(4 * rank.world, 6)
    for placement in (Shard(0), Shard(1), Replicate()):
        spread = distribute_tensor(whole, mesh, [placement])
        for other in (Replicate(), Shard(0), Shard(1)):
            again = spread.redistribute(mesh, [other])
            assert torch.equal(again.full_tensor(), whole), (placement, other)
    partial = DTensor.from_local(whole.clone(), mesh, [Partial()])
    for other in (Replicate(), Shard(0)):
        summed = partial.redistribute(mesh, [other]).full_tensor()
        assert torch.equal(summed, whole * rank.world), other
    left = distribute_tensor(whole, mesh, [Shard(0)])
    right = distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])
    torch.testing.assert_close((left @ right).full_tensor(), whole @ whole.t())


@TABLE.check()
def checkpoint(rank: Rank) -> None:
    """Saved by torch.distributed.checkpoint from shards, and loaded into other values."""
    import tempfile

    import torch.distributed.checkpoint as dcp

    mesh = _mesh(rank, (rank.world,), ("shard",))
    folder = [tempfile.mkdtemp() if rank.rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    model = _fully_sharded(rank, mesh)
    want = [p.detach().clone() for p in _full(list(model.parameters()))]
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    model.load_state_dict(state["model"])
    _close(_full(list(model.parameters())), want, 0, 0)
