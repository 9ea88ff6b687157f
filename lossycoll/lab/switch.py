"""The switch as Python sees it: its process, its memory, and its namespaces."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar, Final

from .._lab import ffi, lib
from ..errors import LabError, LabPermissionError
from . import leftovers, tcp
from .counters import Counters, HostCounts, LinkCounts, PortCounts, QueueCounts
from .job import HERE, own_process, spawn
from .network import Network, link_fields, port_fields

WIDTH: Final[int] = lib.LAB_HOSTS
NETWORK: Final = 10 << 24 | 77 << 16
"""10.77.0.0/24, the network of :func:`~.network.address_of`."""
START_SECONDS: Final = 20.0
ANSWER_SECONDS: Final = 5.0


class Switch:
    """Runs a switch, from now to :meth:`close`.

    ``devices`` False: only the namespaces are made, with one more in the middle, for another
    backend to join. ``environment``: of its process, by which leftovers are known. Raises
    LabPermissionError where namespaces or devices may not be made.
    """

    meaning = "a process of our own: everything, and the same seed loses the same packets"
    commands: ClassVar[tuple[str, ...]] = ()
    """Programs that it takes."""

    @staticmethod
    def refusal(network: Network) -> str:
        """Why it can't make a network, on any machine, as a sentence; empty if it can."""
        del network
        return ""

    def __init__(self, network: Network, environment: dict[str, str], devices: bool = True) -> None:
        self.network = network
        self._lock = threading.Lock()
        memory = os.memfd_create("lossycoll-lab")
        os.ftruncate(memory, ffi.sizeof("lab_shared"))
        self._map = mmap.mmap(memory, ffi.sizeof("lab_shared"))
        self._shared: Any = ffi.from_buffer("lab_shared *", self._map)
        self._shared.hosts = network.total_hosts
        self._shared.mtu = network.mtu
        self._shared.devices = devices
        self._shared.network = NETWORK
        self._shared.seed = network.seed
        _write(self._shared, network)
        lifeline, self._lifeline = os.pipe()
        inherited = (memory, lifeline)
        try:
            self._process = spawn(
                # Its name is there for whoever looks for leftovers.
                [*own_process("switch"), *map(str, inherited), environment[leftovers.MARK]],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the lab, which then closes the lifeline
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            for descriptor in inherited:
                os.close(descriptor)
        try:
            self._await(lambda: self._shared.state != lib.LAB_STARTING, START_SECONDS)
            if self._shared.state == lib.LAB_FAILED:
                raise self._failure()
        except BaseException:
            self.close()
            raise

    def _await(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done():
            if not self.running and not done():
                raise LabError(
                    f"the laboratory's switch ended with status {self._process.returncode}; its "
                    f"hosts have no network any more"
                )
            if time.monotonic() > end:
                raise LabError(f"the laboratory's switch didn't answer for {seconds:g} s")
            time.sleep(0.0005)

    def _failure(self) -> LabError:
        """Why it didn't start."""
        what = ffi.string(self._shared.text).decode()
        if self.network.congestion is not None and "congestion control" in what:
            return tcp.refused(self.network.congestion, self._shared.error)
        return why(what, self._shared.error)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def inside(self, number: int, command: list[str]) -> list[str]:
        """The command that runs ``command`` in a host's namespaces. The number after the last
        host's is the namespace in the middle, where there is one."""
        handles = [self._shared.user_fd, self._shared.net_fd[number]]
        paths = [f"/proc/{self.pid}/fd/{handle}" for handle in handles if handle >= 0]
        return [sys.executable, "-I", "-S", str(HERE / "enter.py"), *paths, "--", *command]

    def change(self, network: Network) -> None:
        """Puts other links and ports in force; returns when they are. Hosts and MTU stay."""
        with self._lock:
            _write(self._shared, network)
            self.network = network
            self._ask()

    def counters(self) -> Counters:
        with self._lock:
            if self.running:
                self._ask()
            return _read(self._shared, self.network)

    def _ask(self) -> None:
        number = self._shared.wanted + 1
        self._shared.wanted = number
        with contextlib.suppress(BrokenPipeError):
            os.write(self._lifeline, b"!")
        self._await(lambda: self._shared.applied == number, ANSWER_SECONDS)

    def close(self) -> None:
        """Ends the switch and everything that runs on its hosts. May be called again."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# ---- its memory (native/lab/lab.h) ----


def _write(shared: Any, network: Network) -> None:
    """Writes the tables of ``network`` into a lab_shared."""
    mtu = network.mtu
    shared.congestion = (network.congestion or "").encode()
    for host in range(network.total_hosts):
        shared.site_of[host] = network.site_of(host)
        shared.up[host], shared.down[host] = port_fields(network.port_of(host), mtu)
    for site in range(network.sites):
        shared.site_up[site], shared.site_down[site] = port_fields(network.gateway, mtu)
    for a, b in network.pairs():
        shared.link[a * WIDTH + b] = link_fields(network.link_of(a, b), mtu)


LINK: Final = tuple(field.name for field in fields(LinkCounts) if field.name != "queue")
"""As lab_link_counts calls them."""


def _read(shared: Any, network: Network) -> Counters:
    links = {}
    for a, b in network.pairs():
        c = shared.link_counts[a * WIDTH + b]
        links[a, b] = LinkCounts(**{name: getattr(c, name) for name in LINK}, queue=_queue(c.queue))
    hosts = []
    for host in range(network.total_hosts):
        h = shared.host_counts[host]
        up, down = _queue(shared.up_counts[host]), _queue(shared.down_counts[host])
        late = h.late_max_ns / 1e6
        hosts.append(HostCounts(up, down, h.overrun, h.shed, h.refused, late))
    sites = [
        PortCounts(_queue(shared.site_up_counts[site]), _queue(shared.site_down_counts[site]))
        for site in range(network.sites)
    ]
    return Counters(links, tuple(hosts), tuple(sites))


def _queue(c: Any) -> QueueCounts:
    return QueueCounts(c.packets, c.bytes, c.dropped, c.queue_max, c.policed)


# ---- what may fail ----

INSTEAD: Final = "set LOSSYCOLL_INJECT, as in LOSSYCOLL_INJECT=loss=0.01,burst=4,seed=1"


def why(what: str, code: int) -> LabError:
    """The error for ``what`` that failed with errno ``code``: what is needed, or else to do."""
    text = f"the laboratory can't {what}: {os.strerror(code)}"
    if code in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EUSERS):
        return LabPermissionError(
            f"{text}; it needs root, or a kernel that lets users have user namespaces (sysctl "
            f"kernel.unprivileged_userns_clone=1 and user.max_user_namespaces, and no AppArmor "
            f"restriction on them) and lets them open /dev/net/tun. Without either, packets can "
            f"be lost inside the processes: {INSTEAD}"
        )
    if code in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
        return LabError(
            f"{text}; it needs the kernel's TAP devices (module tun; in a container, the device "
            f"/dev/net/tun). Without them, packets can be lost inside the processes: {INSTEAD}"
        )
    return LabError(text)
