"""First step of DDP's communication hooks, where the sum over the ranks is the mean."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import UnsupportedError


def check_dense(gradients: Tensor, hook: str) -> None:
    """Raises UnsupportedError if a bucket's gradients are sparse; ``hook`` is the hook's name."""
    if gradients.layout is not torch.strided:
        raise UnsupportedError(
            f"{hook} got a gradient of {gradients.layout}, wanted dense ones: make embeddings "
            f"with sparse=False, or leave the hook out"
        )


def addend(
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    group: dist.ProcessGroup | None,
    hook: str,
) -> tuple[Tensor, dist.ProcessGroup | None]:
    """This rank's part of a bucket's mean, already divided, and the group to add it in.

    UnsupportedError, which names ``hook``: the gradients are sparse.
    """
    flat = bucket.buffer()
    check_dense(flat, hook)
    found = dist.group.WORLD if group is None else group
    flat.div_(dist.get_world_size(found))
    return flat, found
