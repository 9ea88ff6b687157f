"""Tests that gloo passes and lossy doesn't, each with its reason.

A run that fails elsewhere is an error. So is one in which a test of this list passes: then its
line goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

from .modes import MODES

ALL = tuple(name for name, mode in MODES.items() if mode.backend == "lossy")


@dataclass(frozen=True)
class Excuse:
    """``modes``: where the test fails. ``sometimes``: whether it may pass there as well."""

    reason: str
    modes: tuple[str, ...] = ALL
    sometimes: bool = False


_BY_NAME = Excuse(
    "`dist.monitored_barrier` of torch 2.13 refuses every backend whose name isn't `gloo`, before "
    "it asks the backend; `group.monitored_barrier()` works, with lossy's errors, which quote "
    "gloo's"
)

IN_2_13 = dict.fromkeys(
    (
        "test_monitored_barrier_failure_order",
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_subgroup",
        "test_monitored_barrier_wait_all_ranks",
    ),
    _BY_NAME,
)
EXCEPTIONS = IN_2_13 if version("torch").startswith("2.13.") else {}
