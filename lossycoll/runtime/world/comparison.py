"""Reachability of ranks that have met in the store, and the error text where it fails.

Pure functions of what ranks have told: the same text on every rank, but for who speaks.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from lossycoll.errors import RendezvousError
from lossycoll.runtime.engine.failures import place_text

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
