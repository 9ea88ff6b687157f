"""One host of the benchmark: ``python -m benchmarks.studies.deadlines.rank CONFIG OUT``.

CONFIG is JSON: elements, operations, incast. OUT.RANK gets what this rank saw of each operation and
each stream; OUT.RANK.pid its process, before the first; OUT.at the operation that rank 0 is at.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lossycoll
from benchmarks.common.lab_job import answer

LAST_SECONDS = 1.0
"""For packets that come after the end of the last operation."""
STREAM = ("packets", "arrived", "first", "last", "gap", "end", "cause")
"""Fields of the log's event of that name that are kept."""


class Streams(logging.Handler):
    """Keeps what the backend logs of streams."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        if fields.get("event") == "stream" and fields["packets"]:
            self.kept.append({name: _short(fields[name]) for name in STREAM})

    def take(self) -> list[dict[str, Any]]:
        kept, self.kept = self.kept, []
        return kept


def _short(value: float | str) -> float | str:
    return round(value, 6) if isinstance(value, float) else value


def main() -> None:
    config = json.loads(sys.argv[1])
    out = sys.argv[2]
    torch.set_num_threads(1)
    streams = Streams()
    logging.getLogger("lossycoll").addHandler(streams)
    dist.init_process_group("lossy")
    rank = dist.get_rank()
    Path(f"{out}.{rank}.pid").write_text(str(os.getpid()))
    dist.barrier()
    operation = incast if config["incast"] else all_reduce
    tensor = torch.ones(config["elements"])
    streams.take()
    operations = []
    late = lossycoll.stats().stale
    for number in range(config["operations"]):
        if rank == 0:
            Path(f"{out}.at").write_text(str(number))
        tensor.fill_(1.0)
        began = time.monotonic()
        operation(tensor)
        seconds = time.monotonic() - began
        operations.append(entry(began, seconds, streams.take()))
        operations[-1]["late"] = lossycoll.stats().stale - late
        late = lossycoll.stats().stale
    dist.barrier()
    time.sleep(LAST_SECONDS)
    operations[-1]["late"] += lossycoll.stats().stale - late
    answer(operations)
    dist.barrier()
    dist.destroy_process_group()


def all_reduce(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def incast(tensor: torch.Tensor) -> None:
    """Rank 0 gets the sum, the others nothing."""
    empty = tensor[:0]
    parts = [tensor, *[empty] * (dist.get_world_size() - 1)]
    output = torch.empty_like(tensor) if dist.get_rank() == 0 else tensor.new_empty(0)
    dist.reduce_scatter(output, parts)


def entry(began: float, seconds: float, streams: list[dict[str, Any]]) -> dict[str, Any]:
    report = lossycoll.last_report()
    assert report is not None
    return {
        "sent": report.packets_sent,
        "began": round(began, 6),
        "seconds": round(seconds, 6),
        "received": report.packets_received,
        "missing": report.packets_missing,
        "cause": report.cause.name,
        "deadline_hits": report.deadline_hits,
        "streams": streams,
    }


if __name__ == "__main__":
    main()
