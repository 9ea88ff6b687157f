"""Choices of a job that is started from this environment, made now.

Without an interface or with options that are refused there is no job; those have a line of
their own, and the checks that need them have nothing to say.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

from .checks import Finding, Severity, good_if

if TYPE_CHECKING:
    from lossycoll.options.fields import Options
    from lossycoll.runtime.net.descriptor_exchange import DescriptorExchange
    from lossycoll.runtime.net.interfaces import Interface
    from lossycoll.runtime.net.rdma_ports import Port

ENOUGH_PORTS = 64


def chosen_interface() -> list[Finding]:
    """Interface as backend/group_steps.py chooses it, with the master from MASTER_ADDR only."""
    from lossycoll.errors import InterfaceError
    from lossycoll.runtime.net.interfaces import choose

    options = _options()
    if options is None:
        return []
    master = os.environ.get("MASTER_ADDR")
    why = f"routes to {master or 'the outside'}" if options.interface == "auto" else "as asked for"
    try:
        interface = choose(options.interface, master)
    except InterfaceError as error:
        found = f"none for {options.interface!r}"
        return [Finding("interface in use", Severity.FAIL, found, str(error))]
    return [Finding("interface in use", Severity.OK, f"{interface}, {why}")]


def mtu() -> list[Finding]:
    options, interface = _options(), _interface()
    if options is None or interface is None or options.mtu == 0:
        return []
    found = f"{options.mtu} asked for; {interface.name} has {interface.mtu}"
    advice = (
        "packets would be cut into fragments, and one lost fragment loses the packet: "
        f"set LOSSYCOLL_MTU to {interface.mtu} or less, or unset it"
    )
    return [good_if(options.mtu <= interface.mtu, "MTU in use", found, Severity.WARN, advice)]


def port_range() -> list[Finding]:
    """Check that the range holds this machine's ranks, and name its gaps."""
    options, interface = _options(), _interface()
    if options is None or interface is None or options.ports == (0, 0):
        return []
    ranks = local_ranks()
    enough = max(ENOUGH_PORTS, 2 * ranks)
    udp = _free(interface, options.ports, socket.SOCK_DGRAM, enough)
    tcp = _free(interface, options.ports, socket.SOCK_STREAM, enough)
    more = " or more" if max(udp, tcp) >= enough else ""
    found = (
        f"{options.port_range} at {interface.address}: {udp} UDP, {tcp} TCP{more} free, for "
        f"{_counted(ranks, 'rank')} on this machine"
    )
    advice = (
        f"widen LOSSYCOLL_PORT_RANGE: each of the {ranks} ranks of this machine takes a UDP and a "
        f"TCP port; run the doctor under torchrun, or with LOCAL_WORLD_SIZE, for it to know how "
        f"many ranks there are"
    )
    return [good_if(min(udp, tcp) >= ranks, "port range", found, Severity.FAIL, advice)]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _options() -> Options | None:
    from lossycoll.errors import OptionError
    from lossycoll.options.fields import Options

    try:
        return Options.from_env()
    except OptionError:
        return None


def _interface() -> Interface | None:
    from lossycoll.errors import InterfaceError
    from lossycoll.runtime.net.interfaces import choose

    options = _options()
    try:
        return choose(options.interface, os.environ.get("MASTER_ADDR")) if options else None
    except InterfaceError:
        return None


def local_ranks() -> int:
    """Number of ranks that torchrun starts here; a doctor that it didn't start knows of one."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


def _free(
    interface: Interface, ports: tuple[int, int], kind: socket.SocketKind, enough: int
) -> int:
    """Number of ports that can be bound; counting ends when there are enough."""
    family = socket.AF_INET6 if interface.version == 6 else socket.AF_INET
    free = 0
    for port in range(ports[0], ports[1] + 1):
        with socket.socket(family, kind) as probe:
            if kind is socket.SOCK_STREAM:
                # As the control plane does: connections of a job that is over don't hold a port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((interface.address, port))
            except OSError:
                continue
        free += 1
        if free == enough:
            break
    return free


TOKEN = "doctor"
NAME = "memory sharing"


def memory_sharing() -> list[Finding]:
    from lossycoll.runtime.engine.host import shared_bytes
    from lossycoll.runtime.net.machine import memory_room, this_machine

    advice = "ranks of this machine use UDP among themselves, which is slower"
    try:
        this_machine()
        reason = _attempt()
    except OSError as error:
        reason = str(error)
    if reason:
        return [Finding(NAME, Severity.WARN, f"no: {reason}", advice)]
    ranks = local_ranks()
    room, wanted = memory_room(), ranks * shared_bytes(ranks)
    advice = (
        f"{ranks} ranks may take {wanted >> 20} MiB of shared memory, and use UDP where they "
        f"can't: raise the memory limit of their control group"
    )
    found = f"yes, among processes of user {os.geteuid()} in this network namespace"
    if room < 1 << 60:
        found += f"; {room / 2**30:.1f} GiB of memory free"
    return [good_if(room >= wanted, NAME, found, Severity.WARN, advice)]


def _attempt() -> str:
    """Why descriptors can't be handed over; empty if they can."""
    from lossycoll.runtime.net.descriptor_exchange import DescriptorExchange

    with contextlib.ExitStack() as undo:
        ends = [DescriptorExchange(1) for _ in range(2)]
        for end in ends:
            undo.callback(end.close)
        asleep, wake = os.pipe()
        undo.callback(os.close, asleep)
        undo.callback(os.close, wake)
        memory = _sealed_memory()
        undo.callback(os.close, memory)
        return _hand_over(ends[0], ends[1], (memory, wake))


def _hand_over(
    sender: DescriptorExchange, receiver: DescriptorExchange, descriptors: tuple[int, int]
) -> str:
    failed = sender.send(0, TOKEN, {1: receiver.name}, descriptors)
    receiver.take(TOKEN, [0])
    reasons = [*failed.values(), *receiver.refused.values()]
    return "" if 0 in receiver.taken else (reasons or ["nothing came"])[0]


def _sealed_memory() -> int:
    import fcntl

    from lossycoll.runtime.net.descriptor_exchange import F_SEAL_FUTURE_WRITE, SEALS

    memory = os.memfd_create("lossycoll-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 4096)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS | F_SEAL_FUTURE_WRITE)
    return memory


def rdma() -> list[Finding]:
    from lossycoll.errors import OptionError
    from lossycoll.options.fields import Options
    from lossycoll.runtime.net.rdma_ports import ports

    have = ports()
    if not have:
        return [Finding("RDMA", Severity.OK, "no devices; packets go by UDP")]
    try:
        options = Options.from_env()
    except OptionError:
        options = Options()  # the variables have their own line
    return [_port(port, options) for port in have]


def _port(port: Port, options: Options) -> Finding:
    from lossycoll.errors import EngineError
    from lossycoll.runtime.engine.verbs_port import VerbsPort, memory_limit
    from lossycoll.runtime.net.rdma_ports import ACTIVE, usable_gids

    name = f"RDMA {port}"
    if port.state != ACTIVE:
        return Finding(name, Severity.OK, f"{port.layer}, {port.state}: it is not used")
    gids = usable_gids(port)
    if not gids:
        advice = "give its interface an IP address, so that it has a GID of RoCE v2"
        return Finding(name, Severity.WARN, f"{port.layer}, no GID of RoCE v2", advice)
    try:
        opened = VerbsPort(port.device, port.number, gids[0].index, library=options.libibverbs)
    except EngineError as error:
        return Finding(name, Severity.WARN, f"{port.layer}, not usable", str(error))
    opened.close()
    found = (
        f"{port.layer}, GID {', '.join(map(str, gids))}; datagrams of {opened.mtu} bytes, "
        f"{opened.queue} may wait (memory that may be locked: {memory_limit()})"
    )
    advice = (
        f"{opened.queue_wanted} datagrams should have room: raise ulimit -l, LimitMEMLOCK= of "
        f"systemd, or --ulimit memlock=-1 of a container"
    )
    return good_if(opened.queue == opened.queue_wanted, name, found, Severity.WARN, advice)
