"""Definition of a group at one rank, as far as all of its ranks must agree.

A group that is made without a round of its ranks finds out in its first operation whether they do:
the digest is part of every signature. What differs they then tell one another by the control plane.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from lossycoll.errors import RendezvousError


@dataclass(frozen=True)
class Definition:
    """A group as one rank defines it.

    Attributes:
        rank: Who says so, of the group.
        members: torch's global rank of each rank of the group.
        options: Those that all ranks must agree on.
        digest: 64 bits, equal on ranks whose members and options are.
    """

    rank: int
    members: tuple[int, ...]
    options: Mapping[str, Any]
    digest: int = field(init=False)

    def __post_init__(self) -> None:
        text = json.dumps([self.members, sorted(self.options.items())])
        digest = blake2b(text.encode(), digest_size=8).digest()
        object.__setattr__(self, "digest", int.from_bytes(digest, "little"))


def difference(one: Definition, other: Definition) -> str:
    """Difference of two ranks' definitions, in words that are the same whoever asks; "": none.

    Ranks are the group's where its members are undisputed, else torch's global ones.
    """
    one, other = sorted((one, other), key=lambda each: each.members[each.rank])
    if one.members != other.members:
        return (
            f"the group is of {_listed(other.members)} on rank {other.members[other.rank]} but of "
            f"{_listed(one.members)} on rank {one.members[one.rank]} (of the job); make all ranks "
            f"list the same ones, in the same order"
        )
    return differing_option(one.rank, one.options, other.rank, other.options)


def differing_option(
    rank: int, wanted: Mapping[str, Any], other: int, found: Mapping[str, Any]
) -> str:
    """The first option of two ranks that differs, with both values and what to do; "": none."""
    for name, value in wanted.items():
        if found.get(name) != value:
            return (
                f"option {name} is {found.get(name)!r} on rank {other} but {value!r} on rank "
                f"{rank}; set LOSSYCOLL_{name.upper()} or pg_options alike on all ranks"
            )
    return ""


def _listed(ranks: Sequence[int]) -> str:
    some = ", ".join(str(rank) for rank in ranks[:8])
    return f"ranks {some}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def compare_versions(rank: int, versions: Sequence[Sequence[Any] | None]) -> None:
    """Raises RendezvousError, with the same content on every rank, if packets differ in form.

    ``versions`` holds each rank's (version of lossycoll, of the wire); None: a rank is too old to
    say.
    """
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
    """Raises RendezvousError, with the same content on every rank, if options differ.

    ``shared`` holds each rank's options that must agree (:meth:`Options.shared`).
    """
    for other, theirs in enumerate(shared):
        if how := differing_option(0, shared[0], other, theirs):
            raise RendezvousError(f"rank {rank}/{len(shared)}: {how}", peer=other)
