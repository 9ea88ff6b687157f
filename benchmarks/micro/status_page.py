"""What the status page costs a small all_reduce: two ranks of this machine, with it and without.

``python -m benchmarks.micro.status_page`` makes a job of each kind in turn. It prints the least
mean time of a batch of calls of each kind, since anything else on the machine only adds to it.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median

ELEMENTS = 1024
CALLS = 50


def rank_calls(rank: int, world: int) -> list[float]:
    """Microseconds of a call, by batch."""
    import torch
    import torch.distributed as dist

    from tests.support.harness import init

    init()
    t = torch.ones(ELEMENTS)
    found = []
    for _ in range(int(os.environ["BATCHES"])):
        begin = time.perf_counter()
        for _ in range(CALLS):
            dist.all_reduce(t)
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
    dist.barrier()
    dist.destroy_process_group()
    return found


def main() -> None:
    """Runs both kinds, and prints them."""
    from tests.support.harness import run_good

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=6, help="of each kind")
    parser.add_argument("--batches", type=int, default=100, help="of calls, in each job")
    options = parser.parse_args()
    found: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(options.jobs):
        for kind in ("on", "off") if number % 2 else ("off", "on"):
            env = {"LOSSYCOLL_STATUS": kind, "BATCHES": str(options.batches)}
            found[kind] += run_good("benchmarks.micro.status_page:rank_calls", 2, env)[0]
    for kind, times in found.items():
        print(f"status={kind}: least {min(times):.1f} us, median {median(times):.1f} us a call")
    print(f"least, on / off: {min(found['on']) / min(found['off']):.4f}")


if __name__ == "__main__":
    main()
