"""A peer of tools.swarm_soak: ``python -m tools.swarm_soak_peer CONFIG``, CONFIG as JSON.

Trains nothing: its steps change nothing, so all that happens to its parameters is averaging. Prints
a JSON line after each round, until its standard input ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any, Final

import torch
from torch import Tensor, nn

from lossycoll import MoshpitAverager, MoshpitSGD, Swarm
from lossycoll.errors import LossyError

VALUES: Final = 20_000
LEAST_SECONDS: Final = 0.3
"""From round to round."""


def values_of(peer: int) -> Tensor:
    """What a peer begins with: independent of the others', of mean 0 and variance 1."""
    return torch.randn(VALUES, generator=torch.Generator().manual_seed(peer))


def mean_of(peers: int) -> Tensor:
    """Of what all begin with."""
    return torch.stack([values_of(peer) for peer in range(peers)]).mean(0)


def resources() -> dict[str, int]:
    """Bytes of memory and descriptors of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    bytes_of_page = os.sysconf("SC_PAGE_SIZE")
    return {"memory": pages * bytes_of_page, "descriptors": len(os.listdir("/proc/self/fd"))}


def say(**fields: Any) -> None:
    print(json.dumps({"time": time.monotonic(), **fields, **resources()}), flush=True)


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    ends = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ends.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    model = nn.Module()
    model.values = nn.Parameter(values_of(config["peer"]))
    target = mean_of(config["peers"])
    with Swarm(config["listen"], config["join"], name=f"peer {config['peer']}") as swarm:
        averager = MoshpitAverager(swarm, model.parameters(), grid=config["grid"])
        optimizer = MoshpitSGD(
            model, torch.optim.SGD(model.parameters(), lr=0.0), averager, timeout=30.0
        )
        if config["again"]:
            caught_up = optimizer.catch_up(timeout=60.0)
            say(kind="caught up", report=None if caught_up is None else caught_up.seconds)
        while not ends.is_set():
            begin = time.monotonic()
            try:
                report = optimizer.step()
            except LossyError as error:
                if not ends.is_set():  # else others have gone before
                    say(kind="error", error=f"{type(error).__name__}: {error}")
                continue
            assert report is not None
            with torch.no_grad():
                off = float((model.values - target).square().mean())
            say(
                kind="round",
                round=report.round,
                members=len(report.members),
                missing=len(report.missing),
                contributions=report.contributions,
                kept=report.kept,
                failure=report.failure,
                off=off,
                seconds=time.monotonic() - begin,
            )
            ends.wait(max(0.0, LEAST_SECONDS - (time.monotonic() - begin)))


if __name__ == "__main__":
    main()
