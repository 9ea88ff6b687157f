"""What ranks of several benchmarks share: gloo by congestion control, agreement, times."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

import lossycoll
from benchmarks.common import tcp
from benchmarks.common.tcp import connections


def tcp_group(control: str) -> dist.ProcessGroup:
    """A gloo group of which the connections use this congestion control."""
    before = connections()
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    dist.barrier(group=group)  # by now all are connected
    tcp.use(control, before)
    return group


def agreed(here: bool) -> bool:
    """Whether it is so on any rank."""
    flag = torch.tensor(float(here))
    with lossycoll.reliable():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def between_ranks(times: Sequence[tuple[float, float]]) -> float:
    """Seconds from where the last rank has begun, since none can end without it, to where the last
    one has ended. A barrier lets ranks go a one-way delay apart."""
    return max(end for _, end in times) - max(begin for begin, _ in times)
