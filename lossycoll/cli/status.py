"""Show running jobs: each rank's state, what it waits for and for whom (docs/operate.md)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, Final

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.runtime.engine import status_page
from lossycoll.runtime.engine.status_folder import UnsafeFolder
from lossycoll.runtime.keys.secret import find_secret
from lossycoll.runtime.membership import job_status
from lossycoll.runtime.membership.status_query import NoAnswer, ask_job, ask_stacks

from .launcher import EXIT_FAILED
from .status_text import as_text

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


def run(options: argparse.Namespace) -> int:
    try:
        jobs = find_jobs(options.place)
    except Unreachable as error:
        print(f"lossycoll status: {error}", file=sys.stderr)
        return EXIT_FAILED
    if options.stacks:
        for job in jobs:
            _add_stacks(job)
    if options.json:
        print(json.dumps({"jobs": jobs}, indent=2))
    else:
        print(as_text(jobs))
    return 0


def find_jobs(place: str | None) -> list[Job]:
    """The job of whoever listens at a place; None: all jobs of this user on this machine.

    Raises:
        Unreachable: Nothing can be learnt; the text says why.
        OptionError: The place is none, or the secret can't be used.
    """
    if place is None:
        try:
            jobs = job_status.jobs_of(status_page.pages())
        except UnsafeFolder as error:
            raise Unreachable(f"the folder of status pages isn't safe: {error}") from None
        return jobs
    host, port = place_of(place)
    secret = find_secret()
    if secret is not None:
        from lossycoll.runtime.keys.aead import check_library

        check_library(Options.from_env().libcrypto)
    try:
        session, places, records = ask_job(host, port, secret)
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
    return [job_status.job_of(session, records)]


def place_of(text: str) -> tuple[str, int]:
    """HOST:PORT.

    Raises:
        OptionError: It is none.
    """
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise OptionError(f"{text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


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
    """Those that aren't over."""
    return [job for job in jobs if not job_status.is_over(job)]
