"""How much memory a process takes beyond its tensors."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .cells import BUCKETS, FLAT_SIZES

PEAK_CALLS = 10
WARM_UP = 500


def resident(peak: bool = False) -> int:
    """Bytes of this process in memory, now or at most since :func:`forget_peak`."""
    name = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def holdings() -> dict[str, int]:
    return {
        "resident": resident(),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def measure(group: dist.ProcessGroup, operations: int) -> dict[str, Any]:
    """Peak beyond the tensors by bucket, and what the process holds before and after many calls."""
    peaks = {}
    for size in BUCKETS:
        tensor = torch.ones(size // 4)
        dist.barrier()
        before = resident()
        forget_peak()
        for _ in range(PEAK_CALLS):
            dist.all_reduce(tensor.fill_(1.0), group=group)
        peaks[str(size)] = resident(peak=True) - before
    tensors = [torch.ones(size // 4) for size in FLAT_SIZES]

    def many(count: int) -> None:
        for number in range(count):
            tensor = tensors[number % len(tensors)]
            dist.all_reduce(tensor.fill_(1.0), group=group)

    many(min(WARM_UP, operations))
    before_all = holdings()
    many(operations)
    return {
        "peaks": peaks,
        "operations": operations,
        "before": before_all,
        "after": holdings(),
        "sum": float(tensors[0][0]),
    }
