"""What an argument has to be. True and False are numbers to Python, and mistakes here."""

from __future__ import annotations

import math
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import UnsupportedError


def is_number(value: object) -> TypeGuard[float]:
    """NaN and inf are numbers too."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object, low: int, high: float = math.inf) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def check_dense(gradients: Tensor, hook: str) -> None:
    """Raises UnsupportedError, which names the communication hook that got them, if not."""
    if gradients.layout is not torch.strided:
        raise UnsupportedError(
            f"{hook} got a gradient of {gradients.layout}, wanted dense ones: make embeddings "
            f"with sparse=False, or leave the hook out"
        )


def own_group(group: object) -> dist.ProcessGroup:
    """The group to work in; None is the default one. Raises UnsupportedError where there is none,
    and for one that this rank isn't in."""
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
