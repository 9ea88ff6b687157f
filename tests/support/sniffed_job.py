"""A job whose packets are all looked at, in clear and sealed. In a network of its own, so that no
other job's are seen.

python -m tests.support.sniffed_job
"""

from __future__ import annotations

import socket
import subprocess
from importlib import import_module
from typing import Any

from .harness import init, run_good
from .sniffer import Sniffer

SECRET = {"LOSSYCOLL_SECRET": "a secret of tests", "LOSSYCOLL_LINK": "udp"}
PLANTED = b"planted by a test of seals .."


def rank_calls(rank: int, world: int) -> dict[str, Any]:
    """Says the planted text in each way there is, and returns what was refused."""
    import torch
    import torch.distributed as dist

    import lossycoll

    init()
    planted = torch.frombuffer(bytearray(PLANTED * 4000), dtype=torch.uint8)
    text = planted.clone() if rank == 0 else torch.zeros_like(planted)
    dist.broadcast(text, 0)
    assert torch.equal(text, planted)
    total = torch.full((100_000,), float(rank + 1))
    with lossycoll.reliable():
        dist.all_reduce(total)
    assert (total == sum(range(1, world + 1))).all()
    lossycoll.rekey()
    said: list[Any] = [None] * world
    dist.all_gather_object(said, ("planted by rank", rank))
    assert said == [("planted by rank", other) for other in range(world)]
    if rank == 0:
        dist.send(planted, 1)
    elif rank == 1:
        dist.recv(text, 0)
        assert torch.equal(text, planted)
    part = dist.new_group([0, world - 1])
    if rank in (0, world - 1):
        dist.all_reduce(total, group=part)
        assert (total == 2 * sum(range(1, world + 1))).all()
    stats = lossycoll.stats()
    dist.barrier()
    dist.destroy_process_group()
    return {
        "refused": stats.malformed + stats.foreign + stats.forged + stats.replayed,
        "control": stats.control_foreign,
    }


def main() -> None:
    rank_calls = import_module("tests.support.sniffed_job").rank_calls  # ranks find it by that name

    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    patterns = (PLANTED, b"planted by rank", b'["hello",', socket.gethostname().encode() + b" pid ")
    for env, shows in (({"LOSSYCOLL_LINK": "udp"}, True), (SECRET, False)):
        with Sniffer() as sniffer:
            run_good(rank_calls, 3, env)
        assert len(sniffer.packets) > 100
        found = {pattern: sniffer.shows(pattern) for pattern in patterns}
        assert found == dict.fromkeys(patterns, shows), (env, found)


if __name__ == "__main__":
    main()
