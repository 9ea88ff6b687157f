"""Where NCCL can be measured: what ranks see of GPUs, and from that who takes which, and how.

NCCL knows hosts by host name and boot id, or by NCCL_HOSTID where it is set, and refuses two
ranks on one GPU of one host ("Duplicate GPU detected", since NCCL 2.5). Ranks that share a GPU
therefore each get an NCCL_HOSTID: NCCL takes them for hosts and goes through sockets.
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lossycoll.cli.answer import CommandError

SHARED: Final = {"NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""For ranks that share a GPU: neither CUDA's nor the host's shared memory joins "hosts"."""
_VIA = re.compile(r"Channel .* via ([A-Za-z0-9]+(?:/[A-Za-z]+)*)")


class NcclMissing(CommandError):
    """NCCL can't run here; the text says what it needs and doesn't find."""


@dataclass(frozen=True)
class Seen:
    """View of one rank. ``host``: as NCCL knows it; ``gpus``: their UUIDs, by device."""

    host: str
    torch: str
    nccl: bool
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class GpuAssignment:
    """Where one rank runs NCCL: device number, and variables for its environment."""

    device: int
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Setup:
    """``mode``: "own", a GPU for each rank of one host; "hosts", of several; "shared", otherwise.
    ``places`` by rank."""

    mode: str
    places: tuple[GpuAssignment, ...]
    hosts: int

    @property
    def label(self) -> str:
        return {
            "own": "a GPU for each rank, one host",
            "hosts": f"a GPU for each rank, {self.hosts} hosts",
            "shared": "ranks share a GPU, as hosts of their own to NCCL: sockets between them",
        }[self.mode]


def look() -> Seen:
    # Here, so that --help can answer before torch is imported.
    import torch
    import torch.distributed as dist

    boot_id = Path("/proc/sys/kernel/random/boot_id")
    boot = boot_id.read_text().strip() if boot_id.exists() else ""
    built = bool(torch.version.cuda) and dist.is_nccl_available()
    gpus = range(torch.cuda.device_count()) if built else ()
    return Seen(
        host=os.environ.get("NCCL_HOSTID") or socket.gethostname() + boot,
        torch=torch.__version__,
        nccl=built,
        gpus=tuple(str(torch.cuda.get_device_properties(number).uuid) for number in gpus),
    )


def choose(seen: Sequence[Seen]) -> Setup:
    """Gives every rank a GPU that it sees, the least taken one. ``seen`` by rank. Raises
    NcclMissing, naming the first rank of each kind of want."""
    lacks = _lacks(seen)
    if lacks:
        raise NcclMissing("NCCL can't run here: " + "; ".join(lacks))
    taken: Counter[str] = Counter()
    devices = []
    for rank in seen:
        device = min(range(len(rank.gpus)), key=lambda number: taken[rank.gpus[number]])
        taken[rank.gpus[device]] += 1
        devices.append(device)
    hosts = len({rank.host for rank in seen})
    if max(taken.values()) == 1:
        places = tuple(GpuAssignment(device, {}) for device in devices)
        return Setup("own" if hosts == 1 else "hosts", places, hosts)
    # NCCL leaves loopback out as long as there is another interface.
    same = {"NCCL_SOCKET_IFNAME": "lo"} if hosts == 1 else {}
    places = tuple(
        GpuAssignment(device, {**SHARED, **same, "NCCL_HOSTID": f"lossycoll-rank-{rank}"})
        for rank, device in enumerate(devices)
    )
    return Setup("shared", places, hosts)


def _lacks(seen: Sequence[Seen]) -> list[str]:
    lacks: dict[str, int] = {}
    for number, rank in enumerate(seen):
        if not rank.nccl:
            lack = f"torch {rank.torch} has no NCCL; install its build for CUDA (Linux)"
            lacks.setdefault(lack, number)
        elif not rank.gpus:
            look_at = "look at nvidia-smi, and at CUDA_VISIBLE_DEVICES"
            lacks.setdefault(f"torch {rank.torch} sees no GPU; {look_at}", number)
    if len(seen) < 2:
        lacks["it takes two ranks at least"] = 0
    return [f"rank {number}: {lack}" for lack, number in lacks.items()]


def set_up(place: GpuAssignment, log: Path) -> None:
    """Makes ready for NCCL in this process, before its first NCCL group.

    What the user has set stays, apart from NCCL_HOSTID. ``log``: gets NCCL's own account, unless
    the user has asked for one.
    """
    import torch

    wanted = dict(place.environment)
    if "NCCL_DEBUG" not in os.environ:
        wanted |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
    for name, value in wanted.items():
        if name == "NCCL_HOSTID" or name not in os.environ:
            os.environ[name] = value
    torch.cuda.set_device(place.device)


def transports(account: str) -> tuple[str, ...]:
    """Transports of NCCL's channels, from its account at NCCL_DEBUG=INFO: "NET/Socket",
    "P2P/CUMEM", "SHM/direct", ..."""
    return tuple(sorted({found[1] for found in _VIA.finditer(account)}))


def describe(setup: Setup) -> list[str]:
    """A line for the whole and one for each rank."""
    lines = [f"NCCL: {setup.label}"]
    for rank, place in enumerate(setup.places):
        given = [f"{name}={value}" for name, value in sorted(place.environment.items())]
        lines.append(" ".join([f"rank {rank}: cuda:{place.device}", *given]))
    return lines
