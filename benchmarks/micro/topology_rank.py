"""A rank of benchmarks.micro.topology: ``python -m benchmarks.micro.topology_rank CONFIG OUT``.

CONFIG is JSON: a size in MiB, variants of all-reduce, rounds, and how many of a variant run in a
row. Variants take turns, and the order turns around each time. OUT.RANK gets the topology and what
was measured, in order. Before each operation and after the last, when all ranks stand still, rank 0
says so and waits for OUT.go.NUMBER.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lossycoll
from benchmarks.common.lab_job import answer
from benchmarks.common.rank_kit import agreed, tcp_group

VARIANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "auto": lambda: lossycoll.lossy(repair=0, algorithm="auto"),
    "transpose": lambda: lossycoll.lossy(repair=0, algorithm="transpose"),
    "hierarchical": lambda: lossycoll.lossy(repair=0, algorithm="hierarchical"),
    "reliable-transpose": lambda: lossycoll.reliable(algorithm="transpose"),
    "reliable-hierarchical": lambda: lossycoll.reliable(algorithm="hierarchical"),
}
"""Nothing resent between sites, and everything; those of gloo are "gloo-" and TCP's congestion
control."""
SLOW_SECONDS = 5.0
"""A variant that takes longer is not measured again: the others would wait for it."""
READY, GO = "measured", "go"
GO_SECONDS = 60.0


def algorithm_of(variant: str) -> str:
    return variant.removeprefix("reliable-")


def stand_still(out: str, number: int) -> None:
    """Returns when what was sent before has been counted."""
    with lossycoll.reliable():
        dist.barrier()
    if dist.get_rank() == 0:
        print(READY, number, flush=True)
        end = time.monotonic() + GO_SECONDS
        while not Path(f"{out}.{GO}.{number}").exists():
            if time.monotonic() > end:
                raise TimeoutError(f"nobody counted within {GO_SECONDS:g} s")
            time.sleep(0.002)
    with lossycoll.reliable():
        dist.barrier()


def main() -> None:
    config, out = json.loads(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    variants = config["variants"]
    groups = {name: tcp_group(name[5:]) for name in variants if name.startswith("gloo-")}
    tensor = torch.ones(int(config["mib"] * (1 << 18)))
    slow: set[str] = set()
    found: list[dict[str, Any]] = []
    for turn in range(config["rounds"]):
        for variant in variants if turn % 2 == 0 else variants[::-1]:
            for nth in range(config["each"]):
                if variant in slow:
                    break
                tensor.fill_(1.0)
                stand_still(out, len(found))
                began = time.monotonic()
                with VARIANTS.get(variant, nullcontext)():
                    dist.all_reduce(tensor, group=groups.get(variant))
                ended = time.monotonic()
                found.append(
                    {
                        "variant": variant,
                        "nth": nth,
                        "time": (began, ended),
                        "missing": missing(variant, groups),
                    }
                )
                if agreed(ended - began > SLOW_SECONDS):
                    slow.add(variant)
    stand_still(out, len(found))
    topology = lossycoll.topology()
    said = {"hosts": topology.n_hosts, "sites": topology.n_sites, "operations": found}
    answer(said)
    dist.destroy_process_group()


def missing(variant: str, groups: dict[str, dist.ProcessGroup]) -> float:
    """The share of packets that the last operation did without."""
    report = lossycoll.last_report()
    if variant in groups or report is None:
        return 0.0
    packets = report.packets_received + report.packets_missing
    return report.packets_missing / packets if packets else 0.0


if __name__ == "__main__":
    main()
