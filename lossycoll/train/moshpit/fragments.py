"""Fragments of a model: each has a share of the rows of all tensors, and a round averages one.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025. There a fragment
is some layers; here it is rows, as ARC-Top-K sends them, so that all have the same size. All peers
of a round know its number and so its rows. No index travels, sums stay sums, and a lost packet
costs its weight alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lossycoll.errors import OptionError
from lossycoll.plan.codec import Floats

MOST_FRAGMENTS: Final = 64
TURNS: Final = 2
"""After so many sweeps fragments come one round earlier: else each would meet but some of a grid's
axes."""


class Fragments:
    """``count`` shares of the rows of tensors. A row is what one index of the first dimension has;
    of a vector, a value."""

    def __init__(self, count: int) -> None:
        if type(count) is not int or not 1 <= count <= MOST_FRAGMENTS:
            raise OptionError(f"fragments is {count!r}, wanted 1 to {MOST_FRAGMENTS}")
        self.count = count

    def of(self, number: int) -> int:
        """The fragment of a round, by its number."""
        return (number + number // (TURNS * self.count)) % self.count

    def rows(self, tensors: Sequence[Tensor], fragment: int) -> list[Tensor]:
        """Views of the fragment's rows, one for each tensor. Those of a tensor may be none."""
        return [
            (one.view(1) if one.dim() == 0 else one)[(fragment + at) % self.count :: self.count]
            for at, one in enumerate(tensors)
        ]

    def gather(self, tensors: Sequence[Tensor], fragment: int) -> Floats:
        """A copy of the fragment's values, flat."""
        found = torch.cat([one.reshape(-1) for one in self.rows(tensors, fragment)])
        values: Floats = found.numpy().astype(np.float32, copy=False)
        return values

    def scatter(self, values: Floats, tensors: Sequence[Tensor], fragment: int) -> None:
        """Writes the fragment's values to where :meth:`gather` had them from."""
        flat, begin = torch.from_numpy(values), 0
        for view in self.rows(tensors, fragment):
            view.copy_(flat[begin : begin + view.numel()].view(view.shape))
            begin += view.numel()


WHOLE: Final = Fragments(1)
