"""A peer of benchmarks.micro.loopback_swarm: its argument is the configuration, as JSON.

Prints a JSON line for each thing that happens, until it is killed.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

import torch
from torch import nn

from lossycoll import MoshpitAverager, MoshpitSGD, Swarm

STEP_SECONDS: Final = 0.02
TIMEOUT: Final = 120.0


def say(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, "time": time.monotonic(), **fields}), flush=True)


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    values = nn.Parameter(torch.zeros(config["values"]))
    inner = torch.optim.AdamW([values], lr=1e-3)  # the first optimizer imports half of torch
    say("imported")
    with Swarm(config["listen"], config["join"], name=config["name"]) as swarm:
        model = nn.ParameterList([values])
        averager = MoshpitAverager(swarm, model, wire=config["wire"])
        optimizer = MoshpitSGD(model, inner, averager, every=config["every"], timeout=TIMEOUT)
        say("joined")
        if config["newcomer"]:
            caught = optimizer.catch_up(TIMEOUT)
            say("caught up", bytes=0 if caught is None else caught.bytes)
        else:
            averager.wait_for(config["peers"], TIMEOUT)
        while True:
            values.grad = torch.ones_like(values)
            time.sleep(STEP_SECONDS)
            report = optimizer.step()
            if report is not None:
                seconds = report.waited + report.seconds
                members, failure = len(report.members), report.failure
                how = {"round": report.round, "members": members, "failure": failure}
                say("round", seconds=seconds, **how)


if __name__ == "__main__":
    main()
