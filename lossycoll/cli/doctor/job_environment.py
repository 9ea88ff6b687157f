"""Choices of a job that is started from this environment, made now.

Without an interface or with options that are refused there is no job; those have a line of their
own, and the checks that need them have nothing to say.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

from .checks import Finding, Findings, Severity, effective_options, fail_unless, warn_unless

if TYPE_CHECKING:
    from lossycoll.options.fields import Options
    from lossycoll.runtime.net.interfaces import Interface
    from lossycoll.runtime.net.rdma_ports import Port

ENOUGH_PORTS = 64


def network() -> Findings:
    """Interface as backend/group_steps.py chooses it, with the master from MASTER_ADDR only, and
    whether it has the packets and ports of the options."""
    from lossycoll.errors import InterfaceError
    from lossycoll.runtime.net.interfaces import choose

    options = effective_options()
    if options is None:
        return
    master = os.environ.get("MASTER_ADDR")
    why = f"routes to {master or 'the outside'}" if options.interface == "auto" else "as asked for"
    try:
        interface = choose(options.interface, master)
    except InterfaceError as error:
        found = f"none for {options.interface!r}"
        yield Finding("interface in use", found, Severity.FAIL, str(error))
        return
    yield Finding("interface in use", f"{interface}, {why}")
    if options.mtu:
        found = f"{options.mtu} asked for; {interface.name} has {interface.mtu}"
        advice = (
            "packets would be cut into fragments, and one lost fragment loses the packet: "
            f"set LOSSYCOLL_MTU to {interface.mtu} or less, or unset it"
        )
        yield warn_unless(options.mtu <= interface.mtu, "MTU in use", found, advice)
    if options.ports != (0, 0):
        yield _port_range(options, interface)


def _port_range(options: Options, interface: Interface) -> Finding:
    """Check that the range holds this machine's ranks, and name its gaps."""
    ranks = local_ranks()
    enough = max(ENOUGH_PORTS, 2 * ranks)
    udp = _free(interface, options.ports, socket.SOCK_DGRAM, enough)
    tcp = _free(interface, options.ports, socket.SOCK_STREAM, enough)
    more = " or more" if max(udp, tcp) >= enough else ""
    found = (
        f"{options.port_range} at {interface.address}: {udp} UDP, {tcp} TCP{more} free, for "
        f"{ranks} rank{'s' * (ranks > 1)} on this machine"
    )
    advice = (
        f"widen LOSSYCOLL_PORT_RANGE: each of the {ranks} ranks of this machine takes a UDP and a "
        f"TCP port; run the doctor under torchrun, or with LOCAL_WORLD_SIZE, for it to know how "
        f"many ranks there are"
    )
    return fail_unless(min(udp, tcp) >= ranks, "port range", found, advice)


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


MEMORY_SHARING = "memory sharing"


def memory_sharing() -> Findings:
    from lossycoll.runtime.engine.host import shared_bytes
    from lossycoll.runtime.net.machine import memory_room, this_machine

    try:
        this_machine()
        reason = _hand_over()
    except OSError as error:
        reason = str(error)
    if reason:
        advice = "ranks of this machine use UDP among themselves, which is slower"
        yield Finding(MEMORY_SHARING, f"no: {reason}", Severity.WARN, advice)
        return
    ranks = local_ranks()
    room, wanted = memory_room(), ranks * shared_bytes(ranks)
    advice = (
        f"{ranks} ranks may take {wanted >> 20} MiB of shared memory, and use UDP where they "
        f"can't: raise the memory limit of their control group"
    )
    found = f"yes, among processes of user {os.geteuid()} in this network namespace"
    if room < 1 << 60:
        found += f"; {room / 2**30:.1f} GiB of memory free"
    yield warn_unless(room >= wanted, MEMORY_SHARING, found, advice)


def _hand_over() -> str:
    """Why descriptors can't be handed over; empty if they can."""
    import fcntl

    from lossycoll.runtime.net.descriptor_exchange import (
        F_SEAL_FUTURE_WRITE,
        SEALS,
        DescriptorExchange,
    )

    token = "doctor"
    with contextlib.ExitStack() as undo:
        sender, receiver = (
            undo.enter_context(contextlib.closing(DescriptorExchange(1))) for _ in range(2)
        )
        memory = os.memfd_create("lossycoll-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        asleep, wake = os.pipe()
        for descriptor in (memory, asleep, wake):
            undo.callback(os.close, descriptor)
        os.ftruncate(memory, 4096)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS | F_SEAL_FUTURE_WRITE)
        failed = sender.send(0, token, {1: receiver.name}, (memory, wake))
        receiver.take(token, [0])
        reasons = [*failed.values(), *receiver.refused.values()]
        return "" if 0 in receiver.taken else (reasons or ["nothing came"])[0]


def rdma() -> Findings:
    from lossycoll.options.fields import Options
    from lossycoll.runtime.net.rdma_ports import ports

    have = ports()
    if not have:
        yield Finding("RDMA", "no devices; packets go by UDP")
    for port in have:
        yield _port(port, effective_options() or Options())


def _port(port: Port, options: Options) -> Finding:
    from lossycoll.errors import EngineError
    from lossycoll.runtime.engine.verbs_port import VerbsPort, memory_limit
    from lossycoll.runtime.net.rdma_ports import ACTIVE, usable_gids

    name = f"RDMA {port}"
    if port.state != ACTIVE:
        return Finding(name, f"{port.layer}, {port.state}: it is not used")
    gids = usable_gids(port)
    if not gids:
        advice = "give its interface an IP address, so that it has a GID of RoCE v2"
        return Finding(name, f"{port.layer}, no GID of RoCE v2", Severity.WARN, advice)
    try:
        opened = VerbsPort(port.device, port.number, gids[0].index, library=options.libibverbs)
    except EngineError as error:
        return Finding(name, f"{port.layer}, not usable", Severity.WARN, str(error))
    opened.close()
    found = (
        f"{port.layer}, GID {', '.join(map(str, gids))}; datagrams of {opened.mtu} bytes, "
        f"{opened.queue} may wait (memory that may be locked: {memory_limit()})"
    )
    advice = (
        f"{opened.queue_wanted} datagrams should have room: raise ulimit -l, LimitMEMLOCK= of "
        f"systemd, or --ulimit memlock=-1 of a container"
    )
    return warn_unless(opened.queue == opened.queue_wanted, name, found, advice)
