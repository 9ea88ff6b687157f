"""One rank of the smoke test of an installed lossycoll: start it with torchrun, on 2 ranks.

It must run outside the source tree, with LOSSYCOLL_INJECT set to lose packets. lossycoll is not
imported before torch has found the backend by itself. Rank 0 prints one line at the end.
"""

from __future__ import annotations

import gc
import platform
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

COUNT = 200_000  # elements: 800 kB of float32, so that 5% loss certainly drops packets
FEATURES = 256  # 256 KiB of gradient in one bucket


def collectives(rank: int, world: int) -> None:
    """Lossy ones stay near the mean, the others are exact."""
    ones = torch.full((COUNT,), float(rank + 1))
    dist.all_reduce(ones)
    # Each element is the sum estimated from the contributions that arrived: between world times
    # the smallest and world times the largest.
    assert float(ones.min()) >= world, float(ones.min())
    assert float(ones.max()) <= world * world, float(ones.max())

    shard = torch.zeros(COUNT // world)
    dist.reduce_scatter(shard, list(torch.full((COUNT,), float(rank + 1)).chunk(world)))
    assert world <= float(shard.min()) <= float(shard.max()) <= world * world

    integers = torch.arange(COUNT) + rank
    dist.all_reduce(integers)
    assert torch.equal(integers, world * torch.arange(COUNT) + world * (world - 1) // 2)

    sent = torch.arange(COUNT, dtype=torch.float32)
    got = sent.clone() if rank == 0 else torch.zeros(COUNT)
    dist.broadcast(got, 0)
    assert torch.equal(got, sent)

    gathered = [torch.zeros(COUNT) for _ in range(world)]
    dist.all_gather(gathered, sent + rank)
    assert all(torch.equal(part, sent + of) for of, part in enumerate(gathered))

    single = torch.zeros(world * COUNT)
    # Renamed in torch 2.13; what this version calls it is what its users call.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(single, sent + rank)
    assert torch.equal(single, torch.cat([sent + of for of in range(world)]))

    swapped = torch.zeros(world)
    dist.all_to_all_single(swapped, torch.arange(world) + 10.0 * rank)
    assert torch.equal(swapped, torch.arange(world) * 10.0 + rank)

    objects: list[object] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": of} for of in range(world)]
    dist.barrier()


def point_to_point(rank: int, world: int) -> None:
    incoming = torch.zeros(COUNT)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((COUNT,), float(rank)), (rank + 1) % world),
            dist.P2POp(dist.irecv, incoming, (rank - 1) % world),
        ]
    )
    for request in requests:
        request.wait()
    assert torch.equal(incoming, torch.full((COUNT,), float((rank - 1) % world)))


def data_parallel(rank: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(FEATURES, FEATURES))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.manual_seed(1 + rank)
    losses = []
    for _ in range(5):
        inputs = torch.randn(64, FEATURES)
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses


def mismatch(rank: int) -> str:
    """The error when ranks disagree on a size: a typed one, on every rank."""
    import lossycoll

    try:
        dist.all_reduce(torch.zeros(COUNT + rank))
    except lossycoll.MismatchError as error:
        return str(error)
    raise AssertionError("ranks that disagreed on a size got no error")


def main() -> None:
    # The entry point's own small module may be there; the backend itself may not.
    assert "lossycoll.backend.process_group" not in sys.modules
    dist.init_process_group(backend="lossy", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    collectives(rank, world)
    point_to_point(rank, world)
    data_parallel(rank)
    import lossycoll

    stats = lossycoll.stats()
    assert stats.packets_missing > 0, "nothing was lost: is LOSSYCOLL_INJECT set?"
    assert stats.packets_sent > 0
    text = mismatch(rank)
    gc.collect()  # DDP's reference cycle holds gloo's threads
    dist.destroy_process_group()

    where = Path(lossycoll.__file__).parent
    # Debian's Python calls the folder dist-packages.
    installed = where.parent.name in ("site-packages", "dist-packages")
    assert installed, f"not the installed package: {where}"
    if rank == 0:
        print(
            f"torch {torch.__version__} under Python {platform.python_version()}: ok, "
            f"{stats.packets_missing} packets lost at rank 0; {text.splitlines()[0]}"
        )


if __name__ == "__main__":
    main()
