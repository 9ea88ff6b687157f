"""Settings that peers of a round must agree on, and the values in which two of them differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from .protocol import Averages

TENSORS: Final = "tensors"
"""Value of ``average`` where no training says what the values are."""
AVERAGE: Final = "average"


def text_of(settings: Mapping[str, object]) -> str:
    """Settings as a message carries them. ``settings``: names and values, none of which has a comma
    or an equals sign."""
    return ", ".join(f"{name}={value}" for name, value in sorted(settings.items()))


def digest_of(settings: str) -> str:
    """Digest of settings, 32 hex digits."""
    return hashlib.sha256(settings.encode()).hexdigest()[:32]


def difference(own: Averages, other: Averages) -> str:
    """Values in which a peer differs from another, so that they can't be in one round.

    Of a draft only what both have said is compared. A peer that averages tensors by itself may
    begin a training later, so its settings may lack those of one.

    Returns as in ``every=5, wanted 10``; "": none.
    """
    mine, theirs = _items(own.settings), _items(other.settings)
    is_partial = own.draft or other.draft or TENSORS in (mine.get(AVERAGE), theirs.get(AVERAGE))
    names = mine.keys() & theirs.keys() if is_partial else mine.keys() | theirs.keys()
    if is_partial:
        names -= {AVERAGE}
    differ = [
        f"{name}={mine.get(name, 'not set')}, wanted {theirs.get(name, 'not set')}"
        for name in sorted(names)
        if mine.get(name) != theirs.get(name)
    ]
    if not differ and not is_partial and own.schema != other.schema:
        differ = [f"schema {own.schema}, wanted {other.schema}"]
    return "; ".join(differ)


def _items(settings: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in settings.split(", ") if item]
    return {name: value for name, _, value in pairs}
