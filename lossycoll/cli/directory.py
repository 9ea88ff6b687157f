"""Run a swarm's directory by itself: who is there, and who meets whom (docs/swarms.md)."""

from __future__ import annotations

import argparse
import signal
import threading

from lossycoll.plan.grid import parse
from lossycoll.runtime.keys.secret import find_secret

from .answer import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("listen", metavar="HOST:PORT", help="where peers join; port 0: any")
    add("--grid", default="", help="its shape, as in 32x32 (default: it follows the peers)")
    how = (
        "take peers at once (default: newcomers wait for 8 s, in which those of a directory "
        "that was here before may come)"
    )
    add("--new", action="store_true", help=how)


def run(options: argparse.Namespace) -> int:
    from lossycoll.errors import OptionError, RendezvousError
    from lossycoll.runtime.engine.failures import place_text
    from lossycoll.runtime.swarm.directory_list import BEGIN_SECONDS
    from lossycoll.runtime.swarm.server import DirectoryServer
    from lossycoll.runtime.swarm.swarm import numeric_place

    try:
        shape = parse(options.grid).shape if options.grid else ()
    except ValueError as error:
        raise OptionError(f"--grid: {error}") from None
    secret = find_secret()
    try:
        host, port = numeric_place(options.listen)
        # The peers of a former one that has died may have elected another, which asks here soon:
        # newcomers are sent there, in place of beginning a second swarm.
        waits = 0.0 if options.new else BEGIN_SECONDS
        server = DirectoryServer(host, port, secret, shape=shape, waits=waits)
    except RendezvousError as error:
        raise CommandError(str(error)) from None
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *rest: ended.set())
    try:
        how = "sealed" if secret is not None else "in clear: set LOSSYCOLL_SECRET to seal it"
        print(f"directory at {place_text(host, server.port)}, {how}", flush=True)
        ended.wait()
    finally:
        server.close()
    return 0
