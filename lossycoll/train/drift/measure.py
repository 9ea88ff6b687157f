"""Exact measure of the drift between replicas of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lossycoll.runtime.world import metrics
from lossycoll.train.common.collectives import Collectives, formed_alike
from lossycoll.train.common.consistency import PARAMETERS_DIFFER, Agreement, as_line, check_same
from lossycoll.train.common.models import (
    Groups,
    Holding,
    as_real,
    batches,
    holdings_of,
    is_dtensor,
    local,
)

BATCH: Final = 1 << 20  # elements that are compared at a time; memory is a few doubles for each


@dataclass(frozen=True)
class Drift:
    """Distance between replicas, as :func:`measure_drift` returns it on all ranks.

    Distances are in the parameters' units, squared, and summed over elements.
    """

    total: float
    """Squared L2 distance of the parameters, averaged over all pairs of replicas. Broadcasts of
    parameters bound it in "Distributed Training under Packet Loss" (arXiv 2507.07114, stage 2)."""
    per_parameter: Mapping[str, float]
    """Squared distance of each parameter, by name; their sum is ``total``."""
    relative_rms: float
    """Square root of ``total``, divided by the L2 norm of the replicas' mean; without unit."""


@torch.no_grad()
def measure_drift(model: nn.Module, group: dist.ProcessGroup | None = None) -> Drift:
    """Measure the distance between the replicas of ``model``. All ranks must call this together.

    The result is exact: sums are reliable, in double precision, and in batches of bounded memory.
    Equal replicas, or a single one, give exactly 0. A parameter that isn't finite in some replica
    gives NaN. A square beyond double precision (distances from 1e154 on) is infinite.

    Args:
        model: Plain, wrapped by DistributedDataParallel or torch.compile, or sharded by
            fully_shard. Sharded models have the replicas of the mesh's replicated dimensions;
            without any, the model is its only replica.
        group: The ranks that hold a replica. None: DDP's group, else the default group. Lost ranks
            have no replica.

    Returns:
        The drift, the same on all ranks.

    Raises:
        UnsupportedError: The model is FSDP1's, its parameters overlap themselves, a group was
            passed with DTensors, or this rank isn't in the group.
        MismatchError: Ranks hold parameters of other names, types or shapes, or in another order.
        PeerLostError: Ranks were lost during each of several attempts.
    """
    holdings = holdings_of(model, group)
    check_same(
        _agreements(holdings, group),
        PARAMETERS_DIFFER,
        "measure_drift compares the same parameters, registered in the same order, on all ranks",
    )
    squares, norm = _sums(holdings)
    of = {holding.name: value for holding, value in zip(holdings, squares, strict=True)}
    total = _sum(squares)
    relative = 0.0
    if total != 0:
        relative = math.sqrt(total) / math.sqrt(norm) if norm else math.inf
    metrics.measured["drift"] = relative
    return Drift(total, of, relative)


def _agreements(holdings: Sequence[Holding], group: dist.ProcessGroup | None) -> list[Agreement]:
    """Lines that each group's ranks must have alike: copies are the same to the last stride, the
    rest of a parameter is of the same whole."""
    if not holdings:  # others may have some
        here = Collectives(group)
        return [Agreement(here, [], here.group.bound_device_id or torch.device("cpu"))]
    found: dict[dist.ProcessGroup, Agreement] = {}
    for holding in holdings:
        mine = local(holding.parameter)
        whole = f"{holding.name} {holding.parameter.dtype} {list(holding.parameter.shape)}"
        part = as_line(f"{whole}, of which", mine) if is_dtensor(holding.parameter) else ""
        for groups, line in (
            (holding.copies, part or as_line(holding.name, mine)),
            (holding.rest, whole),
        ):
            for each in groups:
                if each not in found:
                    found[each] = Agreement(Collectives(each), [], mine.device)
                found[each].lines.append(line)
    return list(found.values())


def _sum(squares: Sequence[float]) -> float:
    try:
        return math.fsum(squares)
    except OverflowError:
        return math.inf


def _sums(holdings: Sequence[Holding]) -> tuple[list[float], float]:
    """The mean square distance of each parameter, and the squared norm of the mean replica.

    With N replicas x_i and their mean m, the mean over pairs of ||x_i - x_j||^2 is
    2 / (N - 1) * sum_i ||x_i - m||^2.
    """
    # What is compared together: its ranks, whether the mean of equal elements is exact, its device.
    kinds: dict[tuple[Groups, Groups, bool, torch.device], list[int]] = {}
    for number, holding in enumerate(holdings):
        # The mean of equal floats is that float as long as their sum has bits to spare.
        exact = holding.parameter.dtype in (torch.float32, torch.float16, torch.bfloat16)
        device = local(holding.parameter).device
        kinds.setdefault((holding.copies, holding.rest, exact, device), []).append(number)
    squares, norm = [0.0] * len(holdings), 0.0
    for (copies, rest, exact, _), numbers in kinds.items():
        tensors = [local(holdings[number].parameter) for number in numbers]
        found, norms = _sums_of_kind(
            tensors,
            [Collectives(group) for group in copies],
            [Collectives(group) for group in rest],
            exact,
        )
        norm += _sum(norms)
        for number, value in zip(numbers, found, strict=True):
            squares[number] = value
    return squares, norm


def _sums_of_kind(
    tensors: list[Tensor], copies: Sequence[Collectives], rest: Sequence[Collectives], exact: bool
) -> tuple[list[float], list[float]]:
    """Sums of tensors that are spread alike."""

    def compared() -> Tensor:
        sums = _compare(tensors, copies, exact)
        for each in copies:
            each.all_reduce(sums[0]).wait()
        return sums

    sums = formed_alike(
        copies,
        tensors[0].device,
        compared,
        "to compare replicas, so the figure would be wrong; call measure_drift again when ranks "
        "are no longer lost",
    )
    for each in copies:
        sums[0] *= each.survivors / each.world  # a sum stands for all ranks, lost or not
    sums[0] *= 2 / max(1, math.prod(each.survivors for each in copies) - 1)
    for each in rest:
        # Added up in one order everywhere.
        sums = each.all_gather(sums.reshape(-1)).sum(0).view_as(sums)
    squares, norms = sums.tolist()
    return squares, norms


def _compare(tensors: list[Tensor], copies: Sequence[Collectives], exact: bool) -> Tensor:
    """(2, tensors): squared distances of this rank's shard from the mean, and the mean's norm."""
    sums = torch.zeros(2, len(tensors), dtype=torch.float64, device=tensors[0].device)
    if math.prod(each.world for each in copies) == 1:
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
        sizes = [span.numel() for span in spans]
        parts = zip(batch, torch.split(off, sizes), torch.split(mean, sizes), strict=True)
        for (number, _), distance, common in parts:
            sums[0, number] += distance.square().sum()
            sums[1, number] += common.square().sum()
    return sums


def _to_mean(values: Tensor, copies: Sequence[Collectives]) -> None:
    for each in copies:
        each.all_reduce(values).wait()
        values /= each.world
