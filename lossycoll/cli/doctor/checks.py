"""The doctor's checks: each looks at one thing and yields what it found.

Without an interface or with options that are refused there is no job; those have a line of their
own, and the checks that need them have nothing to say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
import socket
import sys
import time
import timeit
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from lossycoll.errors import EngineError, InterfaceError, OptionError
from lossycoll.options.fields import Options
from lossycoll.options.schema import variable

if TYPE_CHECKING:
    from lossycoll.runtime.net.interfaces import Interface
    from lossycoll.runtime.net.rdma_ports import Port

UDP_SEGMENT = 103  # from <linux/udp.h>; Python's socket module has no names for these
UDP_GRO = 104
WANTED_BUFFER = 4 << 20
SYSTEM_NET: Final = Path("/sys/class/net")
SLOW_CLOCKS = {"hpet", "acpi_pm", "jiffies", "refined-jiffies"}
SLOW_CLOCK_NS = 1000
ENOUGH_PORTS = 64


class Severity(str, Enum):
    OK = "ok"
    WARN = "warn"
    """Slower or less certain than it could be."""
    FAIL = "fail"
    """A job would not work."""


@dataclass(frozen=True)
class Finding:
    """What a check found; ``advice``: what to change, unless all is well."""

    name: str
    found: str
    status: Severity = Severity.OK
    advice: str = ""


Findings: TypeAlias = Iterator[Finding]


def warn_unless(
    good: bool, name: str, found: str, advice: str, otherwise: Severity = Severity.WARN
) -> Finding:
    return Finding(name, found) if good else Finding(name, found, otherwise, advice)


fail_unless: Final = partial(warn_unless, otherwise=Severity.FAIL)


def system() -> Findings:
    release = f"{platform.system()} {platform.release()} ({platform.machine()})"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield fail_unless(sys.platform == "linux", "kernel", release, "lossycoll runs on Linux only")
    advice = "the engine's thread and the training share one core; give the process two"
    yield warn_unless((cores or 1) > 1, "cores", str(cores), advice)


def versions() -> Findings:
    """Versions of Python and torch: a process group's methods change with torch's releases."""
    import torch

    python = metadata.metadata("lossycoll")["Requires-Python"] or ""
    for name, version, admitted, advice in (
        ("Python", platform.python_version(), python, "use a Python {}"),
        ("torch", torch.__version__, torch_versions(), 'pip install "torch{}"'),
    ):
        try:
            yield fail_unless(admits(admitted, version), name, version, advice.format(admitted))
        except ValueError as error:
            said = f"see for yourself whether it is in {admitted}: {error}"
            yield Finding(name, version, Severity.WARN, said)


def torch_versions() -> str:
    """The versions of torch that the package may be installed with, as in ``>=2.13,<2.16``."""
    for line in metadata.requires("lossycoll") or ():
        if found := re.fullmatch(r"torch\b\s*\(?([^;()]*)\)?\s*(;.*)?", line):
            return found[1].strip()
    raise LookupError("lossycoll's metadata requires no torch; install the package again")


def admits(wanted: str, version: str) -> bool:
    """True if ``version`` (2.13.0+cpu, say) is in a range of this package, as in ``>=2.13,<2.15``.

    A pre-release (2.13.0rc1) comes before its release, and isn't in ``<2.13`` either, as in PEP
    440. Raises ValueError for what can't be read.
    """
    from torch._vendor.packaging.version import Version  # packaging's, which torch brings along

    found = Version(version)
    for clause in filter(None, map(str.strip, wanted.split(","))):
        if clause.startswith(">="):
            is_in = found >= Version(clause[2:])
        else:
            is_in = Version(found.base_version) < Version(clause.removeprefix("<"))
        if not is_in:
            return False
    return True


def engine() -> Findings:
    try:
        from lossycoll.runtime.engine.host import probe, version
    except ImportError as error:
        advice = "install lossycoll again with a C compiler present: pip install --force-reinstall"
        yield Finding("native engine", f"does not load: {error}", Severity.FAIL, advice)
    else:
        offered = ", ".join(probe()) or "no fast path"
        yield Finding("native engine", f"{version()}; offers {offered}")


def entry_point() -> Findings:
    import torch.distributed as dist

    points = list(metadata.entry_points(group="torch.backends", name="lossycoll"))
    if not points:
        advice = "install the package, do not only put it on PYTHONPATH: pip install lossycoll"
        yield Finding("entry point", "none in group torch.backends", Severity.FAIL, advice)
        return
    advice = "torch did not load the entry point"
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        advice = "unset TORCH_DEVICE_BACKEND_AUTOLOAD, or import lossycoll after torch"
    known = dist.is_available() and dist.is_backend_available("lossy")
    found = f"{points[0].value}; backend lossy is {'known' if known else 'unknown'} to torch"
    yield fail_unless(known, "entry point", found, advice)


def effective_options() -> Options | None:
    """Options of a job that is started from here; None where they are refused."""
    try:
        return Options.from_env()
    except OptionError:
        return None


def options() -> Findings:
    """LOSSYCOLL_* variables are read when a group is made; better to hear of a slip now."""
    # Others may be the secret, or a slip for it, and what is printed here is shown to others.
    shown = {variable(entry.name) for entry in dataclasses.fields(Options)}
    names = sorted(name for name in os.environ if name.startswith("LOSSYCOLL_"))
    found = " ".join(f"{n}={os.environ[n]}" if n in shown else f"{n} (set)" for n in names)
    try:
        injects = bool(Options.from_env().inject)
    except OptionError as error:
        yield Finding("variables", found, Severity.FAIL, str(error))
    else:
        advice = "LOSSYCOLL_INJECT drops packets on purpose: unset it to train for real"
        yield warn_unless(not injects, "variables", found or "none set", advice)


def clock() -> Findings:
    path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    source = path.read_text().strip() if path.exists() else "unknown"
    cost = 1e9 * timeit.timeit(time.monotonic_ns, number=10_000) / 10_000
    advice = f"reading {source} enters the kernel; boot with clocksource=tsc where it is stable"
    good = source not in SLOW_CLOCKS and cost < SLOW_CLOCK_NS
    yield warn_unless(good, "clock", f"{source}, {cost:.0f} ns per read", advice)


def socket_buffers() -> Findings:
    for name, option, limit in (
        ("receive buffer", socket.SO_RCVBUF, "rmem_max"),
        ("send buffer", socket.SO_SNDBUF, "wmem_max"),
    ):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            before = udp.getsockopt(socket.SOL_SOCKET, option)
            udp.setsockopt(socket.SOL_SOCKET, option, WANTED_BUFFER)
            # Linux reports double what it grants, for its own bookkeeping.
            got = udp.getsockopt(socket.SOL_SOCKET, option) // 2
        found = f"asked {WANTED_BUFFER >> 10} KiB, got {got >> 10} KiB (default {before >> 11} KiB)"
        advice = f"as root: sysctl -w net.core.{limit}={WANTED_BUFFER} (and in /etc/sysctl.d)"
        yield warn_unless(got >= WANTED_BUFFER, name, found, advice)


def offloads() -> Findings:
    for name, option, value, since in (
        ("UDP GSO (send)", UDP_SEGMENT, 1448, "4.18"),
        ("UDP GRO (receive)", UDP_GRO, 1, "5.0"),
    ):
        found = "yes"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            try:
                udp.setsockopt(socket.IPPROTO_UDP, option, value)
            except OSError as error:
                found = f"no: {error.strerror}"
        advice = f"needs Linux {since} or newer; without it each packet is a trip to the kernel"
        yield warn_unless(found == "yes", name, found, advice)


def interfaces() -> Findings:
    from lossycoll.runtime.net.interfaces import mtu_of

    found = False
    for _, name in socket.if_nameindex():
        with contextlib.suppress(InterfaceError):  # gone since it was listed
            size = mtu_of(name)
            said = f"MTU {size}"
            # A container may have no /sys, or that of another network.
            with contextlib.suppress(OSError):
                said += f", {(SYSTEM_NET / name / 'operstate').read_text().strip()}"
            advice = f"small packets cost time: ip link set dev {name} mtu 1500"
            yield warn_unless(size >= 1280, f"interface {name}", said, advice)
            found = True
    if not found:
        yield Finding("interfaces", "none", Severity.FAIL, "bring one up: ip link set lo up")


def host_name() -> Findings:
    name = socket.gethostname()
    try:
        found, good = f"{name} is {socket.gethostbyname(name)}", True
    except OSError:
        found, good = f"{name} does not resolve", False
    advice = "gloo looks it up: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME"
    yield warn_unless(good, "host name", found, advice)


# ---- choices of a job that is started from this environment, made now ----


def network() -> Findings:
    """Interface as backend/group_steps.py chooses it, with the master from MASTER_ADDR only, and
    whether it has the packets and ports of the options."""
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


def memory_sharing() -> Findings:
    from lossycoll.runtime.engine.host import shared_bytes
    from lossycoll.runtime.net.machine import memory_room, this_machine

    try:
        this_machine()
        reason = _hand_over()
    except OSError as error:
        reason = str(error)
    name = "memory sharing"
    if reason:
        advice = "ranks of this machine use UDP among themselves, which is slower"
        yield Finding(name, f"no: {reason}", Severity.WARN, advice)
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
    yield warn_unless(room >= wanted, name, found, advice)


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
    from lossycoll.runtime.net.rdma_ports import ports

    have = ports()
    if not have:
        yield Finding("RDMA", "no devices; packets go by UDP")
    for port in have:
        yield _port(port, effective_options() or Options())


def _port(port: Port, options: Options) -> Finding:
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
