"""A rank of benchmarks.micro.commits: a file by itself, run beside the package of any commit."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

# Both go by UDP; commits that know nothing else refuse the option.
if (Path(os.environ["PYTHONPATH"]) / "lossycoll" / "options").is_dir():
    os.environ["LOSSYCOLL_LINK"] = "udp"

import torch
import torch.distributed as dist


def run(call: str, tensor: torch.Tensor, world: int) -> None:
    if call == "all_reduce":
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    elif call == "broadcast":
        dist.broadcast(tensor, 0)
    else:
        part = tensor.numel() // world
        dist.all_gather_into_tensor(tensor[: part * world], tensor[:part].clone())


def main() -> None:
    config, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = []
    for call in config["calls"]:
        for size in config["sizes"]:
            tensor = torch.ones(size // 4)
            taken = []
            for _ in range(config["iterations"]):
                dist.barrier()
                begin = time.perf_counter()
                run(call, tensor, world)
                taken.append(time.perf_counter() - begin)
            times = torch.tensor(taken[len(taken) // 3 :], dtype=torch.float64)
            dist.all_reduce(times)
            rows.append({"call": call, "bytes": size, "seconds": (times / world).tolist()})
    if rank == 0:
        out.write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
