"""What the elements of a plan are: the call's own, bytes, or what is encoded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from lossycoll.plan.codec import ENCODED, elements_of
from lossycoll.runtime.engine.binding import DType


class Units(NamedTuple):
    """The elements of a plan.

    Attributes:
        dtype: Their type.
        per_packet: How many of them a packet carries.
    """

    dtype: DType
    per_packet: int

    def count(self, nbytes: int) -> int:
        """Elements in so many bytes of a buffer."""
        return nbytes // self.dtype.itemsize

    def counts(self, nbytes: Sequence[int]) -> tuple[int, ...]:
        """:meth:`count` of each."""
        return tuple([self.count(n) for n in nbytes])


@lru_cache(maxsize=64)
def units_of(payload: int, dtype: DType, encoding: str) -> Units:
    """The elements of a call's plan.

    Args:
        payload: Bytes that a packet has room for.
        dtype: The type that the call adds; BYTES for copies, unless they are encoded.
        encoding: How packets carry the elements, a name of plan.codec's.
    """
    if encoding != "same":
        dtype = DType[ENCODED.upper()]
    return Units(dtype, elements_of(encoding, dtype.name.lower(), payload))
