"""Comparison of a group's ranks: their definitions of it, versions and options.

A group that is made without a round of its ranks finds out in its first operation whether they do:
the digest is part of every signature. What differs they then tell one another by the control plane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lossycoll.errors import RendezvousError
from lossycoll.options.fields import GIVEN
from lossycoll.runtime.core.logfmt import named

from .messages import Defined


def difference(one: Defined, other: Defined) -> str:
    """Difference of two ranks' definitions, in words that are the same whoever asks; "": none.
    Ranks are the group's where its members are undisputed, else torch's global ones."""
    one, other = sorted((one, other), key=lambda each: each.members[each.rank])
    if one.members != other.members:
        return (
            f"the group is of {named(other.members)} on rank {other.members[other.rank]} but of "
            f"{named(one.members)} on rank {one.members[one.rank]} (of the job); make all ranks "
            f"list the same ones, in the same order"
        )
    return differing_option(one.rank, one.options, other.rank, other.options)


def differing_option(
    rank: int, wanted: Mapping[str, Any], other: int, found: Mapping[str, Any]
) -> str:
    """The first option of two ranks that differs, with both values and what to do; "": none. Of
    two equal values one may be set, and the other not."""
    for name, value in wanted.items():
        if name != GIVEN and found.get(name) != value:
            return _differs(name, repr(found.get(name)), other, repr(value), rank)
    set_here, set_there = (str(of.get(GIVEN, "")).split() for of in (wanted, found))
    for name in sorted(set(set_here).symmetric_difference(set_there)):
        value = repr(wanted.get(name))
        here, there = (value if name in names else "not set" for names in (set_here, set_there))
        return _differs(name, there, other, here, rank)
    return ""


def _differs(name: str, found: str, other: int, wanted: str, rank: int) -> str:
    return (
        f"option {name} is {found} on rank {other} but {wanted} on rank {rank}; set "
        f"LOSSYCOLL_{name.upper()} or pg_options alike on all ranks"
    )


def compare_versions(rank: int, versions: Sequence[Sequence[Any] | None]) -> None:
    """Raises RendezvousError, with the same content on every rank, if packets differ in form.
    ``versions``: each rank's of lossycoll and of the wire; None: it is too old to say."""
    named = ["too old to say" if one is None else f"{one[0]} (wire {one[1]})" for one in versions]
    wires = [None if one is None else one[1] for one in versions]
    for other, wire in enumerate(wires):
        if wire != wires[0]:
            raise RendezvousError(
                f"rank {rank}/{len(versions)}: rank {other}'s version of lossycoll is "
                f"{named[other]}, rank 0's is {named[0]}; install the same one on all ranks",
                peer=other,
            )


def compare_options(rank: int, shared: Sequence[Mapping[str, Any]]) -> None:
    """The same if options differ that must agree (``shared``: each rank's Options.shared)."""
    for other, theirs in enumerate(shared):
        if how := differing_option(0, shared[0], other, theirs):
            raise RendezvousError(f"rank {rank}/{len(shared)}: {how}", peer=other)
