"""Bare sockets between two ranks' hosts: runs raw_duplex at this end."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from benchmarks.common.results import ROOT
from lossycoll.errors import LossyError

from .cells import PINGS, RAW

MICRO = ROOT / "benchmarks" / "micro"
SOURCES = tuple(MICRO / name for name in ("raw_duplex.c", "raw_end.c", "raw_ring.c"))
PROGRAM = ROOT / "benchmarks" / "build" / "raw_duplex"
SECONDS = 60.0
HEADERS = 28
"""Of IPv4 and UDP."""
N_PINGS = 5000


def stream(config: dict[str, Any], switches: Sequence[str], number: int) -> dict[str, Any]:
    """Both ends send and receive at once. Returns what raw_duplex prints at this one."""
    return _run(config, ["--megabytes", str(config["megabytes"]), *switches], number)


def pings(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Round trips of a small datagram by the way in which both ends wait for it."""
    found = {}
    for number, name in enumerate(PINGS):
        dist.barrier()
        found[name] = _run(config, ["--pings", str(N_PINGS), *RAW[name]], number)
    return found


def _run(config: dict[str, Any], switches: Sequence[str], number: int) -> dict[str, Any]:
    """The ports change with every run: what a former one left under way is nobody's."""
    addresses, rank = config["addresses"], dist.get_rank()
    ends = [f"{addresses[end]}:{config['port'] + 2 * number + end}" for end in (0, 1)]
    command = [str(PROGRAM), "--bind", ends[rank], "--peer", ends[1 - rank], *switches]
    command += ["--datagram", str(config["mtu"] - HEADERS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise LossyError(f"{' '.join(command)}: {done.stderr or done.stdout}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result
