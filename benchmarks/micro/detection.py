"""How soon the others notice that a rank was killed: python -m benchmarks.micro.detection

Four ranks on this machine sum small tensors without a pause; one of them is killed. What counts is
the time from the kill until the last of the others has its error (on_peer_loss=raise), or has ended
its next call without the dead rank (continue). Clock: the machine's own, the same for all.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import lossycoll
from benchmarks.common.tables import Table, add_report

TABLE = Table(
    "measured-costs.md", "detection", "`on_peer_loss` | killed | median, ms | longest, ms"
)
WORLD = 4
STEPS_BEFORE = 200


def rank_main(victim: int) -> None:
    """Prints when this rank was killed, or when it knew of the other's end."""
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    tensor = torch.ones(1000)
    try:
        for _ in range(STEPS_BEFORE):
            dist.all_reduce(tensor.fill_(1.0))
        if dist.get_rank() == victim:
            print(time.monotonic(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        while not lossycoll.stats().lost:
            dist.all_reduce(tensor.fill_(1.0))
        dist.all_reduce(tensor.fill_(1.0))
    except lossycoll.PeerLostError:
        pass
    print(time.monotonic(), flush=True)
    if lossycoll.stats().lost:
        dist.destroy_process_group()


def one_kill(mode: str, victim: int) -> float:
    """Seconds from the kill to the last survivor's notice."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(WORLD),
        "OMP_NUM_THREADS": "1",
        "LOSSYCOLL_LOG": "off",
        "LOSSYCOLL_ON_PEER_LOSS": mode,
    }
    command = [sys.executable, "-m", "benchmarks.micro.detection", "--rank-of", str(victim)]
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(WORLD)
    ]
    told = [float(rank.communicate(timeout=120)[0]) for rank in ranks]
    return max(told) - told[victim]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=8, help="of each kind (8)")
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    add_report(parser, TABLE.page)
    options = parser.parse_args()
    if options.rank_of is not None:
        rank_main(options.rank_of)
        return 0
    rows = []
    for mode in ("raise", "continue"):
        for victim in (0, WORLD - 1):
            seconds = [one_kill(mode, victim) for _ in range(options.kills)]
            found = {
                "on_peer_loss": mode,
                "victim": victim,
                "median_ms": round(1e3 * statistics.median(seconds), 1),
                "longest_ms": round(1e3 * max(seconds), 1),
            }
            print(json.dumps(found), flush=True)
            times = (f"{found[name]:.0f}" for name in ("median_ms", "longest_ms"))
            rows.append([f"`{mode}`", f"rank {victim}", *times])
    TABLE.report(options.report, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
