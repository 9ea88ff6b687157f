"""``python -m tests.conformance.worker MODE WORLD [TEST ...]``: one run of the suite, as JSON
lines.

A process of its own for each mode and world size, since torch's suite fixes both on import.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import asdict

from .fresh import FreshRanks
from .modes import CHOICES, MODES
from .suite import LIMIT_SECONDS, Suite


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.conformance.worker")
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("world", type=int)
    parser.add_argument("tests", nargs="*", help="all, if there are none")
    parser.add_argument("--choice", choices=CHOICES, default="gloo")
    parser.add_argument("--samples", action="store_true", help="our own cases, not torch's")
    parser.add_argument("--one-gpu", action="store_true", help="tests about GPUs, on GPU 0")
    parser.add_argument("--fresh", action="store_true", help="ranks that aren't forks")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for a test")
    parser.add_argument("--part", default="1/1", help="2/3: the second third of the tests")
    given = parser.parse_args()
    suite = Suite(
        *(MODES[given.mode], given.world, CHOICES[given.choice]),
        samples=given.samples,
        one_gpu=given.one_gpu,
        limit=given.limit,
    )
    tests = "samples" if given.samples else "gpu"
    fresh = FreshRanks((given.mode, str(given.world), tests), given.world, suite.skips)
    if given.one_gpu or given.fresh:
        suite.run_in(fresh)
    part, parts = (int(number) for number in given.part.split("/"))
    with contextlib.closing(fresh):
        for name in (given.tests or suite.names)[part - 1 :: parts]:
            outcome = suite.run(name)
            print(json.dumps({"test": name, **asdict(outcome)}), flush=True)


if __name__ == "__main__":
    main()
