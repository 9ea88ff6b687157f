"""One bucket in memory at one rank.

All of its parameters are views of ``flat``, so what an all-gather writes there is in the model.
This rank's chunk is cut into fragments, each a parameter of the optimizer, with a gradient that is
a view of ``own_grads``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from lossycoll.train.common.layout import Bucket, Fragment


@dataclass(eq=False)
class OwnedFragment:
    """A fragment that this rank owns, as its optimizer has it."""

    fragment: Fragment
    parameter: Parameter
    """A view of the bucket, float (n,); of a whole parameter, in its shape."""
    grad: Tensor
    """Its averaged gradient, of the same shape."""

    @property
    def index(self) -> int:
        """Index of the model's parameter that it is part of."""
        return self.fragment.member.index


class Shard:
    """A bucket in memory. Its parameters become views of it."""

    def __init__(self, bucket: Bucket, model: Sequence[Parameter], rank: int) -> None:
        first = model[bucket.members[0].index]
        self.bucket = bucket
        self.flat = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
        """All parameters, float (size,)."""
        self.grads = torch.zeros_like(self.flat)
        """Contribution of this rank, float (size,). Padding stays 0."""
        self.own_grads = torch.zeros(bucket.chunk, dtype=first.dtype, device=first.device)
        """This rank's chunk of the mean, float (chunk,)."""
        self.views = [
            self.grads.as_strided(member.shape, member.stride, member.begin)
            for member in bucket.members
        ]
        """Place of each parameter's gradient, in the order of members."""
        with torch.no_grad():
            for member in bucket.members:
                parameter = model[member.index]
                view = self.flat.as_strided(member.shape, member.stride, member.begin)
                view.copy_(parameter)
                parameter.data = view
        base = rank * bucket.chunk
        self.owned = [
            OwnedFragment(
                fragment,
                Parameter(_view(fragment, self.flat, fragment.begin)),
                _view(fragment, self.own_grads, fragment.begin - base),
            )
            for fragment in bucket.fragments(rank)
        ]

    def holds(self, position: int, parameter: Parameter) -> bool:
        """True if a parameter still is the bucket's view at its position, in memory and type."""
        member = self.bucket.members[position]
        place = self.flat.data_ptr() + member.begin * self.flat.element_size()
        return member.begin == member.end or (
            parameter.data_ptr() == place and parameter.dtype == self.flat.dtype
        )

    def is_finite(self) -> bool:
        """Return whether all values that this rank contributes are finite."""
        low, high = torch.aminmax(self.grads)  # a single pass, and NaN gets through
        return bool(torch.isfinite(low) & torch.isfinite(high))


def _view(fragment: Fragment, flat: Tensor, begin: int) -> Tensor:
    """A fragment's elements, which begin at ``begin`` in ``flat``."""
    if fragment.whole:
        return flat.as_strided(fragment.member.shape, fragment.member.stride, begin)
    return flat[begin : begin + fragment.end - fragment.begin]
