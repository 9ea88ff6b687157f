"""Stats of a ShardedOptimizer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardedStats:
    """Counts over all steps at this rank: what :meth:`.ShardedOptimizer.stats` returns.

    A block is what one packet carries of one rank's chunk of a bucket. Counts are of blocks of
    parameters, not of gradients.
    """

    steps: int = 0
    """Steps that were taken."""
    skipped: int = 0
    """Steps that no rank took because of NaN or infinity; not those that a GradScaler skips."""
    blocks: int = 0
    """Blocks that other ranks sent here."""
    stale: int = 0
    """Those of ``blocks`` that didn't arrive, so that the old values stayed."""
    repaired: int = 0
    """Those of ``blocks`` that were due by ``max_age``, and were resent until they arrived."""
