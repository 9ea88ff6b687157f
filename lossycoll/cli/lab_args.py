"""The options of ``lossycoll lab`` that describe a network, and the network they describe."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from lossycoll.errors import OptionError
from lossycoll.lab import network_io, report, tcp
from lossycoll.lab.network import LINK_FIELDS, PORT_FIELDS, Network
from lossycoll.lab.profiles import PROFILES, profile

NUMBERS: Final = {
    "loss": "share of packets lost, on every link within a site, as in 0.01 or 1%%",
    "burst": "mean number of packets lost in a row",
    "delay_ms": "one way; a round trip has two",
    "jitter_ms": "by which the delay wanders to both sides; order is kept",
    "spread_ms": "up to which each packet is later, each by itself; packets overtake each other",
    "reorder": "share of packets held back behind others",
    "hold_ms": "by how much",
    "duplicate": "share of packets that arrive twice",
    "rate_mbit": "of every link by itself",
    "up_mbit": "of every host's port, to the network",
    "down_mbit": "of every host's port, from the network",
    "queue_ms": f"length of the queues before ports, in time ({report.DEFAULT_QUEUE})",
    "policer_ms": "no queues at ports: a token bucket of N ms of the rate each way, and what finds "
    "it empty is dropped",
}
WHOLE: Final = {
    "sites": "1 by default",
    "hosts": "of each site; 2 to 64 in all",
    "mtu": "in bytes",
    "seed": "of everything drawn",
    "queue_packets": "length of the queues before ports, in packets, instead of --queue-ms",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    parser = command.add_argument_group("the network")
    known = ", ".join(PROFILES)
    parser.add_argument("--profile", default="clean", metavar="NAME", help=f"one of {known}")
    parser.add_argument("--file", metavar="PATH", help="a network in JSON or TOML, not a profile")
    for name, meaning in WHOLE.items():
        parser.add_argument(_flag(name), type=int, metavar="N", dest=name, help=meaning)
    parser.add_argument(
        "--ranks",
        type=_ranks,
        metavar="N[,N...]",
        help="of a job on each host: one number, or one for each host",
    )
    add_numbers(parser, NUMBERS)
    parser.add_argument(
        "--congestion",
        metavar="NAME",
        help="TCP's congestion control on all hosts: cubic, bbr, reno or what the kernel has "
        "(the machine's)",
    )
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


def add_numbers(parser: argparse._ActionsContainer, table: Mapping[str, str]) -> None:
    """An option for each field of links or ports in ``table``, which has what it means."""
    for name, meaning in table.items():
        kind = partial(_number, name)
        parser.add_argument(_flag(name), type=kind, metavar="N", dest=name, help=meaning)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _number(name: str, text: str) -> float:
    """``1%``, ``20ms``, ``1g``, or the same as plain numbers."""
    try:
        found = network_io.quantity(name, name, text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number")
    return found


def add_events(command: argparse.ArgumentParser) -> None:
    """The options that say what happens while a job runs."""
    parser = command.add_argument_group("while a job runs")
    parser.add_argument(
        "--at",
        action="append",
        default=[],
        metavar="S:[WHERE:]NAME=N,...",
        help="what changes S seconds after the ranks were started, as in 5:rate=10 (all ports), "
        "5:delay=200, 8:loss=1%% (all links within sites), 5:policer=10; WHERE is 0-1 for a link, "
        "2 for a host's port, wan for what is between sites; may be repeated",
    )
    parser.add_argument(
        "--tcp",
        action="append",
        default=[],
        type=_flows,
        metavar="NAME[:COUNT[:A-B]][@SHARE]",
        help="flows of TCP with that congestion control that send while the job runs, from host A "
        "to host B (0-1, 1-2, and so on), as in cubic:2; with @20%% for a fifth of each second, "
        "which makes a tail of round trips; both are said at the end; may be repeated",
    )


def steps_of(texts: Iterable[str], network: Network) -> list[tuple[float, str, Network]]:
    """When --at changes what, and the network from then on. OptionError for what can't be."""
    out = []
    for seconds, text in sorted((_time_of(text) for text in texts), key=lambda one: one[0]):
        network = _changed(network, text)
        out.append((seconds, text, network))
    return out


def _time_of(text: str) -> tuple[float, str]:
    seconds, colon, rest = text.partition(":")
    try:
        found = float(seconds)
    except ValueError:
        found = math.nan
    if not (colon and 0 <= found < math.inf):
        raise OptionError(f"--at {text!r} isn't SECONDS:[WHERE:]NAME=N,..., as in 5:rate=10")
    return found, rest


def _changed(network: Network, text: str) -> Network:
    where, colon, values = text.rpartition(":")
    if where == "wan":
        return network_io.wan(network, values)
    if "-" in where:
        return network.with_link(network_io.pair(where), **network_io.values(values))
    changes = network_io.values(values, network_io.PORT_RATE)
    if colon:
        return network.with_port(network_io.host(where), **changes)
    for name in changes:
        if name not in LINK_FIELDS | PORT_FIELDS:
            raise OptionError(f"--at {text!r}: neither links nor ports have a {name}")
    return network.with_parts(**changes)


def _flows(text: str) -> tcp.Flows:
    """``cubic``, ``cubic:2``, ``cubic:2:0-1``, each with ``@20%`` behind it or not."""
    before, at, behind = text.partition("@")
    share = _number("share", behind) if at else 1.0
    name, _, rest = before.partition(":")
    count, _, pair = rest.partition(":")
    if count and not count.isdecimal():
        wanted = "NAME[:COUNT[:A-B]][@SHARE], as in cubic:2"
        raise argparse.ArgumentTypeError(f"{text!r} isn't {wanted}")
    try:
        return tcp.Flows(name, int(count or 1), network_io.pair(pair) if pair else None, share)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Options that were written."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def network_of(options: argparse.Namespace) -> Network:
    """A profile or a file, changed by what else is written. OptionError for what can't be."""
    network = network_io.load(options.file) if options.file else profile(options.profile)
    network = network.with_parts(**given(options, (*WHOLE, "ranks", "congestion", *NUMBERS)))
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
