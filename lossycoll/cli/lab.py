"""Run a job on hosts of its own, over a network as bad as you like.

lossycoll lab --hosts 4 --profile cross-dc -- python train.py
lossycoll lab --sites 2 --hosts 2 --ranks 2 --wan rate=1g,delay=20ms,loss=1% -- python train.py
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from lossycoll.errors import OptionError
from lossycoll.lab import backends, leftovers, network_io, report, tcp, verify
from lossycoll.lab.backends import BACKENDS
from lossycoll.lab.counters import Counters
from lossycoll.lab.job import GRACE_SECONDS, prefixed
from lossycoll.lab.laboratory import Lab
from lossycoll.lab.network import LINK_FIELDS, PORT_FIELDS, Network
from lossycoll.lab.profiles import PROFILES, profile

from .answer import EXIT_FAILED, Answer, give, must_be_writable, numbers_table
from .argtypes import real
from .doctor.checks import Finding, Severity
from .doctor.command import shown
from .launcher import Interrupted

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
REPEATED: Final = {
    "link": (
        "A-B:NAME=N,...",
        "one link that differs, in one direction: 0-1:loss=0.3,delay_ms=40 is from host 0 to "
        "host 1, and 1-0 is the way back",
    ),
    "port": ("HOST:NAME=N,...", "one host's port that differs, as in 2:up_mbit=10"),
    "at": (
        "S:[WHERE:]NAME=N,...",
        "what changes S seconds after the ranks were started, as in 5:rate=10 (all ports), "
        "5:delay=200, 8:loss=1%% (all links within sites), 5:policer=10; WHERE is 0-1 for a link, "
        "2 for a host's port, wan for what is between sites",
    ),
    "tcp": (
        "NAME[:COUNT[:A-B]][@SHARE]",
        "flows of TCP with that congestion control that send while the job runs, from host A "
        "to host B (0-1, 1-2, and so on), as in cubic:2; with @20%% for a fifth of each second, "
        "which makes a tail of round trips; both are said at the end",
    ),
}
"""Form and meaning of the options that may be repeated."""
HEADINGS: Final = (
    *("link", "sent as", "loss asked", "got", "burst asked", "got"),
    *("RTT asked, ms", "got", "Mbit/s", ""),
)
WIDTH: Final = 110


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "%(prog)s [ACTION] [options] [-- COMMAND ...]"
    actions = "; ".join(f"{name}: {meaning}" for name, (_, meaning) in ACTIONS.items())
    command.add_argument(
        "action", nargs="?", default="run", type=_action, metavar="ACTION", help=actions
    )
    network = command.add_argument_group("the network")
    _add_network(network)
    _add_repeated(network, "link", "port")
    _add_repeated(command.add_argument_group("while a job runs"), "at", "tcp")
    add = command.add_argument_group("the laboratory").add_argument
    backends = ("auto", *BACKENDS)
    add("--backend", default="auto", choices=backends, help="what makes the network")
    add("--timeout", type=real(0), metavar="S", help="end the job after S seconds")
    how = "how long ranks have to end when one has failed (%(default)g s)"
    add("--grace", type=real(0), default=GRACE_SECONDS, metavar="S", help=how)
    how = "write what was counted and what took packets, as JSON"
    add("--counters", type=Path, metavar="PATH", help=how)
    how = "what verify offers a link at most (%(default)g)"
    add("--mbit", type=real(0.01), default=verify.MBIT, metavar="N", help=how)
    how = "print results as JSON, after a job's output its report"
    add("--json", action="store_true", help=how)


def _action(text: str) -> str:
    if text not in ACTIONS:
        names = ", ".join(ACTIONS)
        raise argparse.ArgumentTypeError(
            f"{text!r} is not one of {names}; a command to run goes after --: "
            f"lossycoll lab [OPTIONS] -- {text} ..."
        )
    return text


def run(chosen: argparse.Namespace) -> int:
    """``chosen.words``: the command after "--"."""
    if chosen.action != "run" and (chosen.at or chosen.tcp):
        raise OptionError("--at and --tcp are of a job; they take a command after --")
    file = chosen.counters if chosen.action == "run" else None
    return give(ACTIONS[chosen.action][0](chosen), chosen, file=file)


def _run(chosen: argparse.Namespace) -> Answer:
    if not chosen.words:
        raise OptionError("nothing to run; write a command after --")
    network = network_of(chosen)
    steps = steps_of(chosen.at, network)
    flows = [tcp_flows(text) for text in chosen.tcp]
    tcp.placed(flows, network)
    must_be_writable(chosen.counters)
    backend = backends.choose(network, *(later for _, _, later in steps), name=chosen.backend)
    with _stoppable(), Lab(network, backend=backend) as lab:
        _say([f"{_described(network)}, backend {lab.backend}", *report.network(network)])
        changes = [(step[0], partial(_step, lab, *step)) for step in steps]
        with tcp.running(lab, flows) as took:
            ended = lab.run(
                chosen.words,
                timeout=chosen.timeout,
                grace=chosen.grace,
                on_line=prefixed,
                at=changes,
            )
        counters = lab.counters()
    data = {
        "network": network_io.as_data(network),
        "changes": [{"at": when, "change": text} for when, text, _ in steps],
        **counters.as_json(),
        "took": [asdict(row) for row in report.rows(counters)],
        "tcp": report.tcp_data(took[0]) if took else None,
    }
    _say(_traffic(counters) if network.has_levels else ())
    named = {pair for each in (network, *(later for *_, later in steps)) for pair in each.links}
    _say(report.took(counters, named))
    _say(report.tcp(took[0]) if took else ())
    if unasked := sum(host.unasked for host in counters.hosts):
        lost = "packets were lost that nobody asked for"
        _say([f"{unasked} {lost}: the job sent more than this machine carries"])
    _say(f"rank {one.rank} ended with status {one.status}" for one in ended if one.code)
    return Answer(data, (), status=max(one.status for one in ended))


def _step(lab: Lab, when: float, text: str, network: Network) -> None:
    lab.change_to(network)
    _say([f"after {when:g} s: {text}"])


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"lab: {line}", file=sys.stderr)


def _described(network: Network) -> str:
    sites = f" at {network.sites} sites" if network.sites > 1 else ""
    ranks = f" with {network.world} ranks" if network.world > network.total_hosts else ""
    return f"{network.total_hosts} hosts{sites}{ranks}"


def _traffic(counters: Counters) -> list[str]:
    """Traffic across the edges of hosts and sites."""
    return [
        f"MB that left / entered each {name}: "
        + ", ".join(
            f"{out / 1e6:.2f} / {into / 1e6:.2f}"
            for out, into in zip(level.out, level.into, strict=True)
        )
        for name, level in counters.levels.items()
        if len(level.out) > 1
    ]


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP end the laboratory as Ctrl-C does, in order; not if nohup ignores it."""

    def stop(number: int, _: object) -> None:
        raise Interrupted(f"stopped by {signal.Signals(number).name}; all ranks have been ended")

    # Shells have what they start in the background ignore SIGINT.
    handlers = {signal.SIGTERM: stop, signal.SIGINT: signal.default_int_handler}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = stop
    with contextlib.ExitStack() as undo:
        if threading.current_thread() is threading.main_thread():
            for which, handler in handlers.items():
                undo.callback(signal.signal, which, signal.signal(which, handler))
        yield


def _verify(chosen: argparse.Namespace) -> Answer:
    network = network_of(chosen)
    with _stoppable(), Lab(network, backend=chosen.backend) as lab:
        rows = list(verify.verify(lab, mbit=chosen.mbit))
        gateways = list(verify.verify_gateways(lab))
    complaints = [f"{row.pair[0]}-{row.pair[1]}: {text}" for row in rows for text in row.complaints]
    complaints += [f"site {one.sites[0]}: {text}" for one in gateways for text in one.complaints]
    data = {
        "backend": lab.backend,
        "links": [row.as_json() for row in rows],
        "gateways": [{**asdict(one), "complaints": one.complaints} for one in gateways],
        "ok": not complaints,
    }
    lines = [
        f"site {one.sites[0]} to {one.sites[1]}: {one.asked:g} Mbit/s asked, "
        f"{one.offered:g} offered, {one.got:.0f} got through"
        for one in gateways
    ]
    lines += [f"not as asked: {text}" for text in complaints]
    head = f"backend {lab.backend}, {_described(network)}, MTU {network.mtu}"
    status = EXIT_FAILED if complaints else 0
    return Answer(data, [head, _links(rows), *lines], status=status, width=WIDTH)


def _links(rows: Iterable[verify.LinkCheck]) -> Table:
    table = numbers_table(*HEADINGS)
    for row in rows:
        for name, one in (("datagrams", row.plain), ("aggregates", row.aggregated)):
            table.add_row(
                f"{row.pair[0]}-{row.pair[1]}",
                name,
                f"{row.link.loss:.3%}",
                f"{one.loss:.3%}",
                f"{row.link.mean_burst:.2f}" if row.link.loss else "-",
                f"{one.burst:.2f}" if one.lost else "-",
                f"{row.round_trip_asked:.2f}",
                f"{row.round_trip:.2f}" if math.isfinite(row.round_trip) else "-",
                f"{one.mbit:.0f}",
                "ok" if not row.complaints else "not as asked",
            )
    return table


def _check(chosen: argparse.Namespace) -> Answer:
    findings = backends.examine()
    severity = {True: Severity.OK, False: Severity.WARN}
    return Answer(
        [asdict(one) for one in findings],
        shown([Finding(one.name, one.found, severity[one.good]) for one in findings]),
        status=0 if backends.can_run(findings) else EXIT_FAILED,
    )


def _clean(chosen: argparse.Namespace) -> Answer:
    killed = leftovers.clean()
    said = [f"ended {one.pid} of laboratory {one.lab}: {one.command}" for one in killed]
    said.append(f"{len(killed)} leftovers")
    return Answer([asdict(one) for one in killed], list(map(Text, said)))


def _profiles(chosen: argparse.Namespace) -> Answer:
    data, said = {}, []
    for name, one in PROFILES.items():
        network = one.network
        data[name] = {**asdict(one), "network": network_io.as_data(network)}
        said += [f"{name}: {one.meaning}", f"  {network.link}", f"  {network.port}"]
        if network.sites > 1:
            said += [f"  between sites: {network.wan}", f"  {network.gateway}"]
        said += [f"  source: {one.source}", f"  assumed: {one.assumed}"]
    return Answer(data, list(map(Text, said)))


def _add_network(parser: argparse._ActionsContainer) -> None:
    add = parser.add_argument
    add("--profile", default="clean", metavar="NAME", help=f"one of {', '.join(PROFILES)}")
    add("--file", metavar="PATH", help="a network in JSON or TOML, not a profile")
    for name, meaning in WHOLE.items():
        add(_flag(name), type=int, metavar="N", help=meaning)
    how = "of a job on each host: one number, or one for each host"
    add("--ranks", type=_ranks, metavar="N[,N...]", help=how)
    add_numbers(parser, NUMBERS)
    how = (
        "TCP's congestion control on all hosts: cubic, bbr, reno or what the kernel has "
        "(the machine's)"
    )
    add("--congestion", metavar="NAME", help=how)
    how = (
        "between sites: rate=1g,delay=20ms,loss=1%% is a rate per site, shared by its hosts, "
        "and a one-way delay and loss of each pair of hosts; a profile's name stands for its link "
        "and its port"
    )
    add("--wan", metavar="[PROFILE,]NAME=N,...", help=how)


def _add_repeated(parser: argparse._ActionsContainer, *names: str) -> None:
    for name in names:
        form, meaning = REPEATED[name]
        text = f"{meaning}; may be repeated"
        parser.add_argument(f"--{name}", action="append", default=[], metavar=form, help=text)


def add_numbers(parser: argparse._ActionsContainer, table: Mapping[str, str]) -> None:
    """An option for each field of links or ports in ``table``, which has what it means; its value
    may have a unit: :func:`numbers`."""
    for name, meaning in table.items():
        parser.add_argument(_flag(name), metavar="N", help=meaning)


def numbers(options: argparse.Namespace, table: Mapping[str, str]) -> dict[str, Any]:
    """Values of the options of :func:`add_numbers` that are given. OptionError for none."""
    return {name: _number(name, text) for name, text in given(options, table).items()}


def _number(name: str, text: str | float) -> float:
    """``1%``, ``20ms``, ``1g``, or the same as plain numbers; a sweep has set a number itself."""
    found = network_io.quantity(name, name, text) if isinstance(text, str) else text
    if found is None:
        raise OptionError(f"{name} is {text!r}, wanted a number")
    return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def steps_of(texts: Iterable[str], network: Network) -> list[tuple[float, str, Network]]:
    """When --at changes what, and the network from then on. OptionError for what can't be."""
    times = []
    for text in texts:
        when, colon, change = text.partition(":")
        try:
            times.append((real(0)(when if colon else ""), change))
        except argparse.ArgumentTypeError:
            wanted = "SECONDS:[WHERE:]NAME=N,..., as in 5:rate=10"
            raise OptionError(f"--at {text!r} isn't {wanted}") from None
    out = []
    for seconds, text in sorted(times, key=lambda one: one[0]):
        network = _changed(network, text)
        out.append((seconds, text, network))
    return out


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


def tcp_flows(text: str) -> tcp.Flows:
    """``cubic``, ``cubic:2``, ``cubic:2:0-1``, each with ``@20%`` behind it or not."""
    before, at, behind = text.partition("@")
    name, _, rest = before.partition(":")
    count, _, pair = rest.partition(":")
    if count and not count.isdecimal():
        raise OptionError(f"--tcp {text!r} isn't NAME[:COUNT[:A-B]][@SHARE], as in cubic:2")
    share = _number("share", behind) if at else 1.0
    return tcp.Flows(name, int(count or 1), network_io.pair(pair) if pair else None, share)


def given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def network_of(options: argparse.Namespace) -> Network:
    """A profile or a file, changed by what else is written. OptionError for what can't be."""
    network = network_io.load(options.file) if options.file else profile(options.profile)
    changes = given(options, (*WHOLE, "ranks", "congestion")) | numbers(options, NUMBERS)
    network = network.with_parts(**changes)
    if options.wan is not None:
        if network.sites == 1:
            raise OptionError("--wan is what is between sites, and there is one; set --sites")
        network = network_io.wan(network, options.wan)
    for texts, place in ((options.link, network_io.pair), (options.port, network_io.host)):
        for text in texts:
            where, colon, _ = text.rpartition(":")
            if not colon:
                raise OptionError(f"{text!r} isn't WHERE:NAME=N,...")
            place(where)  # raises OptionError
            network = _changed(network, text)
    return network


def _ranks(text: str) -> int | tuple[int, ...]:
    """``2``, or ``3,2`` for a host of three and a host of two."""
    try:
        first, *others = map(int, text.split(","))
    except ValueError:
        wanted = "a whole number, or one for each host, as in 3,2"
        raise argparse.ArgumentTypeError(f"{text!r} isn't {wanted}") from None
    return (first, *others) if others else first


ACTIONS: Final[dict[str, tuple[Callable[[argparse.Namespace], Answer], str]]] = {
    "run": (_run, "the command after --, as the ranks of one job on all hosts"),
    "verify": (_verify, "measure the links, and set them beside what was asked"),
    "check": (_check, "what this machine offers, and what it lacks"),
    "clean": (_clean, "end what a killed laboratory left behind"),
    "profiles": (_profiles, "the networks that have names"),
}
