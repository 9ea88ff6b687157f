"""A peer of a swarm in a process of its own: python -m tests.support.split_peer CONFIG, as JSON.

Brings the same value to each round, so that what comes of one says whose it was the mean of. Says
where it listens, then a line of JSON for each round, until its standard input ends.
"""

from __future__ import annotations

import json
import select
import sys
from typing import Any

import numpy as np

from lossycoll.errors import OperationTimeout
from lossycoll.runtime.swarm.swarm import Swarm

VALUES = 2000
SECRET = "a secret of tests"


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main(config: dict[str, Any]) -> None:
    with Swarm(
        config.get("listen", ""),
        config.get("join", []),
        secret=SECRET,
        name=config["name"],
        may_serve=config.get("may_serve", True),
    ) as swarm:
        say(address=swarm.address if config.get("listen") else "")
        swarm.member.averages("5c" * 16)
        while not select.select([sys.stdin], [], [], 0.05)[0]:
            values = np.full(VALUES, config["own"], np.float32)
            try:
                report = swarm.member.average(values, 1.0, 5.0)
            except OperationTimeout:
                say(round=-1, failure="no group")
                continue
            say(
                round=report.round,
                number=swarm.member.number,
                members=report.members,
                contributions=report.contributions,
                failure=report.failure,
                least=float(values.min()),
                most=float(values.max()),
            )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
