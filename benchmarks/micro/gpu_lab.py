"""All-reduce of CUDA tensors over a link that loses packets: python -m benchmarks.micro.gpu_lab

NCCL over its sockets, this backend with lossy delivery, and gloo, in turns, between two hosts of a
laboratory (docs/lab.md says what that needs) whose ranks share one GPU. Each time is from a barrier
until the device has done all; rank 0's clock, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import lab_job
from benchmarks.common.results import ROOT, commit, machine
from benchmarks.common.tables import fill, markdown, write_json
from lossycoll import _autoload
from lossycoll.cli.argtypes import real, whole
from lossycoll.cli.bench import nccl
from lossycoll.cli.launcher import EventWriter
from lossycoll.lab import Lab, Link, Network

BACKENDS = ("nccl", "lossy", "gloo")
JOB_SECONDS = 300.0


def report(found: Mapping[str, Any], folder: Path) -> None:
    """gpu-lab.json, and the table between the marks of gpu.md."""
    write_json(folder / "gpu-lab.json", found)
    rows = [
        [
            f"{row['bytes']:,}",
            *(f"{1e3 * row['median'][name]:.0f}" for name in BACKENDS),
            f"{row['median']['nccl'] / row['median']['lossy']:.1f}",
        ]
        for row in found["rows"]
    ]
    head = ["bytes", "NCCL, ms", "lossy, ms", "gloo, ms", "NCCL / lossy"]
    fill(folder / "gpu.md", {"gpu-nccl": markdown(head, rows)})


def rank_main(config: dict[str, Any], out: Path) -> None:
    _autoload.register()
    rank = int(os.environ["RANK"])
    os.environ |= {**nccl.SHARED, "NCCL_HOSTID": f"lossycoll-rank-{rank}"}
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    groups = {}
    for name in BACKENDS:
        options = {"delivery": "lossy"} if name == "lossy" else None
        groups[name] = dist.new_group(backend=name, pg_options=options)
    events = EventWriter(out) if rank == 0 else None
    for nbytes in config["sizes"]:
        tensor = torch.ones(nbytes // 4, device="cuda")
        seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
        for turn in range(config["turns"] + 1):
            for name, group in groups.items():
                torch.cuda.synchronize()
                dist.barrier()
                begin = time.perf_counter()
                dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)
                torch.cuda.synchronize()
                if turn:
                    seconds[name].append(time.perf_counter() - begin)
        if events is not None:
            events.write(
                bytes=nbytes,
                median={name: statistics.median(found) for name, found in seconds.items()},
                seconds=seconds,
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--loss", type=real(0, 1), default=0.01, help="share of packets lost (%(default)g)")
    add("--delay", type=real(0), default=20.0, help="round trip in ms (%(default)g)")
    add("--sizes", default="65536,1048576,4194304,26214400", help="bytes (%(default)s)")
    add("--turns", type=whole(1), default=5, help="of each backend (%(default)s)")
    add("--report", type=Path, help="folder of gpu.md, for the table and gpu-lab.json")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    network = Network(link=Link(loss=options.loss, delay_ms=options.delay / 2))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder, Lab(network) as lab:
        out = Path(folder) / "events"
        lab_job.run_job(
            lab,
            "benchmarks.micro.gpu_lab",
            {"sizes": sizes, "turns": options.turns},
            JOB_SECONDS,
            {"PYTHONPATH": path},
            out=out,
        )
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        times = ", ".join(f"{name} {1e3 * row['median'][name]:.1f} ms" for name in BACKENDS)
        print(f"{row['bytes']} bytes: {times}")
    if options.report:
        about = {"commit": commit(), "machine": machine(), "loss": options.loss}
        report({**about, "delay_ms": options.delay, "rows": rows}, options.report)
    return 0


if __name__ == "__main__":
    if os.environ.get("RANK") is None:
        sys.exit(main())
    rank_main(json.loads(sys.argv[1]), Path(sys.argv[2]))
