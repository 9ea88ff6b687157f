"""All-reduce and messages by RDMA beside UDP, and perftest's datagrams as the limit. Two hosts:

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m benchmarks.micro.rdma

Both ways take turns on the same tensors, several calls in a row. ``ib_send_bw -c UD`` (perftest)
runs between ranks 0 and 1 over the same ports, where it is installed. Rank 0 prints medians.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import lossycoll
from benchmarks.common.results import commit, machine
from benchmarks.common.tables import write_json

WAYS: Final = ("rdma", "udp")
PERFTEST: Final = "ib_send_bw"
SIZES: Final = "4096,65536,1048576,26214400"
GOAL: Final = 0.9
"""Of perftest's bandwidth, for messages."""


@dataclass(frozen=True)
class Row:
    """One size by one way: seconds of a call, and of processor time for each packet it moved."""

    what: str
    way: str
    nbytes: int
    seconds: float
    cpu_per_packet: float

    @property
    def gbit(self) -> float:
        """Of payload that a rank sends, per second."""
        return 8e-9 * self.nbytes / self.seconds


class PortOfLog(logging.Handler):
    """Notes what the group logs of its port of RDMA."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, Any] = {}

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        if fields.get("event") == "rdma":
            self.fields = dict(fields)


def perftest_gbit(text: str) -> float | None:
    """The mean bandwidth that ib_send_bw prints with ``--report_gbits``; None: it printed none."""
    lines = [line.split() for line in text.splitlines()]
    rows = [words for words in lines if len(words) >= 4 and words[0].isdecimal()]
    return float(rows[-1][3]) if rows else None


def run_perftest(port: str, mtu: int, rank: int, server: str, seconds: float) -> float | None:
    """Gbit/s of datagrams from rank 1 to rank 0; None: it isn't installed, or failed."""
    found = re.match(r"(\S+):(\d+), GID (\d+) ", port)
    if shutil.which(PERFTEST) is None or found is None:
        return None
    device, number, gid = found.groups()
    command = [PERFTEST, "-c", "UD", "-d", device, "-i", number, "-x", gid, "-s", str(mtu)]
    command += ["--report_gbits", "-D", f"{seconds:.0f}", "-F"]
    if rank:
        time.sleep(1)  # the server listens by then
        command.append(server)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + 30, check=False
    )
    return perftest_gbit(done.stdout) if done.returncode == 0 else None


def call(what: str, data: torch.Tensor, group: dist.ProcessGroup) -> None:
    if what == "all_reduce":
        dist.all_reduce(data, group=group)
    elif dist.get_rank() == 1:
        dist.send(data, 0, group=group)
    elif dist.get_rank() == 0:
        dist.recv(data, 1, group=group)


def packets_of(group: dist.ProcessGroup) -> int:
    stats = lossycoll.stats(group=group)
    return int(stats.packets_sent + stats.packets_received)


def measure(
    what: str, nbytes: int, groups: dict[str, dist.ProcessGroup], turns: int, each: int
) -> list[Row]:
    """Medians over all turns; processor time is this process's."""
    data = torch.zeros(max(1, nbytes // 4))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu, packets = dict.fromkeys(WAYS, 0.0), dict.fromkeys(WAYS, 0)
    for turn in range(turns + 1):
        for way in WAYS if turn % 2 else WAYS[::-1]:
            dist.barrier()
            before, moved = sum(os.times()[:2]), packets_of(groups[way])
            for _ in range(each):
                begin = time.perf_counter()
                call(what, data, groups[way])
                if turn:
                    seconds[way].append(time.perf_counter() - begin)
            if turn:
                cpu[way] += sum(os.times()[:2]) - before
                packets[way] += packets_of(groups[way]) - moved
    return [
        Row(what, way, nbytes, statistics.median(seconds[way]), cpu[way] / max(1, packets[way]))
        for way in WAYS
    ]


def table(rows: Sequence[Row], limit: float | None) -> str:
    """What rank 0 prints."""
    lines = ["what          bytes  way    median, ms    Gbit/s  CPU per packet, us"]
    for row in rows:
        lines.append(
            f"{row.what:<11}{row.nbytes:>9}  {row.way:<5}{1e3 * row.seconds:>12.3f}"
            f"{row.gbit:>10.2f}{1e6 * row.cpu_per_packet:>20.2f}"
        )
    if limit is None:
        lines.append(f"the limit wasn't measured: {PERFTEST} is missing, or failed")
    else:
        best = max(row.gbit for row in rows if row.way == "rdma" and row.what == "message")
        lines.append(
            f"{PERFTEST} -c UD: {limit:.2f} Gbit/s; messages by RDMA have {best / limit:.0%} of "
            f"that, wanted {GOAL:.0%}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--sizes", default=SIZES, help="bytes (%(default)s)")
    add("--turns", type=int, default=6, help="of each way (%(default)s)")
    add("--each", type=int, default=10, help="calls in a turn (%(default)s)")
    add("--perftest-seconds", type=float, default=5.0, help="(%(default)g)")
    add("--json", type=Path, help="write the rows to this file as well")
    chosen = parser.parse_args(arguments)
    log = PortOfLog()
    logging.getLogger("lossycoll").addHandler(log)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {
        "rdma": dist.new_group(backend="lossy", pg_options={"delivery": "reliable"}),
        "udp": dist.new_group(backend="lossy", pg_options={"delivery": "reliable", "link": "udp"}),
    }
    if not log.fields.get("ranks") or log.fields["ranks"] == "none":
        print(f"no rank is reached by RDMA: {log.fields.get('why', 'see lossycoll doctor')}")
        dist.destroy_process_group()
        return 1
    port, mtu = str(log.fields["port"]), int(log.fields["mtu"])
    rows = []
    for nbytes in [int(size) for size in chosen.sizes.split(",")]:
        for what in ("all_reduce", "message"):
            rows += measure(what, nbytes, groups, chosen.turns, chosen.each)
    server = os.environ.get("MASTER_ADDR", "127.0.0.1")
    limit = None
    if dist.get_rank() < 2:
        limit = run_perftest(port, mtu, dist.get_rank(), server, chosen.perftest_seconds)
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{port}, {dist.get_world_size()} ranks, commit {commit()}, {machine()}")
        print(table(rows, limit))
        if chosen.json:
            about = {"commit": commit(), "machine": machine(), "port": port, "limit_gbit": limit}
            write_json(chosen.json, {**about, "rows": [asdict(row) for row in rows]})
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
