"""The control plane of a large job: start, deaths and heartbeats, by its state machines."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from lossycoll.cli.argtypes import real, whole
from lossycoll.options.fields import Options
from lossycoll.simulate.control import Control, Told, simulate_control


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=whole(4), default=1000, metavar="N", help="of the job (%(default)s)")
    text = "option of that name, which says when a silent rank is lost (%(default)s)"
    default = Options().liveness
    add("--liveness", type=real(0.1), default=default, metavar="SECONDS", help=text)
    text = "longest way of a message from one host to another (%(default)s)"
    add("--delay-ms", type=real(0), default=1.0, metavar="MS", help=text)
    add("--seed", type=whole(0), default=0, metavar="N", help="of all chance (%(default)s)")
    add("--json", action="store_true", help="print the result as JSON, not as a table")


def run(options: argparse.Namespace) -> int:
    """Prints what was found; returns the exit status."""
    found = simulate_control(
        options.ranks,
        liveness=options.liveness,
        delay=1e-3 * options.delay_ms,
        seed=options.seed,
    )
    if options.json:
        print(json.dumps(asdict(found), allow_nan=False))
    else:
        Console().print(table(found))
    return 0


def table(found: Control) -> Table:
    """A row for each thing that may happen."""
    out = Table(title=f"coordinator of {found.ranks:,} ranks, liveness {found.liveness:g} s")
    for column in ("", "half know", "all know", "coordinator busy"):
        out.add_column(column, justify="right" if column else "left")
    out.add_row("start: all are here", "", _seconds(found.ready), _seconds(found.ready_busy))
    deaths: list[tuple[str, Told]] = [
        ("a process ends", found.ended),
        ("a host falls silent", found.silent),
        ("the coordinator ends", found.coordinator),
    ]
    for name, told in deaths:
        out.add_row(name, _seconds(told.median), _seconds(told.last), _seconds(told.busy))
    out.add_row("all follow the next one", "", _seconds(found.followed))
    out.caption = (
        f"heartbeats: {found.messages:,.0f} messages and {found.bytes / 1000:,.1f} KB a second, "
        f"{found.busy:.2%} of a processor; {found.descriptors:,} descriptors, "
        f"{found.memory / 1e6:,.0f} MB for connections"
    )
    return out


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"
