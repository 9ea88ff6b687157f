"""The sets of a stream's packets, in numpy: what native/sets.c does.

A stream's packets are cut into parity windows. Packet i of a window with S sets is in set i mod S,
at column i div S. A set has ``rows`` parity packets, and any of them bring back as many of its
packets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lossycoll.plan.sets import NO_PARITY, ROWS, SIZES, WINDOW, Code


def fitted(code: Code, n: int) -> Code:
    """The code of the same share for a stream of ``n`` packets, whose sets may have fewer."""
    if n == 0 or not code.rows:
        return NO_PARITY
    window = -(-n // -(-n // WINDOW))
    columns = -(-window // -(-window // code.size))
    rows = (2 * columns * code.rows + code.size) // (2 * code.size)
    rows = max(1, *[each for each in ROWS if each <= rows])  # the most that a code can say
    return Code(next(size for size in SIZES if size >= min(n, code.size)), rows)


@dataclass(frozen=True)
class Shape:
    """The sets of one stream; :func:`shape_of` makes it.

    Attributes:
        code: What its packets say.
        window: Packets of a parity window; the last may have fewer.
        of_data: Shape (n,): the set of each data packet, numbered through the stream.
        of_parity: Shape (parity packets,): the set of each parity packet n + j.
    """

    code: Code
    window: int
    of_data: NDArray[np.int64]
    of_parity: NDArray[np.int64]

    def recover(
        self, missing: NDArray[np.bool_], void: NDArray[np.bool_], came: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """The packets of ``missing``, bool (n,), that come back by the parity that ``came``.

        ``void`` packets were never sent, since nobody had contributed to them: they count as zeros,
        and nothing brings them.
        """
        n_sets = int(self.of_data.max(initial=-1)) + 1
        if not len(self.of_parity):
            return np.zeros_like(missing)
        lacks = np.bincount(self.of_data, missing, n_sets)
        has = np.bincount(self.of_parity, came, n_sets)
        back: NDArray[np.bool_] = missing & ~void & (lacks <= has)[self.of_data]
        return back


@lru_cache(maxsize=256)
def shape_of(code: Code, n: int) -> Shape:
    """The sets of a stream of ``n`` packets."""
    if not code.rows or not n:
        none = np.zeros(0, np.int64)
        return Shape(code, WINDOW, np.zeros(n, np.int64), none)
    window = -(-n // -(-n // WINDOW))
    of_data, of_parity, sets = [], [], 0
    for first in range(0, n, window):
        packets = min(window, n - first)
        here = -(-packets // code.size)
        of_data.append(sets + np.arange(packets) % here)
        of_parity.append(sets + np.arange(here * code.rows) % here)
        sets += here
    return Shape(code, window, np.concatenate(of_data), np.concatenate(of_parity))
