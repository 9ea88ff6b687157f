"""What ranks on the hosts of a laboratory do in lab/test_life.py; says what came of it as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import lossycoll

ELEMENTS = 1 << 19
ROUNDS = 3


def main() -> None:
    """A lossy all-reduce, then one of gloo beside it, each some times."""
    dist.init_process_group("lossy")
    rank, world = dist.get_rank(), dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    said: dict[str, Any] = {"rank": rank, "world": world}
    for name, group in (("lossy", None), ("gloo", gloo)):
        values = set()
        for _ in range(ROUNDS):
            tensor = torch.full((ELEMENTS,), float(rank + 1))
            dist.all_reduce(tensor, group=group)
            values |= set(tensor.unique().tolist())
        said[name] = sorted(values)
    said["missing"] = lossycoll.stats().packets_missing
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(said))


if __name__ == "__main__":
    assert int(os.environ["LOCAL_RANK"]) < int(os.environ["LOCAL_WORLD_SIZE"])
    main()
    sys.exit(0)
