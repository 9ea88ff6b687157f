"""Moshpit All-Reduce and what it competes with: rounds that a swarm needs, where peers fail."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import track
from rich.table import Table

from lossycoll.cli.argtypes import share, whole
from lossycoll.cli.plotting import drawn, must_be_png
from lossycoll.errors import OptionError
from lossycoll.plan.grid import Grid, parse
from lossycoll.simulate.averaging import METHODS, rounds_to

TARGETS: Final = {"1e-9": 1e-9, "1e-4": 1e-4}
"""Variances, as the published table has them."""
MOST_PEERS: Final = 1 << 17
MOST_ROUNDS: Final = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--peers", type=whole(2, MOST_PEERS), default=512, help="how many there are (default 512)")
    add("--grid", type=_grid, default=Grid((32, 32)), help="the grid's shape (default 32x32)")
    add(
        "--failure",
        type=share,
        default=0.0,
        help="probability that a peer fails in a round (default 0)",
    )
    add("--seeds", type=whole(1, 10_000), default=40, help="runs, seeded from 0 on (default 40)")
    add("--json", action="store_true", help="print the result as JSON, not as a table")
    add("--picture", type=Path, metavar="FILE.png", help="where to draw variances round by round")


def run(options: argparse.Namespace) -> int:
    """Prints mean rounds to each variance, method by method; returns the exit status."""
    must_be_png(options.picture)
    peers, grid, failure = options.peers, options.grid, options.failure
    if peers > grid.cells:
        raise OptionError(
            f"{peers} peers don't fit into --grid {grid}, which has {grid.cells} cells"
        )
    # With --json, standard output carries the JSON and nothing else.
    console, errors = Console(stderr=options.json), Console(stderr=True)
    found = {}
    for name in _shown(METHODS, errors):
        rounds = rounds_to(
            METHODS[name], peers, grid, failure, list(TARGETS.values()), seeds=options.seeds
        )
        found[name] = dict(zip(TARGETS, rounds, strict=True))
    if options.json:
        print(json.dumps(found, allow_nan=False))
    else:
        console.print(_table(found, f"{peers} peers, grid {grid}, failure {failure:g}"))
    if options.picture is not None and drawn(
        "lossycoll.cli.simulate.moshpit_plot", errors, peers, grid, failure, options.picture
    ):
        console.print(f"picture: {options.picture}", markup=False, highlight=False)
    return 0


def _grid(text: str) -> Grid:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _shown(names: Iterable[str], errors: Console) -> Iterable[str]:
    """The names, with a bar of progress where somebody sees it."""
    return track(
        list(names), "simulating", console=errors, transient=True, disable=not errors.is_terminal
    )


def _table(found: dict[str, dict[str, float]], title: str) -> Table:
    table = Table(title=f"Rounds until the variance is below, {title}")
    table.add_column("method")
    for target in TARGETS:
        table.add_column(target, justify="right")
    for name, rounds in found.items():
        shown = [
            f"{mean:.1f}" if mean < MOST_ROUNDS else f"{MOST_ROUNDS} +" for mean in rounds.values()
        ]
        table.add_row(name, *shown)
    return table
