"""One bucket's parameters in few bits: what travels is how far they are from an anchor.

All replicas hold the same *anchor*, a copy of the parameters of some steps ago. An owner sends the
difference between its own parameters and the anchor, rounded to few bits, and each replica holds
the anchor plus what it got, the owner included. So a weight is rounded to a small part of what it
has moved, not of its size; and a difference that is lost leaves a stale value, as without encoding,
since none builds on another. What rounding takes away is still owed: the owner's optimizer steps on
the exact parameters.

An anchor that every replica has got the difference to is moved there: each step where all blocks
must come, and else each MOVE_EVERY, when they must.
"""

from __future__ import annotations

from typing import Final

import torch

from lossycoll.train.common.packet_elements import rounded_to

from .shard import Shard

MOVE_EVERY: Final = 8
"""Steps. An anchor that is older makes differences larger, and so what rounding takes away; one
that is younger has more steps wait for all blocks."""


class ParameterDifferences:
    """The differences of one bucket that travel, and the values that they are differences to.

    ``shard`` is of float32, and the same on all ranks now.
    """

    def __init__(self, shard: Shard, rank: int, encoding: str, per_block: int) -> None:
        self.encoding = encoding
        self._per_block = per_block
        self._flat = shard.flat
        self._anchor = shard.flat.clone()
        self.values = torch.zeros_like(shard.flat)
        """The differences, float32 (size,): what is sent, and received in place."""
        chunk = slice(rank * shard.bucket.chunk, (rank + 1) * shard.bucket.chunk)
        self._own, self._own_anchor = shard.flat[chunk], self._anchor[chunk]
        self._own_values = self.values[chunk]
        self._owed = torch.zeros_like(self._own)
        """What the owner's parameters are besides what replicas hold."""

    def settle_owed(self) -> None:
        """Makes this rank's part of the bucket exact, as its optimizer needs it."""
        self._own.add_(self._owed)
        self._owed.zero_()

    def forget_owed(self) -> None:
        """The parameters are others now."""
        self._owed.zero_()

    def take(self) -> None:
        """The optimizer has stepped: what is sent, and held of it by all, is rounded now."""
        torch.sub(self._own, self._own_anchor, out=self._own_values)
        rounded_to(self._own_values, self._own_values, self.encoding, self._per_block)
        held = self._own_anchor + self._own_values
        torch.sub(self._own, held, out=self._owed)
        self._own.copy_(held)

    def apply(self) -> None:
        """What has arrived is in :attr:`values`: the bucket becomes what all hold of it."""
        torch.add(self._anchor, self.values, out=self._flat)

    def move(self) -> None:
        """All replicas hold the same: that is the anchor from now on."""
        self._anchor.copy_(self._flat)
        self.values.zero_()
