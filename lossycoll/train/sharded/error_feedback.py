"""Error feedback: what the network lost of a rank's gradients is added to its next ones.

The mean of what arrives is unbiased but noisier than that of all, by (1 - p^N) / (1 - p): a
smaller batch, in effect. If instead what is lost counts as zero, and its sender is told and sends
it again with its next gradient, then nothing is lost: some of each gradient is a step or two late.
The memory is that of error-feedback SGD (Seide et al., Interspeech 2014; Karimireddy et al., arXiv
1901.09847), of which the network is the compressor here.

What is kept is kept without the scale of a GradScaler, which is only known when a step is taken,
and may be another one with every pass. So it is sent with the scale that is expected, and what
that was wrong by is kept as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from lossycoll.train.common.layout import Bucket
from lossycoll.train.common.staleness import Mask


class Residue:
    """Of one bucket at one rank. ``like``: a tensor of the bucket's type, float[size]."""

    def __init__(self, bucket: Bucket, like: Tensor) -> None:
        self._bucket = bucket
        self._kept = torch.zeros_like(like)
        self._views = [
            self._kept.as_strided(member.shape, member.stride, member.begin)
            for member in bucket.members
        ]

    def add_to(self, gradient: Tensor, position: int, scale: float) -> None:
        """Adds what is kept of member ``position``, times ``scale``, to what is sent of it now."""
        gradient.add_(self._views[position], alpha=scale)

    def keep(
        self,
        sent: Tensor,
        lost: Mask,
        per_block: int,
        present: Collection[int],
        scales: tuple[float, float],
    ) -> None:
        """Keeps what was lost of ``sent``, float[size], for the next time.

        ``lost``: bool (world, blocks), by owner; a block has ``per_block`` elements. What is kept
        of members that weren't ``present``, of which zeros were sent, stays. ``scales``: the one
        that was given to :meth:`add_to`, and the one that it should have been.
        """
        left = [(view, view.clone()) for i, view in enumerate(self._views) if i not in present]
        added, scale = scales
        self._kept.mul_(1 - added / scale)
        if lost.any():
            mask = np.repeat(lost, per_block, axis=1)[:, : self._bucket.chunk]
            flat = torch.from_numpy(np.ascontiguousarray(mask)).view(-1)
            missed = torch.where(flat, sent, sent.new_zeros(()))
            self._kept.add_(missed, alpha=1 / scale)
        for view, before in left:
            view.copy_(before)

    def kept(self) -> Tensor:
        """All that is kept, float[size]; a copy."""
        return self._kept.clone()

    def replace(self, kept: Mapping[int, Tensor]) -> None:
        """Keeps ``kept``, by the parameter's index, and nothing else of what there was."""
        self._kept.zero_()
        for member, view in zip(self._bucket.members, self._views, strict=True):
            if member.index in kept:
                view.copy_(kept[member.index])

    def norm(self) -> float:
        """L2 norm of what is kept."""
        return float(torch.linalg.vector_norm(self._kept))
