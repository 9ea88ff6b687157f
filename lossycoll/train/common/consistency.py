"""Whether all ranks mean the same: tensors before they are sent as one, arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import MismatchError
from lossycoll.options.fields import reliable

from .collectives import named

NOTHING: Final = "nothing more"
PARAMETERS_DIFFER: Final = "ranks hold different parameters"


@dataclass(frozen=True)
class Meant:
    """What all ranks of ``group`` have to have alike, a line for each tensor or argument, in order.

    ``device``: where the group's collectives are at home.
    """

    group: dist.ProcessGroup
    lines: Sequence[str]
    device: torch.device


def as_line(name: str, tensor: Tensor) -> str:
    """A line: the name, dtype and shape, and how the elements lie, where not in their order."""
    text = f"{name} {tensor.dtype} {list(tensor.shape)}"
    if tensor.layout is not torch.strided:
        return f"{text} {tensor.layout}"
    if tensor.is_contiguous():
        return text
    strides = [
        step for length, step in zip(tensor.shape, tensor.stride(), strict=True) if length > 1
    ]
    return f"{text} strides {strides}"


def as_lines(settings: Mapping[str, Any]) -> list[str]:
    """Lines: arguments by name."""
    return [f"{name} = {value!r}" for name, value in settings.items()]


def check_same(meant: Sequence[Meant], what: str, remedy: str) -> None:
    """Raises MismatchError, on all ranks of all these groups, where those of one differ.

    All ranks of each group must call this, with their groups in the same order. A few bytes for
    each group; what differs is asked for only where something does. ``what`` differs begins the
    error, ``remedy`` ends it.
    """
    shared = [each for each in meant if dist.get_world_size(each.group) > 1]
    with reliable():
        differ = False
        for each in shared:
            differ |= _differ(each)
        if len(shared) > 1:
            # Those who find nothing wrong would wait in one group for those who have in another.
            for each in shared:
                differ = _any(differ, each)
        if not differ:
            return
        found = [_first_difference(each) for each in shared]
    for each, difference in zip(shared, found, strict=True):
        if difference is not None:
            peer, own, other = difference
            who = named(each.group, peer)
            raise MismatchError(
                f"{_here(each)}: {what}: {own} here, {other} on {who}; {remedy}", peer=peer
            )
    raise MismatchError(
        f"{_here(shared[0])}: {what}, though none that this rank shares a group with: the errors "
        f"of the others say which; {remedy}"
    )


def _here(meant: Meant) -> str:
    return f"rank {dist.get_rank(meant.group)}/{dist.get_world_size(meant.group)}"


def _differ(meant: Meant) -> bool:
    text = "\n".join(meant.lines)
    own = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    both = torch.tensor([own, -own], device=meant.device)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=meant.group)
    most, least = both.tolist()
    return bool(most != -least)


def _any(flag: bool, meant: Meant) -> bool:
    one = torch.tensor([int(flag)], device=meant.device)
    dist.all_reduce(one, dist.ReduceOp.MAX, group=meant.group)
    return bool(one.item())


def _first_difference(meant: Meant) -> tuple[int, str, str] | None:
    """The first rank that has other lines: that rank, and the first ones that differ."""
    rank, world = dist.get_rank(meant.group), dist.get_world_size(meant.group)
    # By reductions, which also those can form who have lost a rank.
    own = "\n".join(meant.lines).encode()
    length = torch.tensor([len(own)], device=meant.device)
    dist.all_reduce(length, dist.ReduceOp.MAX, group=meant.group)
    rows = torch.zeros(world, 1 + int(length.item()), dtype=torch.uint8)
    rows[rank, : 1 + len(own)] = torch.frombuffer(bytearray(b"\1" + own), dtype=torch.uint8)
    rows = rows.to(meant.device)
    dist.all_reduce(rows, dist.ReduceOp.MAX, group=meant.group)
    for peer, row in enumerate(rows.cpu().numpy()):
        theirs = row[1:].tobytes().rstrip(b"\0")
        if row[0] and theirs != own:  # a rank that is lost has told nothing
            pairs = zip_longest(own.decode().split("\n"), theirs.decode().split("\n"))
            here, there = next(pair for pair in pairs if pair[0] != pair[1])
            return peer, here or NOTHING, there or NOTHING
    return None
