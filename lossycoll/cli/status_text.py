"""A job's status as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lossycoll.runtime.membership.job_status import ALIVE, DEAD, ago, doing, in_words, is_over


def as_text(jobs: Sequence[Mapping[str, Any]]) -> str:
    """All jobs: those that run first."""
    if not jobs:
        return (
            "no job of this user runs on this machine; with HOST:PORT of a rank, "
            "`lossycoll status` asks there"
        )
    ordered = sorted(jobs, key=is_over)
    return "\n\n".join(_job(job) for job in ordered)


def _job(job: Mapping[str, Any]) -> str:
    over = ", has ended" if is_over(job) else ""
    lines = [f"job {job['session']}: {job['world']} ranks{over}"]
    if not over:
        lines += [f"  {line}" for line in culprits(job)]
    for rank in job["ranks"]:
        where = f" {rank['host']}/{rank['pid']}" if rank["tells"] else ""
        lines.append(f"rank {rank['rank']}{where}: {rank['state']}, {doing(rank)}")
        lines += [f"    {line}" for line in (rank.get("stacks") or "").splitlines()]
        if rank.get("no_stacks"):
            lines.append(f"    no stacks: {rank['no_stacks']}")
    return "\n".join(lines)


def culprits(job: Mapping[str, Any]) -> list[str]:
    """What to look at first: ranks that others wait for or that aren't well, and bad links."""
    by_rank = {rank["rank"]: rank for rank in job["ranks"]}
    found = []
    waited: dict[int, list[Mapping[str, Any]]] = {}
    for rank in job["ranks"]:
        for other in rank["waits_for"]:
            waited.setdefault(other, []).append(rank)
    for other, waiters in sorted(waited.items()):
        longest = max(waiters, key=lambda one: one["call_seconds"] or 0.0)
        who = by_rank.get(other)
        state = f", which is {who['state']}" if who is not None else ""
        found.append(
            f"rank {other}{state}: {len(waiters)} wait for it, "
            f"{in_words(longest['call_seconds'])} in {longest['call']}"
        )
    for rank in job["ranks"]:
        if rank["state"] != ALIVE and rank["rank"] not in waited:
            heard = "" if rank["state"] == DEAD else f", heard {ago(rank['heard_seconds'])}"
            found.append(f"rank {rank['rank']} is {rank['state']}{heard}")
        for link in rank["link"]:
            if link["trouble"] or link["loss"] >= BAD_LOSS:
                what = link["trouble"] or f"loses {link['loss']:.1%}"
                found.append(f"link from rank {link['rank']} to rank {rank['rank']}: {what}")
    return found


BAD_LOSS = 0.05
"""Loss of a link from which on it is told at once."""
