"""Collectives for PyTorch that lose packets on purpose and stay correct.

``torch.distributed.init_process_group(backend="lossy")`` needs no import of this package; what is
here is for blocks of code, options and figures. Nothing heavy is imported until it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from .errors import (
        AbortedError,
        CheckpointError,
        ClosedError,
        EngineError,
        InterfaceError,
        LinkError,
        LossyError,
        MismatchError,
        NonFiniteError,
        OperationTimeout,
        OptionError,
        PeerLostError,
        RendezvousError,
        TrainingError,
        UnsupportedError,
    )
    from .options.fields import Options, lossy, reliable
    from .runtime.engine.reports import PeerStats, Report, Stats
    from .train.compress.arc_topk import ARCTopKState
    from .train.compress.hook import arc_topk_hook
    from .train.copies import ShardedFigures
    from .train.disperse import dispersing_hook
    from .train.drift import Drift, measure_drift
    from .train.drift_bound import DriftBound
    from .train.drop_figures import DropReport, DropStep
    from .train.dropcompute import DropCompute
    from .train.sharded import ShardedOptimizer

__version__ = "0.1.0"

_HOME: Final = {
    **dict.fromkeys(
        (
            "AbortedError",
            "CheckpointError",
            "ClosedError",
            "EngineError",
            "InterfaceError",
            "LinkError",
            "LossyError",
            "MismatchError",
            "NonFiniteError",
            "OperationTimeout",
            "OptionError",
            "PeerLostError",
            "RendezvousError",
            "TrainingError",
            "UnsupportedError",
        ),
        "errors",
    ),
    **dict.fromkeys(("Options", "lossy", "reliable"), "options.fields"),
    **dict.fromkeys(("PeerStats", "Report", "Stats"), "runtime.engine.reports"),
    "ShardedFigures": "train.copies",
    "dispersing_hook": "train.disperse",
    "ShardedOptimizer": "train.sharded",
    **dict.fromkeys(("Drift", "measure_drift"), "train.drift"),
    "DriftBound": "train.drift_bound",
    "DropCompute": "train.dropcompute",
    **dict.fromkeys(("DropReport", "DropStep"), "train.drop_figures"),
    "ARCTopKState": "train.compress.arc_topk",
    "arc_topk_hook": "train.compress.hook",
}
"""The module of each public name."""

__all__ = [
    "ARCTopKState",
    "AbortedError",
    "CheckpointError",
    "ClosedError",
    "Drift",
    "DriftBound",
    "DropCompute",
    "DropReport",
    "DropStep",
    "EngineError",
    "InterfaceError",
    "LinkError",
    "LossyError",
    "MismatchError",
    "NonFiniteError",
    "OperationTimeout",
    "OptionError",
    "Options",
    "PeerLostError",
    "PeerStats",
    "RendezvousError",
    "Report",
    "ShardedFigures",
    "ShardedOptimizer",
    "Stats",
    "TrainingError",
    "UnsupportedError",
    "arc_topk_hook",
    "dispersing_hook",
    "group_stats",
    "last_report",
    "lossy",
    "measure_drift",
    "reliable",
    "stats",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def stats(group: ProcessGroup | None = None) -> Stats:
    """This rank's figures since ``group`` (None: the default group) was made.

    Raises UnsupportedError for a group of another backend, as the next two do.
    """
    from .backend.process_group import of

    return of(group).lossy_stats()


def last_report(group: ProcessGroup | None = None) -> Report | None:
    """What the engine's last finished operation in ``group`` did at this rank; None before it."""
    from .backend.process_group import of

    return of(group).lossy_last_report()


def group_stats(group: ProcessGroup | None = None) -> Mapping[int, Mapping[str, Any]]:
    """The counters of every rank of ``group``, by rank, as its last sign of life told them."""
    from .backend.process_group import of

    return of(group).lossy_group_stats()
