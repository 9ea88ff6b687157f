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
    "loss": "fraction of packets lost, on every link",
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
    "hosts": "2 to 64",
    "mtu": "in bytes",
    "seed": "of everything drawn",
    "queue_packets": "length of the queues before ports, in packets",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(PROFILES)
    parser.add_argument("--profile", default="clean", metavar="NAME", help=f"one of {known}")
    parser.add_argument("--file", metavar="PATH", help="a network in JSON or TOML, not a profile")
    add_numbers(parser, WHOLE, int)
    add_numbers(parser, NUMBERS, float)
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
    network = network.with_parts(**given(options, (*WHOLE, *NUMBERS)))
    for text in options.link:
        where, values = _split(text)
        network = network.with_link(network_io.pair(where), **values)
    for text in options.port:
        where, values = _split(text)
        network = network.with_port(network_io.host(where), **values)
    return network


def _split(text: str) -> tuple[str, dict[str, Any]]:
    where, colon, values = text.partition(":")
    if not colon:
        raise OptionError(f"{text!r} isn't WHERE:NAME=N,...")
    return where, network_io.values(values)
