"""The one random function of the project: splitmix64, a bijection on 64-bit words.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014, section 3, with the constants of its published 64-bit mixer.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

MASK: Final = (1 << 64) - 1
GOLDEN: Final = 0x9E3779B97F4A7C15
FIRST: Final = 0xBF58476D1CE4E5B9
SECOND: Final = 0x94D049BB133111EB


def mix(x: int) -> int:
    """Splitmix64's output for state ``x`` (an unsigned 64-bit word; higher bits are cut off)."""
    x = (x + GOLDEN) & MASK
    x = ((x ^ (x >> 30)) * FIRST) & MASK
    x = ((x ^ (x >> 27)) * SECOND) & MASK
    return x ^ (x >> 31)


def mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """:func:`mix` of every element. ``x``: uint64, any shape; the result has that shape."""
    # Unsigned array arithmetic wraps without a warning; scalars would warn.
    x = x + np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(SECOND)
    x ^= x >> np.uint64(31)
    return x


def key_of(*words: int) -> int:
    """A 64-bit key for a name of several numbers, each of 64 bits at most. The first tells apart
    what the keys are for."""
    key = mix(words[0])
    for word in words[1:]:
        key = mix(key ^ word)
    return key
