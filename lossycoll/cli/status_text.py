"""A job's status as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lossycoll.runtime.engine import status_page
from lossycoll.runtime.engine.rank_states import RankState
from lossycoll.runtime.world.job_status import (
    ALIVE,
    DEAD,
    DIRECTIONS,
    ago,
    doing,
    in_words,
    is_over,
)


def as_text(jobs: Sequence[Mapping[str, Any]]) -> str:
    """All jobs: those that run first."""
    if not jobs:
        return no_job()
    ordered = sorted(jobs, key=is_over)
    return "\n\n".join(_job(job) for job in ordered)


def no_job() -> str:
    """Where no job was found, and where else it may be: a service has another folder."""
    return (
        f"no job of this user has a page in {status_page.folder()}; one with another "
        "XDG_RUNTIME_DIR has it there (docs/operate.md), and with HOST:PORT of a rank, "
        "`lossycoll status` asks that rank"
    )


def _job(job: Mapping[str, Any]) -> str:
    over = ", has ended" if is_over(job) else ""
    lines = [f"job {job['session']}: {job['world']} ranks{over}"]
    first = [] if over else [f"  {line}" for line in culprits(job)]
    lines += first
    for rank in job["ranks"]:
        where = f" {rank['host']}/{rank['pid']}" if rank["tells"] else ""
        lines.append(f"rank {rank['rank']}{where}: {rank['state']}, {doing(rank)}")
        lines += [f"    {line}" for line in (rank.get("stacks") or "").splitlines()]
        if rank.get("no_stacks"):
            lines.append(f"    no stacks: {rank['no_stacks']}")
    if any(rank.get("stacks") for rank in job["ranks"]):
        lines += first and ["again, what to look at first:", *first]  # stacks are long
    return "\n".join(lines)


def swarm_as_text(swarm: Mapping[str, Any]) -> str:
    """A swarm, as this machine's peers tell of it."""
    here = sum(peer["state"] != DEAD for peer in swarm["peers"])
    lines = [
        f"swarm {swarm['session']}: {here} peers here, {swarm['peers_in_all']} in all, "
        f"{swarm['rounds']} rounds"
    ]
    lines += [f"  {line}" for line in swarm["trouble"]]
    for peer in swarm["peers"]:
        text = f"peer {peer['name']} {peer['host']}/{peer['pid']}: {peer['state']}"
        doing = "waits for a round" if peer["doing"] == "waits" else "computes"
        text += f", {doing} for {in_words(peer['since_seconds'])}"
        if peer["round"] >= 0:
            took = in_words(peer["waited_seconds"] + peer["round_seconds"])
            text += f"; round {peer['round']} of {len(peer['members'])} peers took {took}"
        lines.append(text)
    return "\n".join(lines)


def culprits(job: Mapping[str, Any]) -> list[str]:
    """Findings to look at first: ranks that others wait for, unhealthy ranks, and bad links."""
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
            f"rank {other}{state}: {len(waiters)} wait{'s' if len(waiters) == 1 else ''} for it, "
            f"{in_words(longest['call_seconds'])} in {longest['call']}"
        )
    for rank in job["ranks"]:
        if rank["state"] != ALIVE and rank["rank"] not in waited:
            heard = f", heard {ago(rank['heard_seconds'])}" if rank["state"] in BY_EAR else ""
            found.append(f"rank {rank['rank']} is {rank['state']}{heard}")
        for link in rank["link"]:
            here, there = rank["rank"], link["rank"]
            ends = rank, by_rank.get(there, rank)
            if link["trouble"] and any(end["state"] != ALIVE for end in ends):
                continue  # no wonder
            if link["trouble"] == NOT_THERE:
                found.append(f"link from rank {here} to rank {there}: nothing arrives")
            elif link["trouble"]:
                found.append(f"link from rank {there} to rank {here}: {link['trouble']}")
            elif link["loss"] >= BAD_LOSS:
                lost = f"loses {link['loss']:.1%}{_unrestored(here, by_rank.get(there))}"
                found.append(f"link from rank {here} to rank {there}: {lost}")
    return found


def _unrestored(sender: int, receiver: Mapping[str, Any] | None) -> str:
    """What recovery hasn't restored of a link's packets, if it is more than nothing."""
    links = receiver["link"] if receiver is not None else ()
    missing = max((link["missing"] for link in links if link["rank"] == sender), default=0.0)
    return f", {missing:.1%} stay missing" if missing >= LEAST_MISSING else ""


NOT_THERE: Final = DIRECTIONS[2]
BY_EAR: Final = (RankState.SILENT.word, RankState.LEFT.word)
"""States that follow from what other ranks hear. Of the others the kernel tells."""

BAD_LOSS = 0.05
"""Loss of a link from which on it is told at once."""
LEAST_MISSING = 0.0005
"""Shares below are shown as 0.0%."""
