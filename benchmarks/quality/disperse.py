"""A hook of DDP that spreads over the whole tensor what a burst takes of it.

(No postponed annotations here: DDP wants the classes themselves.)
"""

from typing import Any

import torch
import torch.distributed as dist


def disperse(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of gradients that are sent in an order in which no two neighbours are so in the
    tensor but by chance, the same at all ranks and steps."""
    del state
    flat = bucket.buffer()
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(bucket.index()))
    shuffled = flat[order].div_(dist.get_world_size())
    work = dist.all_reduce(shuffled, async_op=True)

    def back(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        flat[order] = future.value()[0]
        return flat

    return work.get_future().then(back)
