"""What communication hooks of DDP begin with, where the sum over the ranks is the mean."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from lossycoll.train.common.arguments import check_dense


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
