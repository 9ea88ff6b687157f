"""How far the replicas of a model have drifted apart, exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lossycoll.backend.process_group import LossyProcessGroup
from lossycoll.errors import PeerLostError
from lossycoll.options.fields import reliable
from lossycoll.train.common.arguments import own_group
from lossycoll.train.common.consistency import PARAMETERS_DIFFER, Meant, as_line, check_same
from lossycoll.train.common.replicas import (
    Groups,
    Holding,
    as_real,
    batches,
    holdings_of,
    is_dtensor,
    local,
)

BATCH: Final = 1 << 20
"""Elements that are compared at a time; memory is a few doubles for each."""
ATTEMPTS: Final = 8


@dataclass(frozen=True)
class Drift:
    """The distance between replicas: what :func:`measure_drift` returns, the same on all ranks."""

    total: float
    """Squared L2 distance of the parameters, averaged over all pairs of replicas."""
    per_parameter: Mapping[str, float]
    """The same of each parameter, by name; their sum is the total."""
    relative_rms: float
    """The total's root, over the L2 norm of the mean of the replicas."""


@torch.no_grad()
def measure_drift(model: nn.Module, group: dist.ProcessGroup | None = None) -> Drift:
    """The distance between the replicas of ``model``. All ranks must call it at the same point.

    With N replicas x_i the mean over pairs of ||x_i - x_j||^2 is 2 / (N - 1) * sum_i ||x_i - m||^2,
    m being their mean. It is formed in double precision, of which nothing is lost on the way, in
    batches of bounded memory. Replicas that are equal give exactly 0; one replica gives 0; a
    parameter that is not finite in some replica gives NaN.

    ``model``: plain, wrapped by DistributedDataParallel or torch.compile, or sharded by fully_shard
    (where replicas are those of the mesh's replicated dimensions, and a model without any is its
    only replica). ``group``: the ranks that hold a replica; None is DDP's group, else the default
    group. Where a group goes on without ranks that are lost, the replicas are those that are left.
    A square that is beyond double precision (of distances from 1e154 on) is infinite, and NaN what
    is relative to such a one.

    Raises UnsupportedError for FSDP1, for a group passed with DTensors or that this rank isn't in,
    and for parameters that overlap themselves; MismatchError, on all ranks, where they hold
    parameters of other names, types or shapes, or in another order; PeerLostError if ranks kept
    dying meanwhile.
    """
    holdings = holdings_of(model, group)
    check_same(
        _meant(holdings, group),
        PARAMETERS_DIFFER,
        "measure_drift compares the same parameters, registered in the same order, on all ranks",
    )
    with reliable():
        squares, norm = _sums(holdings)
    of = {holding.name: value for holding, value in zip(holdings, squares, strict=True)}
    total = _sum(squares)
    if total == 0:
        return Drift(0.0, of, 0.0)
    relative = math.sqrt(total) / math.sqrt(norm) if norm else math.inf
    return Drift(total, of, relative)


def _meant(holdings: Sequence[Holding], group: dist.ProcessGroup | None) -> list[Meant]:
    """What each group's ranks have to hold alike: copies are the same to the last stride, the rest
    of a parameter is of the same whole."""
    if not holdings:  # others may have some
        here = own_group(group)
        return [Meant(here, (), here.bound_device_id or torch.device("cpu"))]
    lines: dict[dist.ProcessGroup, list[str]] = {}
    devices: dict[dist.ProcessGroup, torch.device] = {}
    for holding in holdings:
        mine = local(holding.parameter)
        whole = f"{holding.name} {holding.parameter.dtype} {list(holding.parameter.shape)}"
        part = as_line(f"{whole}, of which", mine) if is_dtensor(holding.parameter) else ""
        for groups, line in (
            (holding.copies, part or as_line(holding.name, mine)),
            (holding.rest, whole),
        ):
            for each in groups:
                lines.setdefault(each, []).append(line)
                devices.setdefault(each, mine.device)
    return [Meant(each, of, devices[each]) for each, of in lines.items()]


def _sum(squares: Sequence[float]) -> float:
    """Exact; infinite where it is more than a float can be."""
    try:
        return math.fsum(squares)
    except OverflowError:
        return math.inf


def _sums(holdings: Sequence[Holding]) -> tuple[list[float], float]:
    """The mean square distance of each parameter, and the squared norm of the mean replica."""
    kinds: dict[tuple[Groups, Groups, bool, torch.device], list[int]] = {}
    for number, holding in enumerate(holdings):
        # The mean of equal floats is that float as long as their sum has bits to spare.
        exact = holding.parameter.dtype in (torch.float32, torch.float16, torch.bfloat16)
        device = local(holding.parameter).device
        kinds.setdefault((holding.copies, holding.rest, exact, device), []).append(number)
    squares, norm = [0.0] * len(holdings), 0.0
    for (copies, rest, exact, _), numbers in kinds.items():
        tensors = [local(holdings[number].parameter) for number in numbers]
        found, norms = _sums_of_kind(tensors, copies, rest, exact)
        norm += _sum(norms)
        for number, value in zip(numbers, found, strict=True):
            squares[number] = value
    return squares, norm


def _sums_of_kind(
    tensors: list[Tensor], copies: Groups, rest: Groups, exact: bool
) -> tuple[list[float], list[float]]:
    """Of tensors that are spread alike. Done again where a rank was lost meanwhile: some of the
    sums may have been with it and others without."""
    device = tensors[0].device
    for _ in range(ATTEMPTS):
        before = [_left(group, device) for group in copies]
        sums = _compare(tensors, copies, exact)
        for group in copies:
            dist.all_reduce(sums[0], group=group)
        # A rank may be one call ahead of another that has heard of a loss, but not two.
        after = [(_left(group, device), _left(group, device))[-1] for group in copies]
        if before == after:
            break
    else:
        raise PeerLostError(
            f"ranks were lost during each of {ATTEMPTS} attempts to compare replicas, so the "
            f"figure would be wrong; call measure_drift again when the group has settled"
        )
    replicas = math.prod(after)
    for group, left in zip(copies, after, strict=True):
        sums[0] *= left / dist.get_world_size(group)  # a sum stands for all ranks, lost or not
    sums[0] *= 2 / max(1, replicas - 1)
    for group in rest:
        sums = _added(sums, group)
    squares, norms = sums.tolist()
    return squares, norms


def _compare(tensors: list[Tensor], copies: Groups, exact: bool) -> Tensor:
    """(2, tensors): squared distances of this rank's shard from the mean, and the mean's norm."""
    sums = torch.zeros(2, len(tensors), dtype=torch.float64, device=tensors[0].device)
    if math.prod(dist.get_world_size(group) for group in copies) == 1:
        return sums
    for batch in batches(tensors, BATCH):
        spans = [as_real(span) for _, span in batch]
        mean = torch.cat([span.to(torch.float64) for span in spans])
        off = mean.clone()
        _to_mean(mean, copies)
        off -= mean
        if not exact:  # what rounding left, alike on all ranks that are alike
            rounding = off.clone()
            _to_mean(rounding, copies)
            off -= rounding
            mean += rounding
        begin = 0
        for (number, _), span in zip(batch, spans, strict=True):
            here = slice(begin, begin + span.numel())
            sums[0, number] += off[here].square().sum()
            sums[1, number] += mean[here].square().sum()
            begin += span.numel()
    return sums


def _to_mean(values: Tensor, copies: Groups) -> None:
    for group in copies:
        dist.all_reduce(values, group=group)
        values /= dist.get_world_size(group)


def _added(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over a group's ranks, in one order everywhere."""
    world = dist.get_world_size(group)
    gathered = sums.new_empty(world, sums.numel())
    dist.all_gather_single(gathered, sums.reshape(1, -1), group=group)
    return gathered.sum(0).view_as(sums)


def _left(group: dist.ProcessGroup, device: torch.device) -> int:
    """Ranks of the group that took part in one call, all told the same."""
    flag = torch.ones(1, device=device)
    dist.all_reduce(flag, group=group)
    lost = 0
    if isinstance(group, LossyProcessGroup):
        report = group.lossy_last_report()
        lost = len(report.lost) if report is not None else 0
    return dist.get_world_size(group) - lost
