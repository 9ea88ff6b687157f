"""Functional collectives: out of place, and inside a compiled function.

torchrun --nproc-per-node 3 examples/functional.py

They are reliable, since tensor parallelism adds activations up by them. In a ``lossy()`` block they
may lose packets: each packet of a lossy mean is the mean over the ranks whose packet arrived.
"""

import common
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import lossycoll

ELEMENTS = 60_000  # divisible by 2, 3 and 4


@torch.compile(backend="aot_eager", fullgraph=True)
def doubled_mean(tensor: Tensor) -> Tensor:
    return 2 * functional.all_reduce(tensor, "avg", dist.group.WORLD)


def example() -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    own = torch.full((ELEMENTS,), float(rank))
    everyone = torch.arange(world, dtype=torch.float32)
    middle = everyone.mean()
    total = functional.all_reduce(own, "sum", group)
    part = functional.reduce_scatter_single(own, "avg", 0, group)
    twice = doubled_mean(own)
    assert torch.equal(total, torch.full_like(total, float(everyone.sum())))
    torch.testing.assert_close(part, torch.full((ELEMENTS // world,), float(middle)))
    torch.testing.assert_close(twice, torch.full_like(own, 2 * float(middle)))
    gathered = functional.all_gather_single(own, 0, group)
    assert torch.equal(gathered, everyone.repeat_interleave(ELEMENTS))
    exchanged = functional.all_to_all_single(own, None, None, group)
    assert torch.equal(exchanged, everyone.repeat_interleave(ELEMENTS // world))
    assert torch.equal(own, torch.full_like(own, float(rank))), "the input has changed"

    with lossycoll.lossy():
        lossy = doubled_mean(own) / 2
    inexact = int((lossy != middle).sum())
    assert abs(float(lossy.mean() - middle)) < 0.2, lossy.mean()
    lost = common.dropped()
    return f"exact when reliable; else {inexact} of {ELEMENTS} elements differ, {lost}"


if __name__ == "__main__":
    common.run(example)
