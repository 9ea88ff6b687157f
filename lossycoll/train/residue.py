"""Error feedback: what the network lost of a rank's gradients is added to its next ones.

The mean of what arrives is unbiased but noisier than that of all, by (1 - p^N) / (1 - p): a
smaller batch, in effect. If instead what is lost counts as zero, and its sender is told and sends
it again with its next gradient, then nothing is lost: some of each gradient is a step or two late.
The memory is that of error-feedback SGD (Seide et al., Interspeech 2014; Karimireddy et al., arXiv
1901.09847), of which the network is the compressor here.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from .ages import Mask
from .buckets import Bucket


class Residue:
    """Of one bucket at one rank. ``like``: a tensor of the bucket's type, float[size]."""

    def __init__(self, bucket: Bucket, like: Tensor) -> None:
        self._bucket = bucket
        self._kept = torch.zeros_like(like)
        self._views = [
            self._kept.as_strided(slot.shape, slot.stride, slot.begin) for slot in bucket.slots
        ]

    def add_to(self, gradient: Tensor, position: int) -> None:
        """Adds what is kept of slot ``position`` to what is sent of it now."""
        gradient.add_(self._views[position])

    def keep(self, sent: Tensor, lost: Mask, per_block: int, present: Collection[int]) -> None:
        """Keeps what was lost of ``sent``, float[size], for the next time.

        ``lost``: bool (world, blocks), by owner; a block has ``per_block`` elements. What is kept
        of slots that weren't ``present``, of which zeros were sent, stays.
        """
        left = [(view, view.clone()) for i, view in enumerate(self._views) if i not in present]
        if lost.any():
            mask = np.repeat(lost, per_block, axis=1)[:, : self._bucket.chunk]
            flat = torch.from_numpy(np.ascontiguousarray(mask)).view(-1)
            torch.where(flat, sent, sent.new_zeros(()), out=self._kept)
        else:
            self._kept.zero_()
        for view, before in left:
            view.copy_(before)

    def clear(self) -> None:
        """Nothing is kept."""
        self._kept.zero_()

    def norm(self) -> float:
        """L2 norm of what is kept."""
        return float(torch.linalg.vector_norm(self._kept))
