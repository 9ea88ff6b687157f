"""Checks of arguments."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import UnsupportedError
from lossycoll.options.ranges import is_number, is_whole

__all__ = ["check_dense", "is_number", "is_whole", "own_group"]


def check_dense(gradients: Tensor, hook: str) -> None:
    """Raises UnsupportedError if a bucket's gradients are sparse; ``hook`` is the hook's name."""
    if gradients.layout is not torch.strided:
        raise UnsupportedError(
            f"{hook} got a gradient of {gradients.layout}, wanted dense ones: make embeddings "
            f"with sparse=False, or leave the hook out"
        )


def own_group(group: object) -> dist.ProcessGroup:
    """The group to work in; None is the default group. UnsupportedError: this rank isn't in it."""
    found = dist.group.WORLD if group is None else group
    if isinstance(found, dist.ProcessGroup):
        return found
    if not dist.is_initialized():
        raise UnsupportedError(
            "there is no process group; call torch.distributed.init_process_group first"
        )
    here = f"rank {dist.get_rank()}/{dist.get_world_size()}"
    if found == dist.GroupMember.NON_GROUP_MEMBER:
        raise UnsupportedError(
            f"{here}: this rank isn't in the group that was passed (new_group has given it "
            f"GroupMember.NON_GROUP_MEMBER); call this on the ranks of that group only"
        )
    raise UnsupportedError(f"{here}: group is {found!r}, wanted a ProcessGroup or None")
