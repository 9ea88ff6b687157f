"""Watch running jobs: a table of ranks, the worst first, and the peers of
swarms (docs/operate.md)."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console, Group
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


@dataclass(frozen=True, slots=True)
class Column:
    """A column. Of those that don't fit, the ones with the greatest ``from_width`` go first."""

    heading: str
    text: Callable[[Rank], str]
    from_width: int
    is_number: bool = True


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


CALL: Final = Column("call", lambda rank: rank["call"] or "", 60, False)
LEAST_CALL: Final = 16
GAP: Final = 2
"""After each column."""
COLUMNS: Final = (
    Column("rank", lambda rank: str(rank["rank"]), 0),
    Column("state", lambda rank: rank["state"], 0, False),
    Column("for", _wait, 0),
    Column("waits", _waits, 0, False),
    CALL,
    Column("step", lambda r: in_words(r["step_seconds"]) if r["step_seconds"] else "", 80),
    Column("loss", _loss, 80, False),
    Column("missing", lambda rank: f"{rank['missing']:.2%}" if rank["missing"] else "", 90),
    Column("recovered", lambda rank: str(rank["recovered"] or ""), 130),
    Column("rate", _rate, 110),
    Column("queue", lambda rank: in_words(_sum(rank, "queue_seconds")), 130),
    Column("by", _by, 100, False),
    Column("process", lambda r: f"{r['host']}/{r['pid']}" if r["tells"] else "", 120, False),
)


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
    table = Table(box=None, pad_edge=False, width=width if width < 60 else None)
    cells = {column: [column.text(rank) for rank in shown] for column in COLUMNS}
    widths = _fitting(cells, width)
    for column, wide in widths.items():
        table.add_column(
            column.heading,
            justify="right" if column.is_number else "left",
            no_wrap=True,
            overflow="ellipsis",
            max_width=wide,
        )
    for number, rank in enumerate(shown):
        style = "" if rank["state"] == ALIVE else "bold red"
        table.add_row(*(Text(cells[column][number]) for column in widths), style=style)
    yield table
    if len(shown) < len(ranks):
        yield Text(f"and {len(ranks) - len(shown)} more ranks")


def _fitting(cells: Mapping[Column, Sequence[str]], width: int) -> dict[Column, int]:
    """The columns that fit side by side, and how wide each is: the least important ones go, and the
    call's text takes what is left."""
    widths = {column: max(map(len, (column.heading, *texts))) for column, texts in cells.items()}
    whole = widths[CALL]
    widths[CALL] = min(whole, LEAST_CALL)
    for column in sorted(cells, key=lambda one: -one.from_width):
        left = width - sum(widths.values()) - GAP * len(widths)
        if left >= 0 or not column.from_width:
            break
        del widths[column]
    if CALL in widths:
        left = width - sum(widths.values()) - GAP * len(widths)
        widths[CALL] = min(whole, widths[CALL] + max(0, left))
    return widths


def worst_first(job: Job) -> list[Rank]:
    """Ranks that others wait for, those that are not alive, then by loss and time in a call."""
    waited = Counter(other for rank in job["ranks"] for other in rank["waits_for"])

    def order(rank: Rank) -> tuple[Any, ...]:
        loss = round(_worst_link(rank).get("loss", 0.0), 2)
        seconds = rank["call_seconds"] or 0.0
        state = STATES.index(rank["state"])
        return -waited[rank["rank"]], state, -loss, -round(seconds), rank["rank"]

    return sorted(job["ranks"], key=order)
