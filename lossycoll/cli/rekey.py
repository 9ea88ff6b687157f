"""Have a running job seal with new keys (docs/sealing.md)."""

from __future__ import annotations

import argparse

from lossycoll.errors import OptionError
from lossycoll.runtime.engine.failures import place_of
from lossycoll.runtime.world.queries import ask_for_rekey

from .answer import CommandError
from .status import usable_secret


def add_arguments(parser: argparse.ArgumentParser) -> None:
    how = "where any rank of the job listens: control= in its line event=ready"
    parser.add_argument("place", metavar="HOST:PORT", help=how)


def run(options: argparse.Namespace) -> int:
    secret = usable_secret()
    if secret is None:
        raise OptionError(
            "the job's secret is needed: set LOSSYCOLL_SECRET or LOSSYCOLL_SECRET_FILE"
        )
    try:
        heard = ask_for_rekey(*place_of(options.place), secret)
    except OSError as error:
        said = error.strerror or error
        raise CommandError(f"nobody can be reached at {options.place}: {said}") from None
    if not heard:
        raise CommandError(f"{options.place} doesn't answer: it isn't a rank that has this secret")
    print("the job is told: its ranks seal with new keys from now on")
    return 0
