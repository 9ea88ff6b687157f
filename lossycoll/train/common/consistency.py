"""Checks that all ranks have the same: tensors before they are sent as one, arguments."""

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

from .collectives import Collectives

NOTHING: Final = "nothing more"
PARAMETERS_DIFFER: Final = "ranks hold different parameters"


@dataclass(frozen=True)
class Agreement:
    collectives: Collectives  # of the group
    lines: list[str]  # one for each tensor or argument, in order
    device: torch.device  # device of the tensors of the group's collectives


def as_line(name: str, tensor: Tensor) -> str:
    """A tensor as a line of text: name, dtype, shape, and strides where not in order of indices."""
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
    return [f"{name} = {value!r}" for name, value in settings.items()]


def check_same(agreements: Sequence[Agreement], what: str, remedy: str) -> None:
    """Compares what the ranks of each group have.

    All ranks of each group must call this, with their groups in the same order. It takes a few
    bytes for each group, and more only if something differs. ``what`` begins, ``remedy`` ends the
    MismatchError, which all ranks of all these groups raise.
    """
    shared = [each for each in agreements if each.collectives.world > 1]
    differ = False
    for each in shared:
        digest = hashlib.sha256("\n".join(each.lines).encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        most, least = _most(each, number, -number)
        differ |= most != -least
    if len(shared) > 1:
        # Those who find nothing wrong would wait in one group for those who have in another.
        for each in shared:
            differ = any(_most(each, int(differ)))
    if not differ:
        return
    found = [_first_difference(each) for each in shared]
    for each, difference in zip(shared, found, strict=True):
        if difference is not None:
            peer, own, other = difference
            who = each.collectives.peer(peer)
            raise MismatchError(
                f"{each.collectives}: {what}: {own} here, {other} on {who}; {remedy}", peer=peer
            )
    raise MismatchError(
        f"{shared[0].collectives}: {what}, though none that this rank shares a group with: the "
        f"errors of the others say which; {remedy}"
    )


def _most(agreement: Agreement, *numbers: int) -> list[int]:
    """The largest of each number over the ranks."""
    found = torch.tensor(numbers, device=agreement.device)
    agreement.collectives.all_reduce(found, dist.ReduceOp.MAX).wait()
    return found.tolist()


def _first_difference(agreement: Agreement) -> tuple[int, str, str] | None:
    """The first rank that has other lines: that rank, and the first ones that differ."""
    rank, world = agreement.collectives.rank, agreement.collectives.world
    # By reductions, which also those can form who have lost a rank.
    own = "\n".join(agreement.lines).encode()
    (longest,) = _most(agreement, len(own))
    rows = torch.zeros(world, 1 + longest, dtype=torch.uint8, device="cpu")
    rows[rank, : 1 + len(own)] = torch.frombuffer(bytearray(b"\1" + own), dtype=torch.uint8)
    rows = rows.to(agreement.device)
    agreement.collectives.all_reduce(rows, dist.ReduceOp.MAX).wait()
    for peer, row in enumerate(rows.cpu().numpy()):
        theirs = row[1:].tobytes().rstrip(b"\0")
        if row[0] and theirs != own:  # a lost rank has a row of zeros
            pairs = zip_longest(own.decode().split("\n"), theirs.decode().split("\n"))
            here, there = next(pair for pair in pairs if pair[0] != pair[1])
            return peer, here or NOTHING, there or NOTHING
    return None
