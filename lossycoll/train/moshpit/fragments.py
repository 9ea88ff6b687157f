"""Shares of a model's rows, of which a round averages one.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025.
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
    """``count`` shares of the rows of all tensors, of which a round averages one. A row is what one
    index of the first dimension has; of a vector, a value. In the source a fragment is some layers;
    rows, as ARC-Top-K sends them, make all of the same size. All peers of a round know its number
    and so its rows: no index travels, sums stay sums, and a lost packet costs its weight alone."""

    def __init__(self, count: int) -> None:
        if type(count) is not int or not 1 <= count <= MOST_FRAGMENTS:
            raise OptionError(f"fragments is {count!r}, wanted 1 to {MOST_FRAGMENTS}")
        self.count = count

    def of(self, number: int) -> int:
        return (number + number // (TURNS * self.count)) % self.count

    def rows(self, tensors: Sequence[Tensor], fragment: int) -> list[Tensor]:
        """Views of the fragment's rows, one for each tensor. Those of a tensor may be none."""
        return [
            (one.view(1) if one.dim() == 0 else one)[(fragment + at) % self.count :: self.count]
            for at, one in enumerate(tensors)
        ]

    def gather(self, tensors: Sequence[Tensor], fragment: int) -> Floats:
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
