"""What one rank of the benchmark does. Started by bench.py.

Backends take turns, iteration by iteration, through process groups of the same
processes: whatever else the machine does in the meantime hits them alike.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lossycoll
from lossycoll.launch import EventWriter

LEAST_ROUNDS = 3
MOST_ROUNDS = 2000
WARM_UP_ROUNDS = 2


def contribution(elements: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Small whole numbers, so that every dtype holds the sum over the ranks exactly."""
    return ((torch.arange(elements) * 7 + rank) % 4).to(dtype)


def measure_size(
    groups: dict[str, dist.ProcessGroup], elements: int, config: dict[str, Any]
) -> dict[str, Any]:
    dtype = getattr(torch, config["dtype"])
    source = contribution(elements, dtype, dist.get_rank())
    tensor = source.clone()
    wanted = torch.zeros(elements, dtype=torch.float64)
    for rank in range(dist.get_world_size()):
        wanted += contribution(elements, torch.float64, rank)
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    verified: dict[str, bool] = {}

    def one_round(number: int, check: bool = False) -> None:
        # The order turns around each time, so that nobody always runs second.
        order = list(groups) if number % 2 == 0 else list(reversed(groups))
        for name in order:
            tensor.copy_(source)
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(tensor, group=groups[name])
            seconds[name].append(time.perf_counter() - started)
            if check:
                # The lossy mean divides by a count and multiplies again: that may round.
                right = torch.allclose(tensor.double(), wanted, rtol=1e-6, atol=0)
                verified[name] = verified.get(name, True) and right

    one_round(0, check=config["verify"])
    started = time.perf_counter()
    for number in range(WARM_UP_ROUNDS):
        one_round(number)
    # Rank 0's clock decides for all: everyone must do the same number of rounds.
    a_round = (time.perf_counter() - started) / WARM_UP_ROUNDS
    rounds = torch.tensor(min(MOST_ROUNDS, max(LEAST_ROUNDS, int(config["seconds"] / a_round))))
    dist.broadcast(rounds, src=0)
    for times in seconds.values():
        times.clear()
    for number in range(int(rounds)):
        one_round(number)
    one_round(0, check=config["verify"])
    return {
        "bytes": elements * source.element_size(),
        "seconds": {name: times[: int(rounds)] for name, times in seconds.items()},
        "verified": verified,
    }


def merge(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """An iteration's time is the mean over the ranks, as nccl-tests has it."""
    out = []
    for entries in zip(*ranks, strict=True):
        first = entries[0]
        out.append(
            {
                "bytes": first["bytes"],
                "seconds": {
                    name: [
                        sum(times) / len(times)
                        for times in zip(
                            *(entry["seconds"][name] for entry in entries), strict=True
                        )
                    ]
                    for name in first["seconds"]
                },
                "verified": {
                    name: all(entry["verified"][name] for entry in entries)
                    for name in first["verified"]
                },
            }
        )
    return out


def traffic(groups: dict[str, dist.ProcessGroup]) -> dict[str, int] | None:
    """The lossy group's counters at this rank."""
    if "lossy" not in groups:
        return None
    figures = asdict(lossycoll.stats(groups["lossy"]))
    names = ("packets_sent", "packets_resent", "packets_injected", "packets_missing", "bytes_sent")
    return {name: figures[name] for name in names}


def main() -> None:
    path = Path(sys.argv[1])
    config = json.loads(path.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    # The default group only coordinates, and is none of those that are measured.
    dist.init_process_group(backend="gloo")
    groups = {name: dist.new_group(backend=name) for name in config["backends"]}
    report = EventWriter(config["events"]) if dist.get_rank() == 0 else None
    measured = []
    itemsize = getattr(torch, config["dtype"]).itemsize
    for done, size in enumerate(config["sizes"]):
        if report is not None:
            report.write(bytes=size, done=done)
        measured.append(measure_size(groups, size // itemsize, config))
        if report is not None:
            report.write(bytes=size, done=done + 1)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (measured, traffic(groups)))
    if report is not None:
        counters = [counts for _, counts in gathered if counts is not None]
        total = (
            {name: sum(counts[name] for counts in counters) for name in counters[0]}
            if counters
            else None
        )
        merged = merge([entries for entries, _ in gathered])
        text = json.dumps({"sizes": merged, "traffic": total})
        (path.parent / "ranks.json").write_text(text, encoding="utf-8")
        report.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
