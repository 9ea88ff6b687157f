"""One rank of the benchmark: ``python -m benchmarks.studies.lossless.rank CONFIG``, a file of JSON.

Variants take turns, call by call, through process groups of the same processes; the order turns
around each time. Seconds of a call are this rank's own; CPU seconds are of all threads of the
process, kernel included, between its begin and its end. What is measured goes to ``out``.RANK.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lossycoll
from lossycoll.options.texts import FAST_PATHS

from . import calls, memory, sockets
from .cells import PATH_SIZES, RAW, RAW_SIZES, SIZES

WARM_UP = 3
ROUNDS = (4, 1500)
"""At least and at most."""

Groups = Mapping[str, dist.ProcessGroup]


def order_of(groups: Mapping[str, Any], number: int) -> list[str]:
    """In which order variants take their turn; nobody always runs second."""
    return list(groups) if number % 2 == 0 else list(groups)[::-1]


def agree(value: float) -> float:
    """Rank 0's, on all ranks."""
    agreed = torch.tensor(value, dtype=torch.float64)
    dist.broadcast(agreed, src=0)
    return float(agreed)


def one_call(call: calls.Call, group: dist.ProcessGroup) -> tuple[float, float]:
    """Seconds, and CPU seconds, of one call that all ranks begin together."""
    call.reset()
    dist.barrier()
    cpu, begin = time.process_time(), time.perf_counter()
    call.run(group)
    return time.perf_counter() - begin, time.process_time() - cpu


def measure(collective: str, size: int, groups: Groups, seconds: float) -> dict[str, Any]:
    """Times of one collective and size, by variant; checks the results of first and last round."""
    call = calls.make(collective, size, dist.get_rank(), dist.get_world_size())
    times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in groups}
    right = dict.fromkeys(groups, True)

    def one_round(number: int, check: bool) -> None:
        for variant in order_of(groups, number):
            times[variant].append(one_call(call, groups[variant]))
            if check:
                right[variant] = right[variant] and call.right()

    begin = time.perf_counter()
    for number in range(WARM_UP):
        one_round(number, check=number == 0)
    a_round = (time.perf_counter() - begin) / WARM_UP
    # Python looks through all of torch's objects once in a process's first hundreds of calls. That
    # takes 0.1 s, and which variant it meets is chance.
    gc.collect()
    gc.freeze()
    # Rank 0's clock decides: all must do the same number of rounds.
    rounds = int(agree(min(ROUNDS[1], max(ROUNDS[0], seconds / a_round))))
    for number in range(rounds):
        one_round(number, check=number == rounds - 1)
    kept = {variant: found[WARM_UP:] for variant, found in times.items()}
    return {
        "collective": collective,
        "bytes": size,
        "seconds": {variant: [wall for wall, _ in found] for variant, found in kept.items()},
        "cpu": {variant: [cpu for _, cpu in found] for variant, found in kept.items()},
        "right": right,
    }


def missing(groups: Groups) -> int:
    """Packets that the lossy groups have missed so far; on these wires there should be none."""
    return sum(
        lossycoll.stats(group).packets_missing
        for group in groups.values()
        if dist.get_backend(group) == "lossy"
    )


def both() -> Groups:
    return {name: dist.new_group(backend=name) for name in ("lossy", "gloo")}


def part_collectives(config: dict[str, Any]) -> dict[str, Any]:
    groups = both()
    rows = [
        measure(collective, size, groups, config["seconds"])
        for collective, sizes in SIZES.items()
        for size in sizes
    ]
    return {"rows": rows, "missing": missing(groups)}


def part_paths(config: dict[str, Any]) -> dict[str, Any]:
    """All on, each off in turn, all off."""
    off = {"nothing": "", **{name: name for name in FAST_PATHS}, "all": ",".join(FAST_PATHS)}
    groups = {
        name: dist.new_group(backend="lossy", pg_options=lossycoll.Options(disable=paths))
        for name, paths in off.items()
    }
    # Eight variants take turns here where elsewhere there are two.
    seconds = 2 * config["seconds"]
    rows = [measure("all_reduce", size, groups, seconds) for size in PATH_SIZES]
    return {"rows": rows, "missing": missing(groups)}


def part_raw(config: dict[str, Any]) -> dict[str, Any]:
    """Bare sockets and all-reduce take turns, some seconds each."""
    groups = {"lossy": dist.new_group(backend="lossy")}
    rows: list[dict[str, Any]] = []
    raw: dict[str, list[dict[str, Any]]] = {name: [] for name in RAW}
    for number in range(config["raw_rounds"]):
        rows += [
            measure("all_reduce", size, groups, config["seconds"] / config["raw_rounds"])
            for size in RAW_SIZES
        ]
        for name in order_of(raw, number):
            dist.barrier()
            raw[name].append(sockets.stream(config, RAW[name], number))
    dist.barrier()
    pings = sockets.pings(config)
    return {"rows": rows, "missing": missing(groups), "raw": raw, "pings": pings}


def part_memory(config: dict[str, Any]) -> dict[str, Any]:
    operations = config["operations"]
    return {variant: memory.measure(group, operations) for variant, group in both().items()}


PARTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "collectives": part_collectives,
    "paths": part_paths,
    "raw": part_raw,
    "memory": part_memory,
}


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    # The default group only coordinates, and is none of those that are measured.
    dist.init_process_group("gloo")
    found = PARTS[config["part"]](config)
    Path(f"{config['out']}.{dist.get_rank()}").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
