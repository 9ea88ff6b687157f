"""This machine's network interfaces, and which one leads to a host."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from lossycoll.errors import InterfaceError

SIOCGIFCONF: Final = 0x8912
SIOCGIFFLAGS: Final = 0x8913
SIOCGIFMTU: Final = 0x8921
MTU_OF_ROUTE: Final = {
    socket.AF_INET: (socket.IPPROTO_IP, 14),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 24),
}
"""IP_MTU and IPV6_MTU: the options of a connected socket, which the module socket doesn't name."""
NO_LIMIT: Final = 2**31 - 1
"""MTU of a route that isn't told: the interface's is smaller, and counts."""
IFREQ: Final = struct.Struct("16s16s8x")
"""struct ifreq on 64-bit Linux; for SIOCGIFCONF its union holds a sockaddr_in."""
MAX_ADDRESSES: Final = 1024
IPV6_ADDRESSES: Final = Path("/proc/net/if_inet6")
IFF_UP, IFF_RUNNING = 0x1, 0x40


@dataclass(frozen=True, slots=True)
class Interface:
    """One numeric address of this machine, the interface it belongs to, and its MTU; the route's
    where that was asked for and is smaller: the address may be one of ``lo`` (routed fabrics)."""

    name: str
    address: str
    mtu: int

    @property
    def version(self) -> int:
        return 6 if ":" in self.address else 4

    @property
    def loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def mtu_of(name: str) -> int:
    """MTU of the interface ``name`` in bytes; InterfaceError when there is none of that name."""
    try:
        return _asked(name, SIOCGIFMTU, "i")
    except OSError as error:
        raise InterfaceError(f"interface {name}: no MTU ({error.strerror})") from error


def _asked(name: str, question: int, answer: str) -> int:
    """What the kernel says of an interface. OSError: there is none of that name."""
    request = bytearray(IFREQ.pack(os.fsencode(name), b""))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, question, request)
    return int(struct.unpack_from(answer, request, 16)[0])


def interfaces() -> list[Interface]:
    """All addresses of all interfaces that are up, IPv4 first; link-local IPv6 is left out."""
    found: list[Interface] = []
    for name, address in [*_ipv4(), *_ipv6()]:
        with contextlib.suppress(OSError, InterfaceError):  # gone since it was listed
            # The kernel lists the addresses of those that are down as well.
            if _asked(name, SIOCGIFFLAGS, "H") & IFF_UP:
                found.append(Interface(name, address, mtu_of(name)))
    return found


def _ipv4() -> Iterator[tuple[str, str]]:
    room = array.array("B", bytes(IFREQ.size * MAX_ADDRESSES))
    address, length = room.buffer_info()
    request = bytearray(struct.pack("iP", length, address))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, SIOCGIFCONF, request)
    used = struct.unpack_from("i", request)[0]
    for name, sockaddr in IFREQ.iter_unpack(room.tobytes()[:used]):
        # An address beside an interface's first may be listed under an alias such as eth0:1.
        plain = name.rstrip(b"\0").partition(b":")[0]
        yield os.fsdecode(plain), socket.inet_ntoa(sockaddr[4:8])


def _ipv6() -> Iterator[tuple[str, str]]:
    try:
        lines = IPV6_ADDRESSES.read_bytes().splitlines()
    except OSError:  # a kernel without IPv6
        return
    for line in lines:
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits.decode()))
        if not address.is_link_local:
            yield os.fsdecode(name), str(address)


def choose(wanted: str, master: str | None) -> Interface:
    """The interface to use: the first of :func:`candidates`."""
    return candidates(wanted, master)[0]


def candidates(wanted: str, master: str | None) -> list[Interface]:
    """The interfaces that can be used, at most one of IPv4 and one of IPv6; the first is preferred.

    ``wanted``: an interface's name, a local address, or ``"auto"`` for the one that routes to
    ``master`` (None: any that routes outward, else loopback). A name stands for the interface's
    address of the family by which the master is reached. InterfaceError lists the interfaces.
    """
    have = interfaces()
    if wanted != "auto":
        address = wanted
        with contextlib.suppress(ValueError):
            address = str(ipaddress.ip_address(wanted))  # in its usual spelling
        found = [one for one in have if wanted == one.name or address == one.address]
        if not found:
            raise InterfaceError(
                f"option interface is {wanted!r}, which is neither an interface that is up nor an "
                f"address of this machine; there are: {_listed(have)}"
            )
        versions = [Interface("", local, 0).version for local in _routes(master)] if master else []
        usable = sorted(found, key=lambda one: [*versions, one.version].index(one.version))
        return [
            replace(one, mtu=min([one.mtu, *routes.values()]))
            for one in _one_of_each(usable)
            for routes in [_routes(master, one.address) if master else {}]
        ]
    # 192.0.2.1 is set aside for documentation (RFC 5737): it has the default route, and a UDP
    # connect sends nothing.
    sources = _routes(master or "192.0.2.1")
    if not sources and master is None:
        sources = {"127.0.0.1": mtu_of("lo")}
    if not sources:
        why = (
            f"{master!r} is no host that this one knows; check the name (MASTER_ADDR of a job) and "
            f"the DNS"
            if _resolved(str(master)) is None
            else f"no route to {master!r}; check the address (MASTER_ADDR of a job) and the "
            f"routing table"
        )
        raise InterfaceError(f"{why}, or set LOSSYCOLL_INTERFACE to one of: {_listed(have)}")
    by_address = {one.address: one for one in reversed(have)}
    for local in sources:
        if local not in by_address and Interface("", local, 0).loopback:
            by_address[local] = Interface("lo", local, mtu_of("lo"))
    usable = [
        replace(by_address[local], mtu=min(by_address[local].mtu, mtu))
        for local, mtu in sources.items()
        if local in by_address
    ]
    if not usable:
        raise InterfaceError(
            f"the address {next(iter(sources))}, which routes to the master {master!r}, belongs to "
            f"no interface that is up; set LOSSYCOLL_INTERFACE to one of: {_listed(have)}"
        )
    return _one_of_each(usable)


def _one_of_each(found: list[Interface]) -> list[Interface]:
    """The first of each family."""
    first: dict[int, Interface] = {}
    for one in found:
        first.setdefault(one.version, one)
    return list(first.values())


def _resolved(host: str) -> list[Any] | None:
    """The addresses of a name, as ``getaddrinfo`` gives them; None for a name of nobody."""
    try:
        # A str would load the codec for other names, which takes longer than all else here.
        name = host.encode() if host.isascii() else host
        return socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None


def _routes(host: str, source: str | None = None) -> dict[str, int]:
    """The MTU of each route to ``host``, by the local address from which packets would go.
    ``source``: the address from which they have to go. Empty without a route."""
    found: dict[str, int] = {}
    for family, kind, protocol, _, address in _resolved(host) or ():
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            if source is not None:
                probe.bind((source, 0))
            probe.connect(address)
            local = str(probe.getsockname()[0]).partition("%")[0]
            mtu = NO_LIMIT
            with contextlib.suppress(OSError):  # emulators of Linux (qemu-user) don't know it
                mtu = probe.getsockopt(*MTU_OF_ROUTE[family])
            found.setdefault(local, mtu)
    return found


def why_cut_off(device: str, own: str, far: str) -> str:
    """Why this host can't send from its address ``own``, which was the interface ``device``'s, to
    the address ``far``, with a remedy; "" where it can. Nothing is sent to find out."""
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            flags = _asked(device, SIOCGIFFLAGS, "H")
        except OSError:
            return f"this host no longer has the interface {device}; bring it back (`ip link`)"
        if not flags & IFF_UP:
            return f"the interface {device} ({own}) of this host is down: `ip link set {device} up`"
        try:
            probe.bind((own, 0))
        except OSError as error:
            return (
                f"this host no longer has the address {own} of the interface {device} "
                f"({error.strerror}): give it back by `ip address add`, and look for who took it "
                f"(DHCP, a network manager)"
            )
        if not flags & IFF_RUNNING:
            return (
                f"the interface {device} ({own}) of this host has no carrier: check its cable or "
                f"its other end (`ip link show {device}`)"
            )
        try:
            probe.connect((far, 9))
        except OSError as error:
            return (
                f"this host has no route from {own} ({device}) to {far} ({error.strerror}): see "
                f"`ip route get {far} from {own}`"
            )
    return ""


def _listed(have: list[Interface]) -> str:
    return ", ".join(str(one) for one in have) or "none"
