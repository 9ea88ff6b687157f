"""Comparison of ranks (definitions, versions, options, addresses), and their reachability.

Pure functions of what ranks have told: the same text on every rank, but for who speaks. A group
that is made without a round of its ranks finds out in its first operation whether their definitions
differ: the digest is part of every signature. What differs they then tell by the control plane.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lossycoll.errors import RendezvousError
from lossycoll.options.fields import GIVEN
from lossycoll.runtime.core.logfmt import named
from lossycoll.runtime.engine.failures import place_text

from .messages import Defined
from .polled_store import is_form

NO_ANSWER: Final = "no answer"
WITHIN_A_HOST: Final = re.compile(r"docker|br-|virbr|cni|lxc|podman|flannel|veth|lo$")
"""Names of interfaces whose addresses other hosts don't reach."""
LONGEST_TOLD: Final = 200


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a control connection that isn't there: a rank, and where its control port is."""

    rank: int
    address: str
    port: int
    device: str = ""  # the address's interface, where it is known
    trouble: str = ""  # what became of its attempts to reach the other end, where it is known

    def to(self, other: Side) -> str:
        here, there = (f" ({side.device})" if side.device else "" for side in (self, other))
        return (
            f"rank {self.rank} at {self.address}{here} can't reach rank {other.rank}'s control "
            f"port, TCP {place_text(other.address, other.port)}{there}: {self.trouble or NO_ANSWER}"
        )


def unreached(who: str, far: Side, near: Side, ports: str) -> RendezvousError:
    """The error for ranks that have met in the store and can't connect: ``far`` has no connection
    with the coordinator. ``who``: the rank that speaks, as errors name it."""
    back = f"; {near.to(far)}" if near.trouble else ""
    used = "unset (any port), so set it, as in 42000-42099" if ports == "0" else ports
    return RendezvousError(
        f"{who}: {far.to(near)}{back}. Both have met at the master, whose port isn't enough: let "
        f"TCP (control) and UDP (data) pass between the hosts on the ports of "
        f"LOSSYCOLL_PORT_RANGE, which is {used}."
        f"{_odd(far, near)} 'lossycoll doctor --peer {near.address}' on both hosts tries each port",
        peer=near.rank if who.startswith(f"rank {far.rank}/") else far.rank,
    )


def _odd(far: Side, near: Side) -> str:
    """Faults of the addresses themselves."""
    for side in (near, far):
        if WITHIN_A_HOST.match(side.device):
            return (
                f" Or {side.address} is of {side.device}, which is within rank {side.rank}'s host: "
                f"set LOSSYCOLL_INTERFACE there to the interface that the other hosts reach."
            )
    inner_only = ipaddress.ip_address(near.address).is_private
    because = " (a NAT, or a container's own network)" if inner_only else ""
    return (
        f" Or {near.address} isn't an address by which rank {far.rank} reaches that host{because}: "
        f"set LOSSYCOLL_INTERFACE on each host."
    )


def translated(who: str, far: Side, source: str, near: Side) -> RendezvousError:
    """The error for a rank whose connection comes from ``source``, and who can't be reached."""
    return RendezvousError(
        f"{who}: {near.to(far)}, though that rank reaches rank {near.rank}, from {source}: a NAT "
        f"translates its address, so neither TCP (control) nor UDP (data) gets to it. Join the "
        f"hosts by a VPN and set LOSSYCOLL_INTERFACE to its interface, or let containers use their "
        f"host's network; 'lossycoll doctor --peer {near.address}' on both hosts checks it",
        peer=far.rank,
    )


def common_version(who: str, offered: Sequence[Sequence[str]]) -> int:
    """The family (4 or 6) in which all ranks have an address; rank 0's first choice goes first.
    ``offered``: the addresses of each rank, the preferred one first. One that has loopback alone
    follows the others, if these have more. RendezvousError: there is none."""
    versions = [[ipaddress.ip_address(one).version for one in each] for each in offered]
    outer = [
        rank
        for rank, each in enumerate(offered)
        if not all(ipaddress.ip_address(one).is_loopback for one in each)
    ] or range(len(offered))
    for version in versions[outer[0]]:
        if all(version in versions[rank] for rank in outer):
            return version
    first = outer[0]
    other = next(rank for rank in outer if versions[first][0] not in versions[rank])
    raise RendezvousError(
        f"{who}: the ranks have addresses of different families: rank {first} has "
        f"{_families(offered[first])}, rank {other} {_families(offered[other])}; give all hosts "
        f"IPv4 or all IPv6, or set LOSSYCOLL_INTERFACE on each to an address of one family",
        peer=other,
    )


def _families(addresses: Sequence[str]) -> str:
    return " and ".join(f"IPv{ipaddress.ip_address(one).version} ({one})" for one in addresses)


def compare_machines(
    who: str,
    addresses: Sequence[str],
    machines: Sequence[tuple[str, int] | None],
    devices: Sequence[str],
) -> None:
    """Raises RendezvousError where two machines give one address. ``machines``: the machine and
    network namespace of each rank; None: unknown. ``devices``: the interface of its address."""
    if not all(ipaddress.ip_address(one).is_loopback for one in addresses):
        addresses = ["" if ipaddress.ip_address(a).is_loopback else a for a in addresses]
    seen: dict[str, int] = {}
    for rank, (address, machine) in enumerate(zip(addresses, machines, strict=True)):
        if not address or machine is None:
            continue
        first = seen.setdefault(address, rank)
        if machines[first] != machine:
            raise RendezvousError(
                f"{who}: rank {first} and rank {rank} are on two machines (or in two containers) "
                f"that give one address: {address} ({devices[first] or 'unknown interface'} and "
                f"{devices[rank] or 'unknown interface'}); set LOSSYCOLL_INTERFACE on both to the "
                f"interface by which they reach each other",
                peer=rank,
            )


def said_trouble(told: Any) -> str:
    """The trouble that a rank has told of, as far as it is a text."""
    is_one = is_form(told, trouble=str) and told["trouble"].isprintable()
    return str(told["trouble"][:LONGEST_TOLD]) if is_one else ""


def heartbeat_of(told: Any) -> int:
    """The heartbeat that a rank has told; 0: none."""
    return int(told["heartbeat"]) if is_form(told, heartbeat=int) else 0


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
    said = ["too old to say" if one is None else f"{one[0]} (wire {one[1]})" for one in versions]
    wires = [None if one is None else one[1] for one in versions]
    for other, wire in enumerate(wires):
        if wire != wires[0]:
            raise RendezvousError(
                f"rank {rank}/{len(versions)}: rank {other}'s version of lossycoll is "
                f"{said[other]}, rank 0's is {said[0]}; install the same one on all ranks",
                peer=other,
            )


def compare_options(rank: int, shared: Sequence[Mapping[str, Any]]) -> None:
    """The same if options differ that must agree (``shared``: each rank's Options.shared)."""
    for other, theirs in enumerate(shared):
        if how := differing_option(0, shared[0], other, theirs):
            raise RendezvousError(f"rank {rank}/{len(shared)}: {how}", peer=other)
