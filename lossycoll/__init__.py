"""Collectives for PyTorch that lose packets on purpose and stay correct.

``torch.distributed.init_process_group(backend="lossy")`` needs no import of this package; what is
here is for scopes, options and figures. Nothing heavy is imported until it is used. An import after
torch's registers the backend where torch doesn't load its entry point.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

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

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from .backend.replacement import stop_replacing
    from .backend.spans import export_chrome_trace
    from .backend.wire_all_reduce import wire_allreduce_
    from .options.fields import Options
    from .options.scopes import lossy, reliable
    from .plan.topology import Topology
    from .runtime.engine.reports import PeerStats, Report, Stats
    from .runtime.swarm.member import RoundReport
    from .runtime.swarm.swarm import Swarm
    from .train.compress.arc_topk import ARCTopKState
    from .train.drift.bound import DriftBound
    from .train.drift.measure import Drift, measure_drift
    from .train.dropcompute.controller import DropCompute
    from .train.dropcompute.report import DropReport, DropStep
    from .train.elastic.torchft import torchft_process_group
    from .train.elastic.world import ElasticWorld, WorldChange
    from .train.hooks import WireFeedbackState, arc_topk_hook, dispersing_hook, wire_feedback_hook
    from .train.moshpit.averager import MoshpitAverager
    from .train.moshpit.newcomer import CatchUpReport
    from .train.moshpit.sgd import MoshpitSGD
    from .train.sharded.backup import ShardBackup
    from .train.sharded.optimizer import ShardedOptimizer
    from .train.sharded.parameter_sync import ShardedStats

__version__ = "0.2.0"

_HOME: Final = {
    "Options": "options.fields",
    **dict.fromkeys(("lossy", "reliable"), "options.scopes"),
    "Topology": "plan.topology",
    **dict.fromkeys(("PeerStats", "Report", "Stats"), "runtime.engine.reports"),
    "RoundReport": "runtime.swarm.member",
    "Swarm": "runtime.swarm.swarm",
    "torchft_process_group": "train.elastic.torchft",
    **dict.fromkeys(("ElasticWorld", "WorldChange"), "train.elastic.world"),
    "MoshpitAverager": "train.moshpit.averager",
    "CatchUpReport": "train.moshpit.newcomer",
    "MoshpitSGD": "train.moshpit.sgd",
    "ShardBackup": "train.sharded.backup",
    "ShardedStats": "train.sharded.parameter_sync",
    "dispersing_hook": "train.hooks",
    **dict.fromkeys(("WireFeedbackState", "wire_feedback_hook"), "train.hooks"),
    "wire_allreduce_": "backend.wire_all_reduce",
    "stop_replacing": "backend.replacement",
    "export_chrome_trace": "backend.spans",
    "ShardedOptimizer": "train.sharded.optimizer",
    **dict.fromkeys(("Drift", "measure_drift"), "train.drift.measure"),
    "DriftBound": "train.drift.bound",
    "DropCompute": "train.dropcompute.controller",
    **dict.fromkeys(("DropReport", "DropStep"), "train.dropcompute.report"),
    "ARCTopKState": "train.compress.arc_topk",
    "arc_topk_hook": "train.hooks",
}
"""The module of each public name."""

__all__ = [
    "ARCTopKState",
    "AbortedError",
    "CatchUpReport",
    "CheckpointError",
    "ClosedError",
    "Drift",
    "DriftBound",
    "DropCompute",
    "DropReport",
    "DropStep",
    "ElasticWorld",
    "EngineError",
    "InterfaceError",
    "LinkError",
    "LossyError",
    "MismatchError",
    "MoshpitAverager",
    "MoshpitSGD",
    "NonFiniteError",
    "OperationTimeout",
    "OptionError",
    "Options",
    "PeerLostError",
    "PeerStats",
    "RendezvousError",
    "Report",
    "RoundReport",
    "ShardBackup",
    "ShardedOptimizer",
    "ShardedStats",
    "Stats",
    "Swarm",
    "Topology",
    "TrainingError",
    "UnsupportedError",
    "WireFeedbackState",
    "WorldChange",
    "arc_topk_hook",
    "debug_handlers",
    "dispersing_hook",
    "export_chrome_trace",
    "group_stats",
    "last_report",
    "lossy",
    "measure_drift",
    "rekey",
    "reliable",
    "stats",
    "stop_replacing",
    "topology",
    "torchft_process_group",
    "wire_allreduce_",
    "wire_feedback_hook",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def stats(group: ProcessGroup | None = None) -> Stats:
    """Return this rank's figures, in all groups of the process or in one.

    Groups that a mesh, DeepSpeed or FSDP makes count as well; the default group may be of another
    backend. Destroyed groups don't count.

    Args:
        group: A group of this backend; None for all of them.

    Returns:
        The sums over all operations since each group was made, and per peer. For all groups,
        ``groups`` has the figures of each, and ranks are numbered as in the job.

    Raises:
        UnsupportedError: The group is one of another backend, or there is none of this one.
    """
    from .backend.process_group import of, stats_of_all

    return stats_of_all() if group is None else of(group).lossy_stats()


def topology(group: ProcessGroup | None = None) -> Topology:
    """Return the topology of a group: its ranks' hosts and sites (docs/topology.md).

    Args:
        group: A group of this backend; None for the default group.

    Returns:
        The group's topology, the same on all ranks.

    Raises:
        UnsupportedError: The group is one of another backend.
    """
    from .backend.process_group import of

    return of(group).lossy_topology()


def rekey(group: ProcessGroup | None = None) -> None:
    """Change the keys of all traffic of a group's job from now on (docs/sealing.md).

    One rank's call is enough. No call waits, and no packet is lost by it. Without a secret, nothing
    happens.

    Args:
        group: A group of this backend; None for the default group.

    Raises:
        UnsupportedError: The group is one of another backend.
    """
    from .backend.process_group import of

    of(group).lossy_rekey()


def last_report(group: ProcessGroup | None = None) -> Report | None:
    """Return this rank's report of the engine's last finished operation in a group.

    Args:
        group: A group of this backend; None for the default group.

    Returns:
        The operation's report; None before the first has finished.

    Raises:
        UnsupportedError: The group is one of another backend.
    """
    from .backend.process_group import of

    return of(group).lossy_last_report()


def group_stats(group: ProcessGroup | None = None) -> Mapping[int, Mapping[str, Any]]:
    """Ask every rank of a group for its counters, and return them.

    Args:
        group: A group of this backend; None for the default group.

    Returns:
        The counters of each rank, by name: ``calls``, the number of collectives that it has issued,
        and sums such as ``packets_missing`` (docs/backend.md). A rank that doesn't answer within
        two seconds keeps its last counters, if it ever gave any.

    Raises:
        UnsupportedError: The group is one of another backend.
    """
    from .backend.process_group import of

    return of(group).lossy_group_stats()


def debug_handlers() -> list[Any]:
    """Return the pages of torch's debug server and of this package. Call it on all ranks.

    ``torch.distributed.debug.start_debug_server(handlers=lossycoll.debug_handlers())`` then serves
    the pages ``/lossycoll`` (docs/torch-tools.md) and ``/lossycoll_fr_trace``.

    Returns:
        The ``handlers`` for ``start_debug_server``.

    Raises:
        UnsupportedError: This torch has no such server, or a package that it needs is missing.
    """
    try:
        from .cli.debug_server import handlers
    except ImportError as error:
        raise UnsupportedError(
            f"torch's debug server can't be loaded ({error}): it needs torch 2.13 and the packages "
            f"jinja2, tabulate, and aiohttp or requests"
        ) from None
    return handlers()


def _make_known() -> None:
    """Registers the backend if torch was imported without it. While torch imports this package, it
    is about to call the entry point."""
    torch = sys.modules.get("torch")
    spec = getattr(torch, "__spec__", None)
    if spec is None or getattr(spec, "_initializing", False):
        return
    from ._autoload import make_known

    make_known()


_make_known()
