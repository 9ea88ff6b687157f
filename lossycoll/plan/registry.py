"""The algorithms there are, by collective.

Whatever offers or checks algorithms reads this table: the option ``algorithm``, ``lossycoll
bench``, the plan cache, and tests. docs/extending.md shows how to add one.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Final, NamedTuple

from .model import Plan

AUTO: Final = "auto"
"""Asks for each collective's default algorithm, by hosts and sites where ranks share them."""
HIERARCHICAL: Final = "hierarchical"
"""Asks for the same, whatever else speaks against going by hosts and sites."""
ENTRY_POINTS: Final = "lossycoll.algorithms"
"""The group of entry points by which installed packages add algorithms."""


class Arguments(NamedTuple):
    """Arguments of a collective's builders; docs/extending.md says what each means. They are called
    as ``build(world, rank, *sizes, elements_per_packet, **options)``."""

    sizes: tuple[str, ...]
    options: tuple[str, ...] = ()


COLLECTIVES: Final[Mapping[str, Arguments]] = {
    "all_reduce": Arguments(("elements",), ("order", "missing", "finish")),
    "reduce_scatter": Arguments(("counts",), ("finish",)),
    "broadcast": Arguments(("elements",), ("root", "fanout")),
    "barrier": Arguments((), ("fanout",)),
    "all_gather": Arguments(("counts",)),
    "all_to_all": Arguments(("count",)),
    "all_to_all_uneven": Arguments(("send_counts", "receive_counts")),
    "gather": Arguments(("counts",), ("root",)),
    "scatter": Arguments(("counts",), ("root",)),
}


@dataclass(frozen=True, eq=False)
class Algorithm:
    """Algorithm of one collective: a builder, and its promises.

    ``tests/support/plan_checks.py`` checks every promise against the plans.

    Attributes:
        collective: The collective that it implements, one of ``COLLECTIVES``.
        name: Name for the option ``algorithm``: lower-case letters, digits and underscores.
        build: Pure function from the collective's arguments to one rank's plan.
        summary: Its purpose and when to choose it; one line.
        steps: Function from world size to the length of the longest chain of packets, each of which
            waits for the one before.
        traffic: Function from world size to the elements that the busiest rank sends, divided by
            the elements of the largest buffer of any rank.
        serves: Function from world size to whether the builder has plans for it; other groups use
            the default.
        default: Whether ``"auto"`` means this algorithm. Each collective has one such, for any
            world size.
        draws_order: Whether a lossy call draws a new ``order`` of the ranks for each operation; if
            not, ``order`` is None. All-reduce only.
        few_owners: Whether ``order`` may hold only some ranks, which then own all segments. Without
            resending, that makes the streams of short buffers longer (option ``stream_packets``).
        partial_sums: Whether a lost packet may cost the contributions of several ranks.
        direct: Whether all data goes directly from the rank that has it to ranks that need it.
            After the loss of a rank, only its own data is then missing.
        levels: Whether the builder takes ``topology`` (hosts and sites) besides the collective's
            options. Without a topology, every rank is a host of its own. ``steps``, ``traffic``,
            ``partial_sums`` and ``direct`` hold for such a flat topology.
        relays: Whether, with hosts and sites, ranks add up or pass on data of other ranks on their
            host. ``direct`` then holds on flat topologies only.
    """

    collective: str
    name: str
    build: Callable[..., Plan]
    summary: str
    steps: Callable[[int], int]
    traffic: Callable[[int], float]
    serves: Callable[[int], bool] = lambda world: world >= 1
    default: bool = False
    draws_order: bool = False
    few_owners: bool = False
    partial_sums: bool = False
    direct: bool = False
    levels: bool = False
    relays: bool = False


DIRECT: Final[dict[str, Any]] = {
    "steps": lambda world: min(1, world - 1),
    "traffic": lambda world: (world - 1) / world,
    "default": True,
    "direct": True,
    "levels": True,
}
"""Promises of the default algorithms that take one step on a flat topology."""
_algorithms: dict[tuple[str, str], Algorithm] = {}
"""Algorithms, by collective and name."""
_defaults: dict[str, Algorithm] = {}
"""Default algorithm of each collective."""
_unloaded: list[str] = [ENTRY_POINTS]
"""Groups of entry points that nobody has asked for yet."""


def register(algorithm: Algorithm) -> Algorithm:
    """Add an algorithm for groups that are made from now on.

    Call this on every rank, before the first group is made: ranks compare the option ``algorithm``,
    and an error names a rank that lacks the algorithm. Registering the same object again does
    nothing.

    Args:
        algorithm: The entry, with its builder.

    Returns:
        ``algorithm``.

    Raises:
        ValueError: The collective is unknown, the name is malformed or taken, the builder doesn't
            take the collective's arguments, or the collective has a default already.
    """
    key = algorithm.collective, algorithm.name
    if _algorithms.get(key) is not algorithm:
        _check(algorithm)
        _algorithms[key] = algorithm
        if algorithm.default:
            _defaults[algorithm.collective] = algorithm
    return algorithm


def unregister(algorithm: Algorithm) -> None:
    """Takes an algorithm away again, for tests and notebooks. Groups that use it must be closed."""
    key = algorithm.collective, algorithm.name
    if _algorithms.get(key) is not algorithm:
        raise ValueError(f"{_title(algorithm)} is not registered, wanted one that is")
    if algorithm.default:
        raise ValueError(f"{_title(algorithm)} is the default, wanted one that is not")
    del _algorithms[key]


def algorithms(collective: str | None = None) -> tuple[Algorithm, ...]:
    """The algorithms that are registered. ``collective``: whose algorithms; None: all."""
    _load_entry_points()
    found = _algorithms.values()
    return tuple(a for a in found if collective is None or a.collective == collective)


def algorithm_names(collective: str | None = None) -> tuple[str, ...]:
    """The names that the option ``algorithm`` takes. ``collective``: whose names; None: those of
    all."""
    found = algorithms(collective)
    by_hosts = [HIERARCHICAL for a in found if a.levels]
    several = [a.name for a in found if len(algorithms(a.collective)) > 1]
    return tuple(dict.fromkeys([AUTO, *by_hosts, *several]))


def default_algorithm(collective: str) -> Algorithm:
    if collective not in _defaults:
        raise ValueError(f"collective is {collective!r}, wanted one of {', '.join(COLLECTIVES)}")
    return _defaults[collective]


def choose_algorithm(collective: str, name: str, world: int) -> Algorithm:
    """The algorithm ``name`` of a collective, if it exists and serves the world; or the default.
    One option names the algorithm of every collective. ValueError: no collective has that name."""
    found = _algorithms.get((collective, name))
    if found is not None and found.serves(world):
        return found
    known = name in (AUTO, HIERARCHICAL) or found is not None
    if not known and name not in {a.name for a in algorithms()}:
        raise ValueError(f"algorithm is {name!r}, wanted one of {', '.join(algorithm_names())}")
    return default_algorithm(collective)


def _check(algorithm: Algorithm) -> None:
    title = _title(algorithm)
    if algorithm.collective not in COLLECTIVES:
        raise ValueError(f"{title}: wanted a collective of {', '.join(COLLECTIVES)}")
    named = re.fullmatch(r"[a-z][a-z0-9_]*", algorithm.name)
    if not named or algorithm.name in (AUTO, HIERARCHICAL):
        raise ValueError(
            f"{title}: wanted a name of lower-case letters, digits and underscores, not {AUTO!r} "
            f"nor {HIERARCHICAL!r}"
        )
    taken = _algorithms.get((algorithm.collective, algorithm.name))
    if taken is not None:
        raise ValueError(f"{title}: {taken.build.__module__} has it already, wanted a new name")
    wanted = COLLECTIVES[algorithm.collective]
    positional = ("world", "rank", *wanted.sizes, "elements_per_packet")
    options = (*wanted.options, *(["topology"] if algorithm.levels else []))
    try:
        inspect.signature(algorithm.build).bind(*positional, **dict.fromkeys(options))
    except TypeError as error:
        arguments = ", ".join((*positional, "*", *options))
        raise ValueError(f"{title}: {error}; wanted a builder ({arguments})") from None
    if algorithm.default and algorithm.collective in _defaults:
        other = _defaults[algorithm.collective].name
        raise ValueError(f"{title}: {other} is the default already, wanted default=False")


def _title(algorithm: Algorithm) -> str:
    return f"algorithm {algorithm.name!r} of {algorithm.collective}"


def _load_entry_points() -> None:
    """Registers what installed packages bring, once. One that fails is left out, with a warning."""
    while _unloaded:
        for entry in entry_points(group=_unloaded.pop()):
            try:
                register(entry.load())
            except Exception as error:
                warnings.warn(
                    f"the algorithm {entry.name!r} ({entry.value}) is left out: {error!r}",
                    stacklevel=2,
                )
