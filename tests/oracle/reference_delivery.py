"""Which packets arrive in the reference executor, given which are lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lossycoll.plan.model import Level
from lossycoll.plan.sets import NO_PARITY, Code
from tests.oracle.parity import fitted, shape_of

Lost = Callable[[int, int, int, int, int], NDArray[np.bool_]]
"""(sender, receiver, slot number at the receiver, number of packets, round) -> lost, per packet."""

Needed = Callable[[int, int, int, int], NDArray[np.bool_]]
"""(sender, receiver, slot number at the receiver, number of packets) -> needed, per packet."""

Chosen = Callable[[int, int, int], tuple[Code, int]]
"""(sender, receiver, slot number at the receiver) -> the code and rounds of the stream."""


@dataclass(frozen=True)
class Delivery:
    """How packets are carried; the fields are arguments of :func:`~.reference_executor.execute`."""

    lost: Lost
    rounds: int | None
    needed: Needed | None
    code: Code
    chosen: Chosen | None

    def __post_init__(self) -> None:
        if self.rounds is not None and self.rounds < 0:
            raise ValueError(f"rounds is {self.rounds}, wanted 0 or more, or None for reliable")

    def of(self, level: Level) -> Delivery:
        """That of a level."""
        how = level.delivery
        if how is None:
            return self
        chooses = how.most_parity or how.choose_rounds
        if chooses and self.chosen is None:
            raise ValueError("the level leaves it to what was measured: wanted what was chosen")
        chosen = self.chosen if chooses else None
        return Delivery(self.lost, None if how.reliable else how.repair, None, how.code, chosen)

    def arrived(self, stream: tuple[int, int, int], sent: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which packets of (sender, receiver, slot) arrive. Those not ``sent`` were empty."""
        if self.rounds is None:
            return sent
        n_packets, void = len(sent), ~sent
        code, rounds = fitted(self.code, n_packets), self.rounds
        if self.chosen:
            code, rounds = self.chosen(*stream)
        shape = shape_of(code if sent.any() else NO_PARITY, n_packets)
        first = self.lost(*stream, n_packets + len(shape.of_parity), 0)
        gone, came = first[:n_packets], ~first[n_packets:]
        gone = gone & ~shape.recover(gone | void, void, came)
        for round in range(1, rounds + 1):
            if not gone.any():
                break
            gone &= self.lost(*stream, n_packets, round)
            gone &= ~shape.recover(gone | void, void, came)
        if self.needed is not None:
            gone &= ~self.needed(*stream, n_packets)
            gone &= ~shape.recover(gone | void, void, came)
        return sent & ~gone
