"""Predict what collectives take on a network (docs/simulate.md), or a swarm's rounds."""

from __future__ import annotations

import argparse
from typing import Final

from . import collective, control, moshpit, training

PARTS: Final = {
    "collective": collective,
    "training": training,
    "moshpit": moshpit,
    "control": control,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="what", required=True, metavar="what")
    for name, module in PARTS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.add_arguments(parts.add_parser(name, help=summary, description=summary))


def run(options: argparse.Namespace) -> int:
    """Runs the part that was named; returns the exit status."""
    status: int = PARTS[options.what].run(options)
    return status
