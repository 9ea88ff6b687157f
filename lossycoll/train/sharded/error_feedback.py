"""Error feedback: a rank adds what the network lost of its gradients to its next ones.

The mean of what arrives is unbiased but noisier than that of all, by (1 - p^N) / (1 - p): a
smaller batch, in effect. Here what is lost counts as zero instead, and its sender, to whom it is
reported, adds it to its next gradient. So it does with what is rounded off where gradients are sent
in few bits. Nothing is lost then, but some of each gradient is a step or two late. The residual is
that of error-feedback SGD (Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847),
with the network as the compressor.

The residual is without the scale of a GradScaler, which is only known when a step is taken, and may
change with every pass. So it is sent with the expected scale, and what that was wrong by stays in
the residual.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from lossycoll.train.common.layout import Bucket


class Residual:
    """Gradients of one bucket that are still to be sent; ``like`` has the bucket's type."""

    def __init__(self, bucket: Bucket, like: Tensor) -> None:
        self._bucket = bucket
        self._values = torch.zeros_like(like)
        self._views = [
            self._values.as_strided(member.shape, member.stride, member.begin)
            for member in bucket.members
        ]

    def add_to(self, gradient: Tensor, position: int, scale: float) -> None:
        """Adds a member's residual, times ``scale``, to the gradient that is sent now, in place."""
        gradient.add_(self._views[position], alpha=scale)

    def keep(
        self,
        missed: Tensor | None,
        present: Collection[int],
        scales: tuple[float, float],
    ) -> None:
        """Takes what was lost, for the next pass.

        ``missed``, float (size,), was lost or rounded off of what this rank sent, also for others
        of its host or site; None: nothing. ``present`` are positions of members that had a
        gradient: the others' residual, of which zeros were sent, stays and gets what others lost of
        theirs. ``scales``: the one given to :meth:`add_to`, and the one that it should have been.
        """
        absent = [(view, view.clone()) for i, view in enumerate(self._views) if i not in present]
        added, scale = scales
        self._values.mul_(1 - added / scale)
        for view, before in absent:
            view.copy_(before)
        if missed is not None:
            self._values.add_(missed, alpha=1 / scale)

    def values(self) -> Tensor:
        """A copy, float (size,)."""
        return self._values.clone()

    def replace(self, values: Mapping[int, Tensor]) -> None:
        """Sets the residual by the index of the parameter; zeros for the others."""
        self._values.zero_()
        for member, view in zip(self._bucket.members, self._views, strict=True):
            if member.index in values:
                view.copy_(values[member.index])

    def norm(self) -> float:
        """L2 norm."""
        return float(torch.linalg.vector_norm(self._values))
