"""A peer of a swarm in a process of its own: python -m tests.support.swarm_peer ADDRESS NAME

Averages one number until it is told to stop by the end of its standard input; a line of JSON for
each round.
"""

from __future__ import annotations

import json
import select
import sys

import numpy as np

from lossycoll.runtime.swarm.swarm import Swarm

VALUES = 20_000


def main(address: str, name: str, own: float) -> None:
    with Swarm(join=[address], secret="a secret of tests", name=name) as swarm:
        swarm.member.averages("5c" * 16)
        values = np.full(VALUES, own, np.float32)
        while not select.select([sys.stdin], [], [], 0.02)[0]:
            report = swarm.member.average(values, 1.0, 30.0)
            found = {
                "round": report.round,
                "members": report.members,
                "missing": report.missing,
                "failure": report.failure,
                "least": float(values.min()),
                "most": float(values.max()),
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
