"""One bucket in memory at one rank.

All of its parameters are views of ``flat``, so what an all-gather writes there is in the model.
This rank's chunk is cut into segments, each a parameter of the optimizer, with a gradient that is a
view of ``own_grads``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from .buckets import Bucket, Segment


@dataclass(eq=False)
class Piece:
    """A segment as the optimizer has it. ``grad``: where its gradient is, float[n]."""

    segment: Segment
    parameter: Parameter
    grad: Tensor

    @property
    def index(self) -> int:
        """Of the model's parameter that it is part of."""
        return self.segment.slot.index


class Shard:
    """``model``: the parameters in order of registration; those of ``bucket`` move here."""

    def __init__(self, bucket: Bucket, model: Sequence[Parameter], rank: int) -> None:
        first = model[bucket.slots[0].index]
        self.bucket = bucket
        self.flat = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros_like(self.flat)
        """What this rank contributes. Padding stays 0."""
        self.own_grads = torch.zeros(bucket.chunk, dtype=first.dtype, device=first.device)
        """This rank's chunk of the mean."""
        self.views = [
            self.grads.as_strided(slot.shape, slot.stride, slot.begin) for slot in bucket.slots
        ]
        """Where each parameter's gradient goes, in the order of slots."""
        with torch.no_grad():
            for slot in bucket.slots:
                parameter = model[slot.index]
                view = self.flat.as_strided(slot.shape, slot.stride, slot.begin)
                view.copy_(parameter)
                parameter.data = view
        base = rank * bucket.chunk
        self.pieces = [
            Piece(
                segment,
                Parameter(self.flat[segment.begin : segment.end]),
                self.own_grads[segment.begin - base : segment.end - base],
            )
            for segment in bucket.segments(rank)
        ]

    def holds(self, position: int, parameter: Parameter) -> bool:
        """Whether ``parameter`` still is the view of slot ``position`` that it was made."""
        slot = self.bucket.slots[position]
        place = self.flat.data_ptr() + slot.begin * self.flat.element_size()
        return slot.begin == slot.end or (
            parameter.data_ptr() == place and parameter.dtype == self.flat.dtype
        )

    def is_finite(self) -> bool:
        """Whether all that this rank contributes is a number."""
        low, high = torch.aminmax(self.grads)  # a single pass, and NaN gets through
        return bool(torch.isfinite(low) & torch.isfinite(high))
