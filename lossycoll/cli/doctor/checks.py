"""The doctor's checks: each looks at one thing and returns what it found."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
import socket
import sys
import time
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Final

UDP_SEGMENT = 103  # from <linux/udp.h>; Python's socket module has no names for these
UDP_GRO = 104
WANTED_BUFFER = 4 << 20
SYSTEM_NET: Final = Path("/sys/class/net")
SLOW_CLOCKS = {"hpet", "acpi_pm", "jiffies", "refined-jiffies"}
SLOW_CLOCK_NS = 1000


class Severity(str, Enum):
    OK = "ok"
    WARN = "warn"
    """Slower or less certain than it could be."""
    FAIL = "fail"
    """A job would not work."""


@dataclass(frozen=True)
class Finding:
    name: str
    status: Severity
    found: str
    advice: str = ""


def good_if(good: bool, name: str, found: str, otherwise: Severity, advice: str) -> Finding:
    return Finding(name, Severity.OK, found) if good else Finding(name, otherwise, found, advice)


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


PACKAGE: Final = "lossycoll"
_CLAUSE: Final = re.compile(r"(>=|<)\s*(\d+(?:\.\d+)*)")
_VERSION: Final = re.compile(
    r"v?(\d+(?:\.\d+)*)"
    r"([-_.]?(?:a|b|c|rc|alpha|beta|pre|preview|dev)[-_.]?\d*)?"
    r"(?:[-_.+].*|post.*)?",
    re.IGNORECASE,
)


def versions() -> list[Finding]:
    """Versions of Python and torch: a process group's methods change with torch's releases."""
    import torch

    python, wanted = metadata.metadata(PACKAGE)["Requires-Python"] or "", torch_versions()
    return [
        _version("Python", platform.python_version(), python, f"use a Python {python}"),
        _version("torch", torch.__version__, wanted, f'pip install "torch{wanted}"'),
    ]


def torch_versions() -> str:
    """The versions of torch that the package may be installed with, as in ``>=2.13,<2.16``."""
    for line in metadata.requires(PACKAGE) or ():
        if found := re.fullmatch(r"torch\b\s*\(?([^;()]*)\)?\s*(;.*)?", line):
            return found[1].strip()
    raise LookupError(f"the metadata of {PACKAGE} requires no torch; install the package again")


def _version(name: str, version: str, wanted: str, advice: str) -> Finding:
    try:
        return good_if(admits(wanted, version), name, version, Severity.FAIL, advice)
    except ValueError as error:
        unread = f"see for yourself whether it is in {wanted}: {error}"
        return Finding(name, Severity.WARN, version, unread)


def admits(wanted: str, version: str) -> bool:
    """True if ``version`` (2.13.0+cpu, say) is in a range of this package, as in ``>=2.13,<2.15``.

    A pre-release or development version (2.13.0rc1) comes before its release. It isn't in
    ``<2.13`` either, as in PEP 440. Post-releases and local versions count as their release.
    (``packaging`` would read this, but isn't among what torch or this package installs.)
    """
    found = _VERSION.fullmatch(version)
    if found is None:
        raise ValueError(f"the version {version!r} can't be read")
    release, is_before = _numbers(found[1]), bool(found[2])
    for clause in filter(None, map(str.strip, wanted.split(","))):
        bound = _CLAUSE.fullmatch(clause)
        if bound is None:
            raise ValueError(f"the version range {clause!r} is none that the doctor can read")
        limit = _numbers(bound[2])
        is_from = release > limit or (release == limit and not is_before)
        if not (is_from if bound[1] == ">=" else release < limit):
            return False
    return True


def _numbers(release: str) -> list[int]:
    """The same for 2.13 and 2.13.0."""
    found = [int(part) for part in release.split(".")]
    while found and not found[-1]:
        found.pop()
    return found


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
        advice = "unset TORCH_DEVICE_BACKEND_AUTOLOAD, or import lossycoll after torch"
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
    from lossycoll.errors import InterfaceError
    from lossycoll.runtime.net.interfaces import mtu_of

    out = []
    for _, name in socket.if_nameindex():
        try:
            size = mtu_of(name)
        except InterfaceError:  # gone since it was listed
            continue
        said = f"MTU {size}"
        # A container may have no /sys, or that of another network.
        with contextlib.suppress(OSError):
            said += f", {(SYSTEM_NET / name / 'operstate').read_text().strip()}"
        out.append(
            good_if(
                size >= 1280,
                f"interface {name}",
                said,
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
