"""Watch running jobs: a table of ranks, the worst first, and the peers of
swarms (docs/operate.md)."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from rich.console import Console, Group, JustifyMethod
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lossycoll.runtime.world.job_status import ALIVE, DEAD, LEFT, STATES, in_words, is_over

from .argtypes import real
from .status import PLACE_HELP, Found, Job, Unreachable, culprits, look, no_job, swarms_as_text

Rank = Mapping[str, Any]
MOST_TROUBLES: Final = 4
HEADINGS: Final = MOST_TROUBLES + 4
"""Lines of a job besides its ranks."""
SHRINK: Final = ("call", "process")
"""Columns from which what doesn't fit is taken."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("place", metavar="HOST:PORT", nargs="?", help=PLACE_HELP)
    how = "time between two looks (default 1)"
    add("--every", type=real(0.1), default=1.0, metavar="SECONDS", help=how)
    add("--once", action="store_true", help="print one table, and end")


def run(options: argparse.Namespace) -> int:
    console = Console()
    if options.once or not console.is_terminal:
        console.print(view(look(options.place), console.width, None))
        return 0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                shown = view(look(options.place), console.width, console.height)
            except Unreachable as error:
                shown = Group(Text(str(error)))
            live.update(shown, refresh=True)
            time.sleep(options.every)


def _worst_link(rank: Rank) -> Mapping[str, Any]:
    return max(rank["link"], key=lambda link: link["loss"], default={})


def _sum(rank: Rank, name: str) -> float:
    return float(sum(link[name] for link in rank["link"]))


def _rate(rank: Rank) -> str:
    allowed = decimal(int(_sum(rank, "bytes_per_second")), precision=0)
    return f"{allowed}/s" if rank["link"] else ""


def _loss(rank: Rank) -> str:
    worst = _worst_link(rank)
    return f"{worst['loss']:.1%} to {worst['rank']}" if worst.get("loss") else ""


def _by(rank: Rank) -> str:
    kinds = sorted({link["by"].replace("shared_memory", "shm") for link in rank["link"]})
    return ",".join(kinds) + ("*" if rank["sealed"] else "")


def _wait(rank: Rank) -> str:
    is_over = rank["call"] is None or rank["state"] in (DEAD, LEFT)
    return "" if is_over else in_words(rank["call_seconds"])


def _waits(rank: Rank) -> str:
    found = rank["waits_for"]
    return ",".join(map(str, found[:4])) + (f"+{len(found) - 4}" if len(found) > 4 else "")


COLUMNS: Final[tuple[tuple[int, str, JustifyMethod, Callable[[Rank], str]], ...]] = (
    (0, "rank", "right", lambda rank: str(rank["rank"])),
    (0, "state", "left", lambda rank: rank["state"]),
    (0, "for", "right", _wait),
    (0, "waits", "left", _waits),
    (60, "call", "left", lambda rank: rank["call"] or ""),
    (80, "step", "right", lambda r: in_words(r["step_seconds"]) if r["step_seconds"] else ""),
    (80, "loss", "left", _loss),
    (90, "missing", "right", lambda rank: f"{rank['missing']:.2%}" if rank["missing"] else ""),
    (140, "recovered", "right", lambda rank: str(rank["recovered"] or "")),
    (110, "rate", "right", _rate),
    (140, "queue", "right", lambda rank: in_words(_sum(rank, "queue_seconds"))),
    (100, "by", "left", _by),
    (120, "process", "left", lambda r: f"{r['host']}/{r['pid']}" if r["tells"] else ""),
)
"""The least width of a terminal that shows it, its heading, its side, and a rank's text."""


def view(found: Found, width: int, height: int | None) -> Group:
    """All jobs, those that run first, then the swarms, in so many columns and lines (None: as many
    as it takes)."""
    swarms = swarms_as_text(found)
    if not found.jobs and not swarms:
        return Group(Text(no_job()))
    parts: list[Any] = []
    left = height
    for job in sorted(found.jobs, key=is_over):
        room = None if left is None else max(1, left - HEADINGS)
        parts += _job(job, width, room)
        if left is not None:
            left -= HEADINGS + min(room or 1, len(job["ranks"]))
            if left <= HEADINGS:
                return Group(*parts)
    lines = "\n\n".join(swarms).splitlines()
    parts += [Text(line, overflow="ellipsis", no_wrap=True) for line in lines[:left]]
    return Group(*parts)


def _job(job: Job, width: int, most: int | None) -> Iterable[Any]:
    states = {state: sum(r["state"] == state for r in job["ranks"]) for state in STATES}
    counts = ", ".join(f"{n} {state}" for state, n in states.items() if n)
    yield Text(f"job {job['session']}: {counts}", overflow="ellipsis", no_wrap=True)
    for line in culprits(job)[:MOST_TROUBLES] if not is_over(job) else []:
        yield Text(line, style="bold", overflow="ellipsis", no_wrap=True)
    ranks = worst_first(job)
    shown = ranks if most is None else ranks[:most]
    columns = [column for column in COLUMNS if column[0] <= width]
    table = Table(box=None, pad_edge=False, width=width if width < 60 else None)
    for _, heading, side, _ in columns:
        table.add_column(heading, justify=side, no_wrap=heading not in SHRINK, overflow="ellipsis")
    for rank in shown:
        style = "" if rank["state"] == ALIVE else "bold red"
        cells = (Text(text(rank), no_wrap=True, overflow="ellipsis") for *_, text in columns)
        table.add_row(*cells, style=style)
    yield table
    if len(shown) < len(ranks):
        yield Text(f"and {len(ranks) - len(shown)} more ranks")


def worst_first(job: Job) -> list[Rank]:
    """Ranks that others wait for, those that are not alive, then by loss and time in a call."""
    waited = Counter(other for rank in job["ranks"] for other in rank["waits_for"])

    def order(rank: Rank) -> tuple[Any, ...]:
        loss = round(_worst_link(rank).get("loss", 0.0), 2)
        seconds = rank["call_seconds"] or 0.0
        state = STATES.index(rank["state"])
        return -waited[rank["rank"]], state, -loss, -round(seconds), rank["rank"]

    return sorted(job["ranks"], key=order)
