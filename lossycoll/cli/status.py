"""Show running jobs: each rank's state, what it waits for and for whom (docs/operate.md)."""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from lossycoll.options.fields import Options
from lossycoll.runtime.control.schema import Address
from lossycoll.runtime.core.logfmt import named
from lossycoll.runtime.engine import status_page
from lossycoll.runtime.engine.failures import place_of, place_text
from lossycoll.runtime.engine.status_page import UnsafeFolder
from lossycoll.runtime.engine.status_record import Record
from lossycoll.runtime.keys.secret import Secret, find_secret
from lossycoll.runtime.swarm import peer_status
from lossycoll.runtime.swarm.directory_list import peers_of
from lossycoll.runtime.swarm.swarm import numeric_place
from lossycoll.runtime.world import flight_recorder, job_status
from lossycoll.runtime.world.job_status import (
    ALIVE,
    DEAD,
    DIRECTIONS,
    LEFT,
    UNKNOWN,
    ago,
    being,
    doing,
    in_words,
    is_over,
)
from lossycoll.runtime.world.queries import CALLS, STATUS, NoAnswer, ask_job, ask_stacks
from lossycoll.runtime.world.rank_states import RankState

from .answer import CommandError, Unwritable

Job = dict[str, Any]
PLACE_HELP: Final = (
    "where any rank of the job listens: control= in its line event=ready, or in the status of its "
    "machine (--json); asks all machines of the job; or a swarm's directory. Without it, all jobs "
    "and swarms' peers of this user on this machine"
)

NOT_THERE: Final = DIRECTIONS[2]
BY_EAR: Final = (RankState.SILENT.word, RankState.LEFT.word)
"""States that follow from what other ranks hear. Of the others the kernel tells."""

LONG_SECONDS = 5.0
"""Time after which a call that waits for no rank is told."""
BAD_LOSS = 0.05
"""Loss of a link from which on it is told at once."""
LEAST_MISSING = 0.0005
"""Shares below are shown as 0.0%."""


class Unreachable(CommandError):
    """Nothing can be learnt there."""


class NoRank(Unreachable):
    """Whatever listens there doesn't answer as a rank."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a look has found. ``directories``: of swarms, with the names of their peers."""

    jobs: list[Job]
    swarms: list[dict[str, Any]] = field(default_factory=list)
    directories: list[dict[str, Any]] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("place", metavar="HOST:PORT", nargs="?", help=PLACE_HELP)
    add("--json", action="store_true", help="print it as one JSON document")
    how = "with the Python stacks of ranks that can tell them"
    add("--stacks", action="store_true", help=how)
    how = "write the latest calls of each rank to files that torch's flight recorder reads"
    add("--flight-recorder", type=Path, metavar="DIR", help=how)


def run(options: argparse.Namespace) -> int:
    if options.flight_recorder is not None:
        _write_calls(find_records(options.place, calls=True), options.flight_recorder)
        return 0
    found = look(options.place)
    if options.stacks:
        for job in found.jobs:
            _add_stacks(job)
    if options.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        others = swarms_as_text(found)
        by_pages = options.place is None
        parts = [as_text(found.jobs, by_pages=by_pages)] if found.jobs or not others else []
        print("\n\n".join(parts + others))
    return 0


def look(place: str | None) -> Found:
    """The job or the swarm of whoever listens at a place; None: all of this user here."""
    if place is None:
        return Found(find_jobs(None), peer_status.swarms())
    try:
        return Found(find_jobs(place))
    except NoRank:
        host, port = place_of(place)
        swarm = peers_of(numeric_place(place_text(host, port)), find_secret())
        if swarm is None:
            raise
    (host, port), names = swarm
    return Found([], [], [{"address": place_text(host, port), "peers": list(names)}])


def _write_calls(records: Sequence[Record], folder: Path) -> None:
    sessions = sorted({record.session for record in records})
    if len(sessions) != 1:
        raise Unreachable(
            f"{len(sessions)} jobs of this user are on this machine: "
            f"{', '.join(sessions) or 'none'}; name one by HOST:PORT of a rank"
        )
    dumps = flight_recorder.dumps(records)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, dump in dumps.items():
            (folder / f"{flight_recorder.PREFIX}{rank}").write_bytes(pickle.dumps(dump))
    except OSError as error:
        raise Unwritable(f"{folder} can't be written: {error.strerror or error}") from None
    missing = records[0].world - len(dumps)
    print(
        f"{len(dumps)} ranks written to {folder}"
        + (f"; {missing} tell nothing: add --allow-incomplete-ranks" if missing else "")
        + f"\npython -m torch.distributed.flight_recorder.fr_trace {folder}"
    )


def find_jobs(place: str | None) -> list[Job]:
    """The job of whoever listens at a place; None: all jobs of this user on this machine."""
    return job_status.jobs_of(find_records(place))


def usable_secret() -> Secret | None:
    """The environment's secret. OptionError: nothing can be sealed with it."""
    secret = find_secret()
    if secret is not None:
        from lossycoll.runtime.keys.aead import check_library

        check_library(Options.from_env().libcrypto)
    return secret


def find_records(place: str | None, *, calls: bool = False) -> list[Record]:
    """Records of ranks, found as :func:`find_jobs` does; with their latest calls on request."""
    if place is None:
        try:
            return status_page.pages(calls=calls)
        except UnsafeFolder as error:
            raise Unreachable(f"the folder of status pages isn't safe: {error}") from None
    session, places, records = ask(place, CALLS if calls else STATUS)
    if not records:
        raise Unreachable(
            f"the rank at {place} is one of {len(places)} of job {session}, and tells nothing "
            f"more: it runs with LOSSYCOLL_STATUS=off, or can't write its status page (its log "
            f"says why)"
        )
    return records


def ask(place: str, purpose: str = STATUS) -> tuple[str, tuple[Address, ...], list[Record]]:
    """The session of the job of whoever listens at a place, where its ranks listen, and the
    records that can be had. Unreachable: the text says why."""
    host, port = place_of(place)
    secret = usable_secret()
    try:
        return ask_job(host, port, secret, purpose=purpose)
    except NoAnswer as error:
        raise NoRank(
            f"{place} gives no answer ({error.args[0]}): it isn't a rank or a swarm's directory of "
            f"this version of lossycoll, or has {'another' if secret else 'a'} secret "
            f"(LOSSYCOLL_SECRET), or its Python holds the GIL, or it is stopped; ask another rank, "
            f"or on its machine without an address"
        ) from None
    except OSError as error:
        hint = " (has the job ended?)" if isinstance(error, ConnectionRefusedError) else ""
        said = error.strerror or error
        raise Unreachable(f"nobody can be reached at {place}: {said}{hint}") from None


def _add_stacks(job: Job) -> None:
    secret = find_secret()
    for rank in job["ranks"]:
        rank["stacks"] = None
        rank["no_stacks"] = f"the rank is {rank['state']}"
        if rank["state"] != ALIVE or not rank["control"]:
            continue
        try:
            rank["stacks"] = ask_stacks(place_of(rank["control"]), secret)
            rank["no_stacks"] = None
        except NoAnswer as error:
            rank["no_stacks"] = (
                f"{error.args[0]}: its Python holds the GIL, or it has another secret; "
                f"py-spy dump --pid {rank['pid']} on {rank['host']} needs neither"
            )


def as_text(jobs: Sequence[Mapping[str, Any]], *, by_pages: bool = False) -> str:
    """Jobs as lines. ``by_pages``: they are from this machine's pages alone."""
    if not jobs:
        return no_job()
    ordered = sorted(jobs, key=is_over)
    return "\n\n".join(_job(job) + (_elsewhere(job) if by_pages else "") for job in ordered)


def _elsewhere(job: Mapping[str, Any]) -> str:
    """A line that says how to ask the job's other machines, if it has some."""
    untold = [rank["rank"] for rank in job["ranks"] if not rank["tells"]]
    asked = [one["control"] for one in job["ranks"] if one["state"] == ALIVE and one["control"]]
    if not untold or is_over(job):
        return ""
    place = asked[0] if asked else "HOST:PORT"
    return f"\n{named(untold)}: on other machines; `lossycoll status {place}` asks those, too"


def no_job() -> str:
    """Where no job was found, and where else it may be: a service has another folder."""
    return (
        f"no job or swarm of this user has a page in {status_page.folder()}; one with another "
        "XDG_RUNTIME_DIR has it there, and with HOST:PORT of a rank, "
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


def swarms_as_text(found: Found) -> list[str]:
    parts = [*map(swarm_as_text, found.swarms)]
    for directory in found.directories:
        names = directory["peers"]
        head = f"swarm with the directory {directory['address']}: {_counted(len(names), 'peer')}"
        parts.append("\n".join([head, *(f"peer {name}" for name in names)]))
    return parts


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def swarm_as_text(swarm: Mapping[str, Any]) -> str:
    """A swarm, as this machine's peers tell of it."""
    here = sum(peer["state"] != DEAD for peer in swarm["peers"])
    lines = [
        f"swarm {swarm['session']}: {_counted(here, 'peer')} here, {swarm['peers_in_all']} in all, "
        f"{_counted(swarm['rounds'], 'round')}"
    ]
    lines += [f"  {line}" for line in swarm["trouble"]]
    for peer in swarm["peers"]:
        text = f"peer {peer['name']} {peer['host']}/{peer['pid']}: {peer['state']}"
        if peer["state"] == ALIVE:
            doing = "waits for a round" if peer["doing"] == "waits" else "computes"
            text += f", {doing} for {in_words(peer['since_seconds'])}"
        else:
            text += f", last sign {ago(peer['since_seconds'])}"
        if peer["round"] >= 0:
            took = in_words(peer["waited_seconds"] + peer["round_seconds"])
            members = _counted(len(peer["members"]), "peer")
            text += f"; round {peer['round']} of {members} took {took}"
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
        verb = "has" if who is not None and who["state"] == LEFT else "is"
        state = f", which {verb} {who['state']}" if who is not None else ""
        found.append(
            f"rank {other}{state}: {len(waiters)} wait{'s' if len(waiters) == 1 else ''} for it, "
            f"{in_words(longest['call_seconds'])} in {longest['call']}"
        )
    for rank in job["ranks"]:
        if rank["state"] not in (ALIVE, UNKNOWN) and rank["rank"] not in waited:
            heard = f", heard {ago(rank['heard_seconds'])}" if rank["state"] in BY_EAR else ""
            found.append(f"{being(rank)}{heard}")
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
    return found + _slow_calls(job)


def _slow_calls(job: Mapping[str, Any]) -> list[str]:
    """Calls that all their ranks have made, and that take long: they wait for packets."""
    if not all(rank["tells"] for rank in job["ranks"] if rank["state"] == ALIVE):
        return []  # a rank that doesn't tell may be late
    calls: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for rank in job["ranks"]:
        is_long = rank["state"] == ALIVE and (rank["call_seconds"] or 0.0) >= LONG_SECONDS
        if is_long and not rank["waits_for"] and rank["call_number"] is not None:
            name = rank["call_group"], rank["call_number"], rank["call"]
            calls.setdefault(name, []).append(rank)
    found = []
    for (_, number, text), ranks in calls.items():
        longest = in_words(max(rank["call_seconds"] for rank in ranks))
        who = named([rank["rank"] for rank in ranks])
        verb = "waits" if len(ranks) == 1 else "wait"
        found.append(f"{who}: {verb} for packets, {longest} in call #{number} {text}")
    return found


def _unrestored(sender: int, receiver: Mapping[str, Any] | None) -> str:
    """What recovery hasn't restored of a link's packets, if it is more than nothing."""
    links = receiver["link"] if receiver is not None else ()
    missing = max((link["missing"] for link in links if link["rank"] == sender), default=0.0)
    return f", {missing:.1%} stay missing" if missing >= LEAST_MISSING else ""
