"""What ranks do in lab/test_congestion.py; says how the path looked to them as JSON."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

import lossycoll

ELEMENTS = 1 << 19
ROUNDS = 14


def main() -> None:
    dist.init_process_group("lossy")
    rank = dist.get_rank()
    tensor = torch.empty(ELEMENTS)
    for _ in range(ROUNDS):
        tensor.fill_(float(rank + 1))
        dist.all_reduce(tensor)
    stats = lossycoll.stats()
    peer = stats.peers[1 - rank]
    figures = {
        "rate": peer.rate,
        "rtt_ns": peer.rtt_ns,
        "window": peer.window,
        "missing": stats.packets_missing,
        "values": sorted(set(tensor.unique().tolist())),
    }
    print(json.dumps(figures) + "\n", end="")  # at once: the log writes to the same file
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
