"""Codes of parity: how many packets a set has, and how many parity packets protect it.

The same numbers as in native/sets.c; docs/parity.md has the reasons.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

WINDOW: Final = 1024
"""Packets of a parity window at most."""
SIZES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 176, 224)
"""Packets of a set at most, by the code's number for it."""
ROWS: Final[tuple[int, ...]] = (*range(32), *range(34, 128, 3))
"""Parity packets of a set, by the code's number for it."""
SYMBOLS_MOST: Final = 256
"""Packets and rows of a set at most."""
USUAL: Final = 64
"""The size of sets where a share of parity is asked for, if their rows can make it."""


@dataclass(frozen=True)
class Code:
    """Size of parity sets, and their number of rows. The engine fits it to each stream."""

    size: int = 0  # packets of a set at most, one of :data:`SIZES`; 0 for no parity
    rows: int = 0  # parity packets of a set, one of :data:`ROWS`; 0 for no parity

    def __post_init__(self) -> None:
        if (self.size, self.rows) != (0, 0) and not (
            self.size in SIZES and self.rows in ROWS[1:] and self.size + self.rows <= SYMBOLS_MOST
        ):
            raise ValueError(
                f"no code has sets of {self.size} with {self.rows} rows, "
                f"wanted one of {SIZES} with 1 to {ROWS[-1]}, {SYMBOLS_MOST} together at most"
            )

    @property
    def number(self) -> int:
        """Number of the code in packets, 10 bits."""
        return SIZES.index(self.size) | ROWS.index(self.rows) << 4 if self.rows else 0


NO_PARITY: Final = Code()


def code_of(number: int) -> Code:
    """The code with this number on the wire; ValueError if there is none."""
    if not 0 <= number < 1 << 10:
        raise ValueError(f"code is {number}, wanted one of 10 bits")
    rows = ROWS[number >> 4]
    return Code(SIZES[number & 15], rows) if number else Code()


def code_of_share(share: float) -> Code:
    """The code whose parity is nearest to ``share`` of the packets of a long stream."""
    if share <= 0:
        return Code()
    if share * USUAL >= 1:
        rows = min(share * USUAL, SYMBOLS_MOST - USUAL)
        return Code(USUAL, min(ROWS[1:], key=lambda row: abs(row - rows)))
    return Code(min(SIZES, key=lambda size: abs(math.log(size * share))), 1)
