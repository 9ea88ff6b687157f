"""The number that tells whether all ranks mean the same collective."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

VERSION: Final = 1
"""Part of every signature: grows when the same arguments come to mean another plan."""


def signature(collective: str, algorithm: str, *fields: int | Iterable[int]) -> int:
    """A 64-bit hash, equal on all ranks, processes, machines and Python versions.

    ``fields``: integers, or sequences of them: all that must agree among ranks, in an order that
    the algorithm fixes. The caller's own rank is never one of them.
    """
    parts = [f"{VERSION}/{collective}/{algorithm}"]
    for field in fields:
        # int() since an IntEnum's str() is another in Python 3.10.
        if isinstance(field, int):
            parts.append(str(int(field)))
        else:
            parts.append(",".join([str(int(value)) for value in field]))
    return int.from_bytes(blake2b("/".join(parts).encode(), digest_size=8).digest(), "little")
