"""A peer of benchmarks.micro.mass_restart, by the command line of a supervisor.

python -m benchmarks.micro.mass_restart_peer CONFIG, CONFIG as JSON. Each step adds 1 to all
parameters, so a mean of states tells how many steps they have had. Prints a JSON line for each
thing that happens, until it is killed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from lossycoll import LossyError, MoshpitAverager, MoshpitSGD, Swarm

VALUES: Final = 20_000
BATCH: Final = 8
EVERY: Final = 5
STEP_SECONDS: Final = 0.05


def say(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, "time": time.monotonic(), **fields}), flush=True)


def train(swarm: Swarm, values: nn.Parameter, inner: torch.optim.Optimizer, path: Path) -> None:
    """The lines of docs/swarms.md: the checkpoint, the others' state, then steps."""
    model = nn.ParameterList([values])
    averager = MoshpitAverager(swarm, model)
    optimizer = MoshpitSGD(model, inner, averager, every=EVERY, timeout=30.0)
    session = swarm.member.session

    def tell(kind: str, **fields: Any) -> None:
        mean = float(values.detach().mean())
        say(kind, session=session, samples=optimizer.samples, value=mean, **fields)

    tell("joined")
    if path.exists():
        optimizer.load(path)
        tell("loaded")
    try:
        optimizer.catch_up()
    except LossyError as error:  # with this peer's own state, as the guide says
        tell("not caught up", why=str(error))
    while True:
        time.sleep(STEP_SECONDS)
        values.grad = torch.full_like(values, -1.0)
        report = optimizer.step(weight=BATCH)
        if report is None:
            continue
        members = len(report.members)
        tell("round", round=report.round, members=members, failure=report.failure)
        if not report.failure:
            optimizer.save(path)


def main() -> None:
    torch.set_num_threads(1)
    config = json.loads(sys.argv[1])
    values = nn.Parameter(torch.zeros(VALUES))
    inner = torch.optim.SGD([values], lr=1.0)  # the first optimizer imports half of torch
    say("imported")
    with Swarm(config["listen"], config["join"], name=config["name"]) as swarm:
        train(swarm, values, inner, Path(config["checkpoint"]))


if __name__ == "__main__":
    main()
