"""Show running jobs: each rank's state, what it waits for and for whom (docs/operate.md)."""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lossycoll.options.fields import Options
from lossycoll.runtime.engine import status_page
from lossycoll.runtime.engine.failures import place_of
from lossycoll.runtime.engine.status_page import UnsafeFolder
from lossycoll.runtime.engine.status_record import Record
from lossycoll.runtime.keys.secret import find_secret
from lossycoll.runtime.swarm import peer_status
from lossycoll.runtime.world import flight_recorder, job_status
from lossycoll.runtime.world.queries import NoAnswer, ask_job, ask_stacks
from lossycoll.runtime.world.status_answer import CALLS, STATUS

from .launcher import EXIT_FAILED, Unwritable
from .status_text import as_text, swarm_as_text

Job = dict[str, Any]
PLACE_HELP: Final = (
    "where any rank of the job listens: control= of the rank in the status, or in its line "
    "event=ready; without it, all jobs of this user on this machine"
)


class Unreachable(Exception):
    """Nothing can be learnt there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="HOST:PORT", nargs="?", help=PLACE_HELP)
    parser.add_argument("--json", action="store_true", help="print it as one JSON document")
    parser.add_argument(
        "--stacks", action="store_true", help="with the Python stacks of ranks that can tell them"
    )
    parser.add_argument(
        "--flight-recorder",
        type=Path,
        metavar="DIR",
        help="write the latest calls of each rank to files that torch's flight recorder reads",
    )


def run(options: argparse.Namespace) -> int:
    try:
        if options.flight_recorder is not None:
            return _write_calls(find_records(options.place, calls=True), options.flight_recorder)
        jobs = find_jobs(options.place)
    except Unreachable as error:
        print(f"lossycoll status: {error}", file=sys.stderr)
        return EXIT_FAILED
    if options.stacks:
        for job in jobs:
            _add_stacks(job)
    swarms = peer_status.swarms() if options.place is None else []
    if options.json:
        print(json.dumps({"jobs": jobs, "swarms": swarms}, indent=2))
    else:
        parts = [as_text(jobs)] if jobs or not swarms else []
        print("\n\n".join(parts + [swarm_as_text(swarm) for swarm in swarms]))
    return 0


def _write_calls(records: Sequence[Record], folder: Path) -> int:
    """Writes a file for each rank of the one job that records are of."""
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
    return 0


def find_jobs(place: str | None) -> list[Job]:
    """The job of whoever listens at a place; None: all jobs of this user on this machine."""
    return job_status.jobs_of(find_records(place))


def find_records(place: str | None, *, calls: bool = False) -> list[Record]:
    """Records of ranks, found as :func:`find_jobs` does; with their latest calls on request."""
    if place is None:
        try:
            return status_page.pages(calls=calls)
        except UnsafeFolder as error:
            raise Unreachable(f"the folder of status pages isn't safe: {error}") from None
    host, port = place_of(place)
    secret = find_secret()
    if secret is not None:
        from lossycoll.runtime.keys.aead import check_library

        check_library(Options.from_env().libcrypto)
    try:
        purpose = CALLS if calls else STATUS
        session, places, records = ask_job(host, port, secret, purpose=purpose)
    except NoAnswer as error:
        raise Unreachable(
            f"{place} gives no answer ({error.args[0]}): it isn't a rank of this version of "
            f"lossycoll, or has {'another' if secret else 'a'} secret (LOSSYCOLL_SECRET), or its "
            f"Python holds the GIL, or it is stopped; ask another rank, or on its machine without "
            f"an address"
        ) from None
    except OSError as error:
        raise Unreachable(f"nobody can be reached at {place}: {error.strerror or error}") from None
    if not records:
        raise Unreachable(
            f"the rank at {place} is one of {len(places)} of job {session}, and tells nothing "
            f"more: it runs with LOSSYCOLL_STATUS=off, or can't write its status page (its log "
            f"says why)"
        )
    return records


def _add_stacks(job: Job) -> None:
    secret = find_secret()
    for rank in job["ranks"]:
        rank["stacks"] = None
        rank["no_stacks"] = f"the rank is {rank['state']}"
        if rank["state"] != job_status.ALIVE or not rank["control"]:
            continue
        try:
            rank["stacks"] = ask_stacks(place_of(rank["control"]), secret)
            rank["no_stacks"] = None
        except NoAnswer as error:
            rank["no_stacks"] = (
                f"{error.args[0]}: its Python holds the GIL, or it has another secret; "
                f"py-spy dump --pid {rank['pid']} on {rank['host']} needs neither"
            )


def living(jobs: Sequence[Job]) -> list[Job]:
    """The jobs that aren't over."""
    return [job for job in jobs if not job_status.is_over(job)]
