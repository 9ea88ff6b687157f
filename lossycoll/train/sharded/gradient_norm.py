"""The norm of a gradient whose parts are at all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.train.common.collectives import Collectives

from .owner_loss import owners_needed


def total_norm(
    grads: Sequence[Tensor], norm_type: float, device: torch.device, collectives: Collectives
) -> Tensor:
    """The p-norm of all ranks' gradients together, float64 (), the same on all ranks."""
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for grad in grads:
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
        norms.append(norm.to(device))
    own = torch.stack(norms)
    highest = math.isinf(norm_type)
    total = own.max() if highest else own.pow(norm_type).sum()
    op = dist.ReduceOp.MAX if highest else dist.ReduceOp.SUM
    with owners_needed():
        collectives.all_reduce(total, op).wait()
    return total if highest else total.pow(1.0 / norm_type)


def clip(grads: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scales gradients in place to ``max_norm``, as torch.nn.utils.clip_grad_norm_ does."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device, grad.dtype))
