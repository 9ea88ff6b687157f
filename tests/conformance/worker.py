"""``python -m tests.conformance.worker MODE WORLD [TEST ...]``: one run of the suite, as JSON
lines.

A process of its own for each mode and world size, since torch's suite fixes both on import.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from .modes import CHOICES, MODES
from .suite import Suite


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.conformance.worker")
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("world", type=int)
    parser.add_argument("tests", nargs="*", help="all, if there are none")
    parser.add_argument("--choice", choices=CHOICES, default="gloo")
    parser.add_argument("--samples", action="store_true", help="our own cases, not torch's")
    given = parser.parse_args()
    suite = Suite(MODES[given.mode], given.world, CHOICES[given.choice], samples=given.samples)
    for name in given.tests or suite.names:
        outcome = suite.run(name)
        print(json.dumps({"test": name, **asdict(outcome)}), flush=True)


if __name__ == "__main__":
    main()
