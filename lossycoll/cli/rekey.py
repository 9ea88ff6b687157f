"""Have a running job seal with new keys (docs/sealing.md)."""

from __future__ import annotations

import argparse
import sys

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.runtime.engine.failures import place_of
from lossycoll.runtime.keys.secret import find_secret

from .launcher import EXIT_FAILED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "place",
        metavar="HOST:PORT",
        help="where any rank of the job listens: control= in its line event=ready",
    )


def run(options: argparse.Namespace) -> int:
    from lossycoll.runtime.keys.aead import check_library
    from lossycoll.runtime.world.queries import ask_for_rekey

    secret = find_secret()
    if secret is None:
        raise OptionError(
            "the job's secret is needed: set LOSSYCOLL_SECRET or LOSSYCOLL_SECRET_FILE"
        )
    check_library(Options.from_env().libcrypto)
    try:
        heard = ask_for_rekey(*place_of(options.place), secret)
    except OSError as error:
        return _fail(f"nobody can be reached at {options.place}: {error.strerror or error}")
    if not heard:
        return _fail(f"{options.place} doesn't answer: it isn't a rank that has this secret")
    print("the job is told: its ranks seal with new keys from now on")
    return 0


def _fail(why: str) -> int:
    print(f"lossycoll rekey: {why}", file=sys.stderr)
    return EXIT_FAILED
