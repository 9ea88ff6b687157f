"""What sums in the order of ranks cost: python -m benchmarks.micro.rank_order

The same processes add up as packets come and in the order of ranks (option ``deterministic``), in
turns, by shared memory and by UDP over loopback. A time is from the last rank's begin to the last
one's end; medians. Beside them: the share of the packets of sums that waited, and the most memory
that a call took for them, at the rank where each was most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import lossycoll
from benchmarks.common import local_job, tables
from benchmarks.common.rank_kit import between_ranks
from lossycoll.cli.argtypes import human, whole
from lossycoll.cli.launcher import EventWriter

SIZES: Final = {4096: 200, 1 << 20: 40, 25 << 20: 8}
"""Bytes, and the calls of a turn."""
LEFT_OUT: Final = 1 / 4
"""Of each turn: the first calls."""
LINKS: Final = ("shared memory", "UDP")
TABLE: Final = tables.Table(
    "performance.md",
    "rank-order",
    "link | ranks | size | as they come, ms | by rank, ms | times | waited | MB",
    keys=3,
)


def measure(rounds: int) -> list[dict[str, Any]]:
    """A rank's rows: link, size, way, begin and end, and what its report says."""
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    udp = dist.new_group(pg_options=lossycoll.Options(link="udp"))
    found: list[dict[str, Any]] = []
    for link, group in zip(LINKS, (None, udp), strict=True):
        for size, each in SIZES.items():
            data = torch.zeros(size // 4)
            for turn in range(2 * rounds):
                for nth in range(each):
                    with lossycoll.reliable(deterministic=turn % 2):
                        dist.barrier(group=group)
                        began = time.monotonic()
                        dist.all_reduce(data, group=group)
                        ended = time.monotonic()
                    if nth < each * LEFT_OUT:
                        continue
                    report = lossycoll.last_report(group)
                    assert report is not None
                    found.append(
                        {
                            "of": (link, size, turn % 2),
                            "time": (began, ended),
                            "waited": report.order_kept / max(1, report.packets_received),
                            "bytes": report.order_bytes,
                        }
                    )
    dist.destroy_process_group()
    return found


def rows(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[str]]:
    """Of TABLE, from what each rank has measured, in order."""
    times: dict[tuple[str, int, int], list[float]] = {}
    waited: dict[tuple[str, int], list[float]] = {}
    for row in zip(*ranks, strict=True):
        link, size, ordered = row[0]["of"]
        times.setdefault((link, size, ordered), []).append(between_ranks([o["time"] for o in row]))
        if ordered:
            most = waited.setdefault((link, size), [0.0, 0.0])
            most[0] = max(most[0], *(one["waited"] for one in row))
            most[1] = max(most[1], *(one["bytes"] for one in row))
    found = []
    for (link, size), (share, most_bytes) in waited.items():
        free, ordered = (1e3 * statistics.median(times[link, size, way]) for way in (0, 1))
        cells = (link, len(ranks), human(size), f"{free:.3g}", f"{ordered:.3g}")
        more = (f"{ordered / free:.2f}", f"{share:.0%}", f"{most_bytes / 1e6:.2f}")
        found.append([*map(str, cells), *more])
    return found


def main() -> int:
    if len(sys.argv) == 2 and Path(sys.argv[1]).is_file():
        config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        found = measure(config["rounds"])
        EventWriter(config["events"]).write(rank=int(os.environ["RANK"]), found=found)
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=whole(2), action="append", help="(2, 4 and 8)")
    parser.add_argument("--rounds", type=whole(1), default=4, help="turns (%(default)s)")
    tables.add_report(parser, TABLE.page)
    options = parser.parse_args()
    every = []
    for ranks in options.ranks or (2, 4, 8):
        events = local_job.run_job("benchmarks.micro.rank_order", {"rounds": options.rounds}, ranks)
        events.sort(key=lambda event: int(event["rank"]))
        every += rows([one["found"] for one in events])
        print(*every[-1], sep=" | ", file=sys.stderr, flush=True)
    print(TABLE.report(options.report, every))
    return 0


if __name__ == "__main__":
    sys.exit(main())
