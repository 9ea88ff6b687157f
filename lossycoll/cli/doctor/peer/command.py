"""``lossycoll doctor --peer HOST``: finds the other end, measures, and says what to set."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from lossycoll.errors import InterfaceError

from ...argtypes import whole
from ..findings import Finding, Severity
from .control import Control, Meeting, PeerError
from .measure import Limits, measure
from .ports import open_ports
from .report import report, settings

PORT: Final = 29499
WAIT_SECONDS: Final = 60
BUDGET_MIB: Final = 32
RATE_MBIT: Final = 1000
IDLE_SECONDS: Final = 31
MOST_IDLE: Final = 301
MOST_MIB: Final = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the network between two hosts (run on both)")
    group.add_argument("--peer", metavar="HOST", help="the other host, where this runs as well")
    group.add_argument(
        "--peer-port",
        type=whole(1, 65535),
        default=PORT,
        metavar="PORT",
        help="TCP port at which the two find each other (default: %(default)s)",
    )
    group.add_argument(
        "--wait",
        type=whole(1, 3600),
        default=WAIT_SECONDS,
        metavar="S",
        help="how long to look for the other end (default: %(default)s s)",
    )
    group.add_argument(
        "--idle",
        type=whole(0, MOST_IDLE),
        default=IDLE_SECONDS,
        metavar="S",
        help="how long flows are left idle to see whether they are forgotten; 0: not at all "
        "(default: %(default)s s)",
    )
    group.add_argument(
        "--budget",
        type=whole(1, MOST_MIB),
        default=BUDGET_MIB,
        metavar="MIB",
        help="most that is sent each way to find the rate (default: %(default)s MiB)",
    )
    group.add_argument(
        "--rate",
        type=whole(1, 100_000),
        default=RATE_MBIT,
        metavar="MBIT",
        help="fastest that is tried (default: %(default)s Mbit/s)",
    )


def run(options: argparse.Namespace) -> tuple[list[Finding], dict[str, str]]:
    """The findings, and the options to set; one finding where the ends don't find each other."""
    try:
        return _examine(options)
    except (PeerError, InterfaceError) as error:
        return [Finding(f"peer {options.peer}", Severity.FAIL, str(error))], {}


def _examine(options: argparse.Namespace) -> tuple[list[Finding], dict[str, str]]:
    from lossycoll.options.fields import Options
    from lossycoll.runtime.net.interfaces import choose

    effective = Options.from_env()
    interface = choose(effective.interface, options.peer)
    hello = {
        "address": interface.address,
        "device": interface.name,
        "mtu": interface.mtu,
        "budget": options.budget << 20,
        "idle": options.idle,
        "rate": options.rate,
    }
    _tell(
        f"looking for the other end at {options.peer}, TCP port {options.peer_port}, for up to "
        f"{options.wait} s; run 'lossycoll doctor --peer' there, too"
    )
    control = Meeting(options.peer, options.peer_port, hello).find(options.wait)
    ports = open_ports(interface.address, effective.ports)
    try:
        found = measure(control, ports, _limits(control, options, interface.mtu), _tell)
    finally:
        ports.close()
        control.close()
    peer, ports_in_words = control.peer, str(effective.port_range)
    return (
        report(found, options.peer, ports_in_words, interface.mtu, peer),
        settings(found, interface.mtu, peer, ports_in_words),
    )


def _limits(control: Control, options: argparse.Namespace, mtu: int) -> Limits:
    peer = control.peer
    return Limits(
        min(mtu, peer.mtu),
        min(options.budget << 20, peer.budget),
        min(options.rate, peer.rate) * 1e6 / 8,
        min(options.idle, peer.idle, MOST_IDLE),
    )


def _tell(text: str) -> None:
    print(f"lossycoll doctor: {text}", file=sys.stderr, flush=True)
