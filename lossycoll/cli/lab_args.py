"""The options of ``lossycoll lab`` that describe a network, and the network they describe."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any, Final

from lossycoll.errors import OptionError
from lossycoll.lab import network_io
from lossycoll.lab.network import Network
from lossycoll.lab.profiles import PROFILES, profile

NUMBERS: Final = {
    "loss": "fraction of packets lost, on every link within a site",
    "burst": "mean number of packets lost in a row",
    "delay_ms": "one way; a round trip has two",
    "jitter_ms": "by which the delay wanders to both sides",
    "reorder": "fraction of packets held back behind others",
    "hold_ms": "by how much",
    "duplicate": "fraction of packets that arrive twice",
    "rate_mbit": "of every link by itself",
    "up_mbit": "of every host's port, to the network",
    "down_mbit": "of every host's port, from the network",
    "queue_ms": "length of the queues before ports, in time",
}
WHOLE: Final = {
    "sites": "1 by default",
    "hosts": "of each site; 2 to 64 in all",
    "mtu": "in bytes",
    "seed": "of everything drawn",
    "queue_packets": "length of the queues before ports, in packets",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(PROFILES)
    parser.add_argument("--profile", default="clean", metavar="NAME", help=f"one of {known}")
    parser.add_argument("--file", metavar="PATH", help="a network in JSON or TOML, not a profile")
    add_numbers(parser, WHOLE, int)
    parser.add_argument(
        "--ranks",
        type=_ranks,
        metavar="N[,N...]",
        help="of a job on each host: one number, or one for each host",
    )
    add_numbers(parser, NUMBERS, float)
    parser.add_argument(
        "--wan",
        metavar="[PROFILE,]NAME=N,...",
        help="between sites: rate=1g,delay=20ms,loss=1%% is a rate per site, shared by its hosts, "
        "and a one-way delay and loss of each pair of hosts; a profile's name stands for its link "
        "and its port",
    )
    parser.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="A-B:NAME=N,...",
        help="one link that differs, in one direction: 0-1:loss=0.3,delay_ms=40 is from host 0 to "
        "host 1, and 1-0 is the way back; may be repeated",
    )
    parser.add_argument(
        "--port",
        action="append",
        default=[],
        metavar="HOST:NAME=N,...",
        help="one host's port that differs, as in 2:up_mbit=10",
    )


def add_numbers(parser: argparse.ArgumentParser, table: Mapping[str, str], kind: type) -> None:
    """An option for each name of ``table``, which has what it means."""
    for name, meaning in table.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar="N", dest=name, help=meaning)


def given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of the options that were written."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def network_of(options: argparse.Namespace) -> Network:
    """A profile or a file, changed by what else is written. OptionError for what can't be."""
    network = network_io.load(options.file) if options.file else profile(options.profile)
    network = network.with_parts(**given(options, (*WHOLE, "ranks", *NUMBERS)))
    if options.wan is not None:
        if network.sites == 1:
            raise OptionError("--wan is what is between sites, and there is one; set --sites")
        network = network_io.wan(network, options.wan)
    for text in options.link:
        where, values = _split(text)
        changes = network_io.values(values)
        network = network.with_link(network_io.pair(where), **changes)
    for text in options.port:
        where, values = _split(text)
        changes = network_io.values(values, network_io.PORT_RATE)
        network = network.with_port(network_io.host(where), **changes)
    return network


def _ranks(text: str) -> int | tuple[int, ...]:
    """``2``, or ``3,2`` for a host of three and a host of two."""
    try:
        numbers = tuple(map(int, text.split(",")))
    except ValueError:
        wanted = "a whole number, or one for each host, as in 3,2"
        raise argparse.ArgumentTypeError(f"{text!r} isn't {wanted}") from None
    return numbers if len(numbers) > 1 else numbers[0]


def _split(text: str) -> tuple[str, str]:
    where, colon, values = text.partition(":")
    if not colon:
        raise OptionError(f"{text!r} isn't WHERE:NAME=N,...")
    return where, values
