"""An all-reduce in few bits by one call, for the layers of tensor-parallel inference."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import UnsupportedError
from lossycoll.options.scopes import reliable

from .device_wire import FLOATS
from .process_group import of


def wire_allreduce_(
    tensor: Tensor,
    wire: str = "int8",
    group: dist.ProcessGroup | None = None,
    *,
    average: bool = False,
    wire_group: int = 128,
    wire_spikes: int = 0,
    wire_rounding: str = "nearest",
) -> Tensor:
    """Reduce a tensor over the ranks in place, with contributions and results sent in few bits.

    After a layer that torch has split by rows::

        style = RowwiseParallel(output_layouts=Partial())
        parallelize_module(model, mesh, {"out": style})
        group = mesh.get_group("tp")
        model.out.register_forward_hook(lambda _, args, out: wire_allreduce_(out, "int5", group))

    Delivery is reliable, whatever the group's option, and tensors of any size are encoded (float16
    and bfloat16 in few bits only: bf16 and fp16 are for float32). Source: Flash Communication,
    arXiv 2412.04964, algorithm 1; docs/flash.md has figures.

    Args:
        tensor: float32, float16 or bfloat16 of any shape, the same on all ranks.
        wire: Encoding of packets: the option of this name.
        group: A group of this backend; None for the default group.
        average: Whether the sum is divided by the number of ranks.
        wire_group: Elements that share a grid, with few bits: the option of this name.
        wire_spikes: 1: the ends of groups travel as floats. The option of this name.
        wire_rounding: Rounding mode of few bits: the option of this name.

    Returns:
        ``tensor``, the same bits on all ranks.

    Raises:
        UnsupportedError: The tensor has another type or layout, or autograd records it; or the
            group is of another backend, or without this rank.
        OptionError: An option has a bad value.
        MismatchError: Ranks' arguments differ.
    """
    found = of(group)
    where = f"rank {found.rank()}/{found.size()}"
    if tensor.dtype not in FLOATS or tensor.layout is not torch.strided:
        kind = tensor.dtype if tensor.layout is torch.strided else tensor.layout
        raise UnsupportedError(
            f"{where}: wire_allreduce_ got a tensor of {kind}, wanted dense float32, "
            f"float16 or bfloat16: others aren't rounded to a grid; call all_reduce, which is exact"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{where}: wire_allreduce_ got a tensor that autograd records, and works in "
            f"place: call it under torch.no_grad()"
        )
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    how = {"wire_group": wire_group, "wire_spikes": wire_spikes, "wire_rounding": wire_rounding}
    with reliable(wire=wire, lossy_min_bytes=0, **how):  # however small the tensor is
        dist.all_reduce(tensor, op, found)
    return tensor
