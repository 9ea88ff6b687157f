"""The doctor's checks: each looks at one thing and returns what it found."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from .findings import Finding, Severity, good_if
from .job_environment import chosen_interface, memory_sharing, mtu, port_range, rdma
from .loopback import engine_in_shared_memory, engine_loopback, sealing, udp_loopback
from .requirements import Admitted, python_versions, torch_versions

UDP_SEGMENT = 103  # from <linux/udp.h>; Python's socket module has no names for these
UDP_GRO = 104
WANTED_BUFFER = 4 << 20
SLOW_CLOCKS = {"hpet", "acpi_pm", "jiffies", "refined-jiffies"}
SLOW_CLOCK_NS = 1000


def system() -> list[Finding]:
    release = f"{platform.system()} {platform.release()} ({platform.machine()})"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        good_if(
            sys.platform == "linux",
            "kernel",
            release,
            Severity.FAIL,
            "lossycoll runs on Linux only",
        ),
        good_if(
            (cores or 1) > 1,
            "cores",
            str(cores),
            Severity.WARN,
            "the engine's thread and the training share one core; give the process two",
        ),
    ]


def versions() -> list[Finding]:
    """Versions of Python and torch: a process group's methods change with torch's releases."""
    import torch

    python, wanted = python_versions(), torch_versions()
    return [
        _version("Python", platform.python_version(), python, f"use a Python {python.text}"),
        _version("torch", torch.__version__, wanted, f'pip install "torch{wanted.text}"'),
    ]


def _version(name: str, version: str, admitted: Admitted, advice: str) -> Finding:
    try:
        return good_if(admitted.admits(version), name, version, Severity.FAIL, advice)
    except ValueError as error:
        unread = f"see for yourself whether it is in {admitted.text}: {error}"
        return Finding(name, Severity.WARN, version, unread)


def engine() -> list[Finding]:
    try:
        from lossycoll.runtime.engine.host import probe, version
    except ImportError as error:
        advice = "install lossycoll again with a C compiler present: pip install --force-reinstall"
        return [Finding("native engine", Severity.FAIL, f"does not load: {error}", advice)]
    offered = ", ".join(probe()) or "no fast path"
    return [Finding("native engine", Severity.OK, f"{version()}; offers {offered}")]


def entry_point() -> list[Finding]:
    import torch.distributed as dist

    installed = [
        point.value for point in metadata.entry_points(group="torch.backends", name="lossycoll")
    ]
    if not installed:
        advice = "install the package, do not only put it on PYTHONPATH: pip install lossycoll"
        return [Finding("entry point", Severity.FAIL, "none in group torch.backends", advice)]
    advice = "torch did not load the entry point"
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        advice = "unset TORCH_DEVICE_BACKEND_AUTOLOAD, or import lossycoll in the script"
    known = dist.is_available() and dist.is_backend_available("lossy")
    found = f"{installed[0]}; backend lossy is {'known' if known else 'unknown'} to torch"
    return [good_if(known, "entry point", found, Severity.FAIL, advice)]


def options() -> list[Finding]:
    """LOSSYCOLL_* variables are read when a group is made; better to hear of a slip now."""
    from lossycoll.errors import OptionError
    from lossycoll.options.fields import Options

    names = sorted(name for name in os.environ if name.startswith("LOSSYCOLL_"))
    found = " ".join(map(_shown, names)) or "none set"
    try:
        effective = Options.from_env()
    except OptionError as error:
        return [Finding("variables", Severity.FAIL, found, str(error))]
    advice = "LOSSYCOLL_INJECT drops packets on purpose: unset it to train for real"
    return [good_if(not effective.inject, "variables", found, Severity.WARN, advice)]


def _shown(name: str) -> str:
    """A variable, with its value only if it is an option's: another may be the secret, or a slip
    for it, and what is printed here is shown to others."""
    from lossycoll.options.fields import Options
    from lossycoll.options.schema import variable

    known = name in {variable(entry.name) for entry in dataclasses.fields(Options)}
    return f"{name}={os.environ[name]}" if known else f"{name} (set)"


def clock() -> list[Finding]:
    path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    source = path.read_text().strip() if path.exists() else "unknown"
    started = time.monotonic_ns()
    for _ in range(10_000):
        time.monotonic_ns()
    cost = (time.monotonic_ns() - started) / 10_000
    advice = f"reading {source} enters the kernel; boot with clocksource=tsc where it is stable"
    good = source not in SLOW_CLOCKS and cost < SLOW_CLOCK_NS
    return [good_if(good, "clock", f"{source}, {cost:.0f} ns per read", Severity.WARN, advice)]


def socket_buffers() -> list[Finding]:
    out = []
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
        out.append(good_if(got >= WANTED_BUFFER, name, found, Severity.WARN, advice))
    return out


def offloads() -> list[Finding]:
    out = []
    for name, option, value, since in (
        ("UDP GSO (send)", UDP_SEGMENT, 1448, "4.18"),
        ("UDP GRO (receive)", UDP_GRO, 1, "5.0"),
    ):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            try:
                udp.setsockopt(socket.IPPROTO_UDP, option, value)
                found, good = "yes", True
            except OSError as error:
                found, good = f"no: {error.strerror}", False
        advice = f"needs Linux {since} or newer; without it each packet is a trip to the kernel"
        out.append(good_if(good, name, found, Severity.WARN, advice))
    return out


def interfaces() -> list[Finding]:
    out = []
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net") / name
        size = int((folder / "mtu").read_text())
        state = (folder / "operstate").read_text().strip()
        out.append(
            good_if(
                size >= 1280,
                f"interface {name}",
                f"MTU {size}, {state}",
                Severity.WARN,
                f"small packets cost time: ip link set dev {name} mtu 1500",
            )
        )
    return out or [Finding("interfaces", Severity.FAIL, "none", "bring one up: ip link set lo up")]


def host_name() -> list[Finding]:
    name = socket.gethostname()
    try:
        found, good = f"{name} is {socket.gethostbyname(name)}", True
    except OSError:
        found, good = f"{name} does not resolve", False
    advice = "gloo looks it up: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME"
    return [good_if(good, "host name", found, Severity.WARN, advice)]


def loopback() -> list[Finding]:
    out = []
    firewall = "a firewall on the loopback interface? see iptables -S and nft list ruleset"
    slower = "ranks of this machine use UDP among themselves, which is slower"
    tests = (
        ("UDP over loopback", udp_loopback, Severity.FAIL, firewall),
        ("engine over loopback", engine_loopback, Severity.FAIL, firewall),
        ("engine in shared memory", engine_in_shared_memory, Severity.WARN, slower),
    )
    for name, test, otherwise, advice in tests:
        try:
            out.append(Finding(name, Severity.OK, test()))
        except ImportError:
            continue  # the native engine does not load, which has its own line
        except (OSError, RuntimeError) as error:
            out.append(Finding(name, otherwise, str(error), advice))
    return out


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    system,
    versions,
    engine,
    entry_point,
    options,
    clock,
    socket_buffers,
    offloads,
    interfaces,
    rdma,
    chosen_interface,
    mtu,
    port_range,
    host_name,
    memory_sharing,
    sealing,
    loopback,
)
