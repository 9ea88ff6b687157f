"""Runs of the study in a pool of ranks, which stays from run to run."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common.runner import Measure

from .matrix import Run
from .pool import Pool, RunFailed


@contextlib.contextmanager
def measuring(options: argparse.Namespace) -> Iterator[Measure[Run]]:
    """Yields what measures a batch of one run; raises RunFailed where a rank fails."""
    kept: dict[int, Pool] = {}

    def measure(batch: Sequence[Run]) -> list[Any]:
        (run,) = batch
        for world in [world for world in kept if world != run.world]:
            kept.pop(world).close()  # idle ranks would still hold their memory
        if run.world not in kept:
            kept[run.world] = Pool(run.world)
        try:
            return [kept[run.world].run(run, options.steps)]
        except RunFailed:
            kept.clear()
            raise

    try:
        yield measure
    finally:
        for pool in kept.values():
            pool.close()
