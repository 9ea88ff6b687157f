"""A peer of benchmarks.micro.swarm: ``python -m benchmarks.micro.swarm_rank CONFIG OUT``.

CONFIG is JSON: ``part``, ``mib``, and ``rounds`` where the part has a number of them, with
``bandwidth`` of each rank and ``wire`` if need be. OUT.RANK gets
what the peer saw. Rank 0 listens, the others join it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Final

import torch
from torch import nn

from benchmarks.common.lab_job import answer
from lossycoll import MoshpitAverager, MoshpitSGD, Swarm

RANK: Final = int(os.environ["RANK"])
WORLD: Final = int(os.environ["WORLD_SIZE"])
PORT: Final = 7000
STEP_SECONDS: Final = 0.05
"""Of a step of training, most of which a peer sleeps: all share the cores of one machine."""
EVERY: Final = 10
NEWCOMER_AFTER: Final = 6.0
"""Seconds, in which the others have had some rounds."""
MOST_SECONDS: Final = 120.0


def swarm(bandwidth: float = 0.0) -> Swarm:
    first = f"{os.environ['MASTER_ADDR']}:{PORT}"
    if RANK == 0:
        return Swarm(listen=first, name="0", bandwidth=bandwidth)
    return Swarm(join=[first], name=str(RANK), bandwidth=bandwidth)


def rounds(config: dict[str, Any]) -> list[dict[str, float]]:
    """Rounds of averaging ``mib`` MiB, one after another."""
    values = torch.full((int(config["mib"] * 2**18),), float(RANK))
    said = []
    said_rates = config.get("bandwidth") or [0.0] * WORLD
    with swarm(said_rates[RANK]) as joined:
        averager = MoshpitAverager(joined, [values], grid=(WORLD,), wire=config.get("wire"))
        joined.wait_for(peers=WORLD, timeout=60)
        for _ in range(config["rounds"]):
            report = averager.step(timeout=60)
            if report.failure:
                raise SystemExit(report.failure)
            said.append(
                {
                    "round": report.round,
                    "begins": time.monotonic() - report.seconds,
                    "ends": time.monotonic(),
                    "waited": report.waited,
                    "members": len(report.members),
                    "contributions": report.contributions,
                    "kept": report.kept,
                }
            )
        while RANK == 0 and len(joined.peers()) > 1:  # its directory is theirs
            time.sleep(0.05)
    return said


def newcomer(config: dict[str, Any]) -> dict[str, Any]:
    """All but the last rank train; that one comes later. AdamW has three times the parameters'
    bytes of state."""
    torch.manual_seed(RANK)
    model = nn.Linear(1, int(config["mib"] * 2**18 / 3 / 2))
    inner = torch.optim.AdamW(model.parameters())
    is_new = RANK == WORLD - 1
    if is_new:
        time.sleep(NEWCOMER_AFTER)
    begin = time.monotonic()
    said: dict[str, Any] = {}
    with swarm() as joined:
        averager = MoshpitAverager(joined, model.parameters())
        optimizer = MoshpitSGD(model, inner, averager, every=EVERY)
        if is_new:
            report = optimizer.catch_up(timeout=60)
            assert report is not None
            fields = ("round", "tries", "donors", "bytes", "seconds")
            said = {name: getattr(report, name) for name in fields}
            said["all"] = time.monotonic() - begin
        together, over, steps = 0, False, []
        # The newcomer has two rounds of all, and leaves; the others go on until then.
        while not over and time.monotonic() - begin < MOST_SECONDS:
            stepped = time.monotonic()
            optimizer.zero_grad()
            model(torch.ones(1, 1)).square().mean().backward()
            time.sleep(STEP_SECONDS)
            done = optimizer.step()
            steps.append(time.monotonic() - stepped)
            if done is not None:
                together += len(done.members) == WORLD
                over = together == 2 if is_new else together > 0 and len(done.members) < WORLD
        said["steps"] = steps
    return said


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ.setdefault("LOSSYCOLL_LOG", "warning")
    found = {"rounds": rounds, "newcomer": newcomer}[config["part"]](config)
    answer(found)


if __name__ == "__main__":
    main()
