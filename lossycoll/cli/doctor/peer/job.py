"""``lossycoll doctor --peer HOST:PORT``: a running job, asked by a rank's control port.

Ranks answer no stranger by UDP: their links are as they measure them, and TCP is tried from here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lossycoll.cli import status
from lossycoll.runtime.engine.failures import place_text
from lossycoll.runtime.world import job_status

from ..checks import Finding, Findings, Severity, fail_unless, warn_unless

CONNECT_SECONDS: Final = 2.5
MOST_LINKS: Final = 32
"""Links that have a line; the worst ones of more."""
LOSSY: Final = 0.001
"""Share of lost packets that is worth a word."""
LOSSY_ADVICE: Final = (
    "training needs a method that brings packets back (lossycoll.DriftBound, LOSSYCOLL_REPAIR=2 or "
    "LOSSYCOLL_FEC=auto)"
)
_SILENT_ADVICE: Final = (
    "let the firewalls between the two pass UDP, both ways (LOSSYCOLL_PORT_RANGE says which "
    "ports); only data is missing: look for a filter of packets by size or content"
)


def examine(place: str) -> list[Finding]:
    """What the job of the rank at ``place`` tells. CommandError: nobody answers there."""
    session, places, records = status.ask(place)
    job = job_status.job_of(session, records) if records else None
    text = f"{session}, {len(places)} ranks; `lossycoll status {place}` tells more"
    found = [Finding("job", text)]
    over = (job_status.DEAD, job_status.LEFT)
    wanted = {
        number: at
        for number, at in enumerate(places)
        if job is None or number >= job["world"] or job["ranks"][number]["state"] not in over
    }
    found.append(_reached(wanted, asyncio.run(_try(list(wanted.values())))))
    if job is None:
        advice = "run the ranks without LOSSYCOLL_STATUS=off; their logs say if it is another cause"
        return [*found, warn_unless(False, "links", "the ranks tell nothing of them", advice)]
    return [*found, *_links(job)]


async def _try(places: Sequence[tuple[str, int]]) -> list[str]:
    """Reason why each can't be reached by TCP; "": it can."""

    async def connect(host: str, port: int) -> str:
        try:
            connecting = asyncio.open_connection(host, port)
            _, writer = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        except asyncio.TimeoutError:
            return "no answer"
        except OSError as error:
            return os.strerror(error.errno or 0).lower()
        writer.close()
        return ""

    return await asyncio.gather(*(connect(*place) for place in places))


def _reached(places: Mapping[int, tuple[str, int]], troubles: Sequence[str]) -> Finding:
    blocked = [
        f"rank {rank} at {place_text(*place)} ({why})"
        for (rank, place), why in zip(places.items(), troubles, strict=True)
        if why
    ]
    text = f"all {len(places)} ports of the ranks are reached from here"
    if blocked:
        more = f" and {len(blocked) - 4} more" if len(blocked) > 4 else ""
        reached = f"{len(places) - len(blocked)} of {len(places)} ports are reached from here"
        text = f"{reached}; not {', '.join(blocked[:4])}{more}"
    advice = (
        "let the firewalls pass TCP to these ports from this host (LOSSYCOLL_PORT_RANGE), if it is "
        "one of the job's"
    )
    return fail_unless(not blocked, "TCP (control)", text, advice)


def _links(job: Mapping[str, Any]) -> Findings:
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
    order = sorted(ways, key=lambda way: (way not in silent, -round(ways[way][1], 3)))
    for way in order[:MOST_LINKS]:
        name, (text, loss) = "rank {} to rank {}".format(*way), ways[way]
        gone = [one for one in way if one in ranks and ranks[one]["state"] != job_status.ALIVE]
        if gone:
            yield Finding(name, f"{text}; rank {gone[0]} is {ranks[gone[0]]['state']}")
        elif way in silent:
            yield Finding(name, f"{silent[way]}; {text}", Severity.FAIL, _SILENT_ADVICE)
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
