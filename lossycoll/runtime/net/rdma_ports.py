"""This machine's ports of RDMA, as sysfs shows them, and which one a rank uses."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lossycoll.errors import InterfaceError

from .interfaces import Interface

ROOT: Final = Path("/sys/class/infiniband")
ACTIVE: Final = "ACTIVE"
ETHERNET: Final = "Ethernet"
LAYERS: Final = (ETHERNET, "InfiniBand")
"""Link layers whose devices say where a datagram comes from."""
ROUTABLE: Final = "RoCE v2"
"""Name in sysfs of GIDs whose datagrams are UDP packets; those of RoCE v1 are not routed."""
AUTO_GID: Final = -1


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's table: an address that it is reached by."""

    index: int
    address: ipaddress.IPv6Address  # IPv4's are mapped into IPv6
    kind: str  # as in ``RoCE v2``; ``InfiniBand`` where the link is
    interface: str  # the network interface that it belongs to; empty: none, or unknown

    @property
    def plain(self) -> str:
        """The address as an interface has it."""
        return str(self.address.ipv4_mapped or self.address)

    def __str__(self) -> str:
        return f"{self.index} ({self.plain}, {self.kind})"


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a device."""

    device: str  # as in ``mlx5_0``
    number: int  # from 1 on
    state: str  # ``ACTIVE``, or why it carries nothing, as in ``DOWN``
    layer: str  # ``Ethernet`` or ``InfiniBand``
    gids: tuple[Gid, ...]
    counters: str  # the folder of its own counters; empty if it has none

    def __str__(self) -> str:
        return f"{self.device}:{self.number}"


@dataclass(frozen=True, slots=True)
class ChosenPort:
    """A port, and the address by which others reach it."""

    port: Port
    gid: Gid

    def __str__(self) -> str:
        return f"{self.port}, GID {self.gid}"


def ports(root: Path | None = None) -> list[Port]:
    """All ports of all devices; none where there is no RDMA. ``root``: None: :data:`ROOT`."""
    folder = root or ROOT
    devices = sorted(folder.iterdir()) if folder.is_dir() else []
    return [_port(device, path) for device in devices for path in _numbered(device / "ports")]


def _numbered(folder: Path) -> list[Path]:
    """The entries of a folder that are named by numbers, in their order."""
    found = [path for path in folder.glob("*") if path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name))


def _port(device: Path, folder: Path) -> Port:
    state = _text(folder / "state").rpartition(":")[2].strip()
    layer = _text(folder / "link_layer")
    counters = folder / "hw_counters"
    path = str(counters) if counters.is_dir() else ""
    return Port(device.name, int(folder.name), state, layer, tuple(_gids(folder, layer)), path)


def _gids(folder: Path, layer: str) -> Iterator[Gid]:
    for path in _numbered(folder / "gids"):
        text = _text(path)
        if not text.strip("0:"):  # empty, as most of some hundreds are
            continue
        with contextlib.suppress(ValueError):
            address = ipaddress.IPv6Address(text)
            attributes = folder / "gid_attrs"
            kind = _text(attributes / "types" / path.name) if layer == ETHERNET else layer
            yield Gid(int(path.name), address, kind, _text(attributes / "ndevs" / path.name))


def _text(path: Path) -> str:
    """Text of a file; empty if it can't be read, like those of entries without an address."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def choose_port(
    wanted: str, gid: int, interface: Interface, have: list[Port]
) -> tuple[ChosenPort | None, str]:
    """The port to use beside ``interface``, and ""; or None, and the reason, which is "" on a
    machine without ports. ``wanted``: option ``verbs_device``. ``gid``: option ``verbs_gid``.

    Of an Ethernet's ports only those are taken by themselves that stand for the interface, for
    others may lead elsewhere; of InfiniBand's the first that is active.
    """
    asked = [port for port in have if wanted in (port.device, str(port))] if wanted else have
    if not asked:
        if not wanted:
            return None, ""
        listed = ", ".join(map(str, have)) or "none; is the device's driver loaded?"
        raise InterfaceError(
            f"option verbs_device is {wanted!r}, and this machine has no such port; there are: "
            f"{listed}"
        )
    active = [port for port in asked if port.state == ACTIVE and port.layer in LAYERS]
    if not active:
        states = ", ".join(f"{port} is {port.state} ({port.layer})" for port in asked)
        if not wanted and gid == AUTO_GID:
            return None, f"no port has a link: {states}; see `rdma link` and `ip link`"
        raise InterfaceError(
            f"option {'verbs_device' if wanted else 'verbs_gid'} is {wanted or gid!r}, and no port "
            f"has a link: {states}; see `rdma link` and `ip link`, or leave it out"
        )
    active.sort(key=lambda port: not any(_is_of(one, interface) for one in port.gids))
    if gid != AUTO_GID:
        return _with_gid(active, gid), ""
    found = [
        ChosenPort(port, one)
        for port in active
        for one in usable_gids(port)
        if wanted or port.layer != ETHERNET or _is_of(one, interface)
    ]
    if not found:
        why = (
            f"no GID of {ROUTABLE} with the address of {interface}: {_listed(active)}; give the "
            f"port's interface an IP address, or name a port by LOSSYCOLL_VERBS_DEVICE"
        )
        if wanted:
            raise InterfaceError(f"option verbs_device is {wanted!r}, which has {why}")
        return None, why
    found.sort(key=lambda one: _distance(one, interface))
    return found[0], ""


def _with_gid(active: list[Port], index: int) -> ChosenPort:
    """The first port, those of the interface before others, whose GID of this index can be used."""
    there = [(port, gid) for port in active for gid in port.gids if gid.index == index]
    for port, gid in there:
        if port.layer != ETHERNET or gid.kind == ROUTABLE:
            return ChosenPort(port, gid)
    if there:
        port, gid = there[0]
        good = ", ".join(map(str, usable_gids(port))) or "none"
        raise InterfaceError(
            f"option verbs_gid is {index}, and GID {gid} of {port} isn't of {ROUTABLE}; those that "
            f"are: {good}"
        )
    have = _listed(active)
    raise InterfaceError(f"option verbs_gid is {index}, and there is no such GID: {have}")


def _listed(active: list[Port]) -> str:
    return "; ".join(f"{port} has {', '.join(map(str, port.gids)) or 'none'}" for port in active)


def usable_gids(port: Port) -> list[Gid]:
    """The addresses that datagrams can go to: InfiniBand's first, those of RoCE v2."""
    if port.layer != ETHERNET:
        return list(port.gids[:1])
    return [gid for gid in port.gids if gid.kind == ROUTABLE]


def _is_of(gid: Gid, interface: Interface) -> bool:
    return gid.interface == interface.name and gid.plain == interface.address


def _distance(one: ChosenPort, interface: Interface) -> tuple[bool, bool, bool, str, int]:
    """The interface's own port first, InfiniBand before other Ethernets, IPv4 before IPv6."""
    gid, port = one.gid, one.port
    near, ethernet = _is_of(gid, interface), port.layer == ETHERNET
    return not near, ethernet, gid.address.ipv4_mapped is None, str(port), gid.index
