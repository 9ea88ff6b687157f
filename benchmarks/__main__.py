"""Runs a study of benchmarks/studies: ``python -m benchmarks NAME [OPTION ...]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from benchmarks.common import runner
from benchmarks.common.results import STUDIES


def main(arguments: Sequence[str] | None = None) -> int:
    """Hands the options to the study; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    found = STUDIES.glob("**/study.py")
    names = sorted(path.parent.relative_to(STUDIES).as_posix() for path in found)
    parser.add_argument("name", choices=names)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the study; NAME --help")
    given = parser.parse_args(arguments)
    study = import_module(f"benchmarks.studies.{given.name.replace('/', '.')}.study")
    if hasattr(study, "main"):  # it does more than its pieces
        return int(study.main(given.options))
    return runner.main(study.STUDY, given.options)


if __name__ == "__main__":
    sys.exit(main())
