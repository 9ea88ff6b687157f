"""``lossycoll doctor --peer HOST:PORT``: a running job, asked by a rank's control port.

Ranks answer no stranger by UDP: their links are as they measure them, and TCP is tried from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from lossycoll.cli import status
from lossycoll.runtime.control.schema import Address
from lossycoll.runtime.engine.failures import place_text
from lossycoll.runtime.world import job_status

from ..checks import Finding, Findings, Severity, fail_unless, warn_unless
from .arrivals import LOSSY, LOSSY_ADVICE

CONNECT_SECONDS: Final = 2.5
MOST_CONNECTIONS: Final = 128
"""At a time: a process may have 1024 files."""
_NO_FILES: Final = {os.strerror(code).lower() for code in (errno.EMFILE, errno.ENFILE)}
MOST_LINKS: Final = 32
"""Links that have a line; the worst ones of more."""
_SILENT_ADVICE: Final = (
    "let the firewalls between the two pass UDP, both ways (LOSSYCOLL_PORT_RANGE says which "
    "ports); only data is missing: look for a filter of packets by content"
)
_GONE_ADVICE: Final = (
    "look at that rank's log: its process may have ended, or live on, cut off from the others"
)


def examine(place: str) -> list[Finding]:
    """What the job of the rank at ``place`` tells. CommandError: nobody answers there."""
    session, places, records = status.ask(place)
    job = job_status.job_of(session, records) if records else None
    text = f"{session}, {len(places)} ranks; `lossycoll status {place}` tells more"
    found = [Finding("job", text)]
    ranks = job["ranks"] if job else [{"rank": n, "state": ""} for n in range(len(places))]
    lost = job_status.given_up(records)
    wanted = [
        (rank["rank"], at)
        for rank, at in zip(ranks, places, strict=True)
        if not _is_over(rank, lost)
    ]
    found.append(_reached(wanted, asyncio.run(_try([at for _, at in wanted]))))
    if job is None:
        advice = "run the ranks without LOSSYCOLL_STATUS=off; their logs say if it is another cause"
        return [*found, warn_unless(False, "links", "the ranks tell nothing of them", advice)]
    return [*found, *_links(job, lost)]


def _is_over(rank: Mapping[str, Any], lost: Collection[int]) -> bool:
    """True if a rank has left or its process is known to have ended: nothing is amiss without it.
    ``lost``: what the others have merely given up may live on behind a dead link."""
    is_dead = rank["state"] == job_status.DEAD and rank["rank"] not in lost
    return is_dead or rank["state"] == job_status.LEFT


async def _try(places: Sequence[tuple[str, int]]) -> list[str]:
    """Reason why each can't be reached by TCP; "": it can."""

    room = asyncio.Semaphore(MOST_CONNECTIONS)

    async def connect(host: str, port: int) -> str:
        async with room:
            try:
                connecting = asyncio.open_connection(host, port)
                _, writer = await asyncio.wait_for(connecting, CONNECT_SECONDS)
            except asyncio.TimeoutError:
                return "no answer"
            except OSError as error:
                return os.strerror(error.errno or 0).lower()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            return ""

    return await asyncio.gather(*(connect(*place) for place in places))


def _reached(places: Sequence[tuple[int, Address]], troubles: Sequence[str]) -> Finding:
    blocked = [
        f"rank {rank} at {place_text(*place)} ({why})"
        for (rank, place), why in zip(places, troubles, strict=True)
        if why and why not in _NO_FILES
    ]
    untried = sum(why in _NO_FILES for why in troubles)
    reached = len(places) - untried - len(blocked)
    text = f"all {len(places)} ports of the ranks are reached from here"
    if reached < len(places):
        text = f"{reached} of {len(places)} ports are reached from here"
    if blocked:
        more = f" and {len(blocked) - 4} more" if len(blocked) > 4 else ""
        text += f"; not {', '.join(blocked[:4])}{more}"
    if untried:
        text += f"; {untried} weren't tried, as this process may open no more files (ulimit -n)"
    advice = (
        "let the firewalls pass TCP to these ports from this host (LOSSYCOLL_PORT_RANGE), if it is "
        "one of the job's"
    )
    return fail_unless(not blocked, "TCP (control)", text, advice)


def _links(job: Mapping[str, Any], lost: Collection[int] = ()) -> Findings:
    """The links between hosts, each from the end that sends: the dead and the worst ones first."""
    ranks = {rank["rank"]: rank for rank in job["ranks"]}
    ways: dict[tuple[int, int], tuple[str, float]] = {}
    silent: dict[tuple[int, int], str] = {}
    for here, rank in ranks.items():
        for link in rank["link"]:
            way, back = (here, link["rank"]), (link["rank"], here)
            if link["by"] != "shared_memory":
                ways[way] = _figures(link)
            if link["trouble"]:
                dead = way if link["trouble"] == status.NOT_THERE else back
                silent[dead] = link["trouble"]
                ways.setdefault(dead, (f"rank {dead[0]} tells nothing of it", 0.0))
    gone = {
        way: [ranks[one] for one in way if one in ranks and ranks[one]["state"] != job_status.ALIVE]
        for way in ways
    }
    over = {way for way in ways if any(_is_over(one, lost) for one in gone[way])}

    def worst_first(way: tuple[int, int]) -> tuple[bool, bool, bool, float]:
        return way in over, way not in silent, not gone[way], -round(ways[way][1], 3)

    order = sorted(ways, key=worst_first)
    for way in order[:MOST_LINKS]:
        name, (text, loss) = "rank {} to rank {}".format(*way), ways[way]
        if gone[way]:
            text = f"{text}; {' and '.join(map(job_status.being, gone[way]))}"
        if way in over:
            yield Finding(name, text)
        elif way in silent:
            yield Finding(name, f"{silent[way]}; {text}", Severity.FAIL, _SILENT_ADVICE)
        elif gone[way]:
            yield Finding(name, text, Severity.WARN, _GONE_ADVICE)
        else:
            yield warn_unless(loss < LOSSY, name, text, LOSSY_ADVICE)
    if len(order) > MOST_LINKS:
        yield Finding("links", f"{len(order) - MOST_LINKS} more, which lose no more than these")
    if not order:
        yield Finding("links", "none between hosts: the ranks share memory")


def _figures(link: Mapping[str, Any]) -> tuple[str, float]:
    if link["trouble"] == job_status.DIRECTIONS[1]:
        return "loss unknown, as nothing comes back", 0.0
    text = (
        f"round trip {1000 * link['rtt_seconds']:.1f} ms, {link['loss']:.2%} lost, "
        f"{1000 * link['queue_seconds']:.1f} ms in queues"
    )
    return text, link["loss"]
