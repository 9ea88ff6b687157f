"""Run a job on hosts of its own, over a network as bad as you like.

lossycoll lab --hosts 4 --profile cross-dc -- python train.py
lossycoll lab --sites 2 --hosts 2 --ranks 2 --wan rate=1g,delay=20ms,loss=1% -- python train.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from lossycoll.errors import OptionError
from lossycoll.lab import backends, leftovers, network_io, report, tcp, verify
from lossycoll.lab.backends import BACKENDS
from lossycoll.lab.counters import Counters
from lossycoll.lab.job import GRACE_SECONDS, Ended, prefixed
from lossycoll.lab.laboratory import Lab
from lossycoll.lab.network import Network
from lossycoll.lab.profiles import PROFILES

from . import lab_args
from .argtypes import real
from .launcher import Interrupted, must_be_writable

ACTIONS: Final = {
    "run": "the command after --, as the ranks of one job on all hosts",
    "verify": "measure the links, and set them beside what was asked",
    "check": "what this machine offers, and what it lacks",
    "clean": "end what a killed laboratory left behind",
    "profiles": "the networks that have names",
}


HEADINGS: Final = (
    *("link", "sent as", "loss asked", "got", "burst asked", "got"),
    *("RTT asked, ms", "got", "Mbit/s", ""),
)
WIDTH: Final = 110


def add_arguments(command: argparse.ArgumentParser) -> None:
    actions = "; ".join(f"{name}: {meaning}" for name, meaning in ACTIONS.items())
    command.add_argument(
        "action", nargs="?", default="run", type=_action, metavar="ACTION", help=actions
    )
    lab_args.add_arguments(command)
    lab_args.add_events(command)
    parser = command.add_argument_group("the laboratory")
    parser.add_argument(
        "--backend", default="auto", choices=("auto", *BACKENDS), help="what makes the network"
    )
    parser.add_argument("--timeout", type=real(0), metavar="S", help="end the job after S seconds")
    parser.add_argument(
        "--grace",
        type=real(0),
        default=GRACE_SECONDS,
        metavar="S",
        help="how long ranks have to end when one has failed (%(default)g s)",
    )
    parser.add_argument(
        "--counters", metavar="PATH", help="write what was counted and what took packets, as JSON"
    )
    parser.add_argument(
        "--mbit",
        type=real(0.01),
        default=verify.MBIT,
        metavar="N",
        help="what verify offers a link at most (%(default)g)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print results as JSON, after a job's output its report"
    )


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
    return {
        "run": _run,
        "verify": _verify,
        "check": _check,
        "clean": _clean,
        "profiles": _profiles,
    }[chosen.action](chosen)


def _run(chosen: argparse.Namespace) -> int:
    if not chosen.words:
        print("lossycoll lab: nothing to run; write a command after --", file=sys.stderr)
        return 2
    network = lab_args.network_of(chosen)
    steps = lab_args.steps_of(chosen.at, network)
    tcp.placed(chosen.tcp, network)
    if chosen.counters:
        must_be_writable(Path(chosen.counters))
    backend = backends.choose(network, *(later for _, _, later in steps), name=chosen.backend)
    with _stoppable(), Lab(network, backend=backend) as lab:
        _say([f"{_described(network)}, backend {lab.backend}", *report.network(network)])
        changes = [(step[0], partial(_step, lab, *step)) for step in steps]
        with tcp.running(lab, chosen.tcp) as took:
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
    if chosen.counters:
        Path(chosen.counters).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if chosen.json:
        print(json.dumps(data))
    _say(_traffic(counters) if network.shape.has_levels else ())
    _say(report.took(counters))
    _say(report.tcp(took[0]) if took else ())
    unasked = sum(host.unasked for host in counters.hosts)
    if unasked:
        _say(
            [
                f"{unasked} packets were lost that nobody asked for: the job sent more than this "
                f"machine carries"
            ]
        )
    return _worst(ended)


def _step(lab: Lab, when: float, text: str, network: Network) -> None:
    lab.change_to(network)
    _say([f"after {when:g} s: {text}"])


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"lab: {line}", file=sys.stderr)


def _described(network: Network) -> str:
    shape = network.shape
    parts = [f"{network.total_hosts} hosts"]
    if shape.sites > 1:
        parts.append(f"at {shape.sites} sites")
    if shape.world > network.total_hosts:
        parts.append(f"with {shape.world} ranks")
    return " ".join(parts)


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


def _worst(ended: Sequence[Ended]) -> int:
    for one in ended:
        if one.code:
            _say([f"rank {one.rank} ended with status {one.status}"])
    return max(one.status for one in ended)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP end the laboratory as Ctrl-C does: in order."""

    def stop(number: int, _: object) -> None:
        raise Interrupted(f"stopped by {signal.Signals(number).name}; all ranks have been ended")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {which: signal.signal(which, stop) for which in (signal.SIGTERM, signal.SIGHUP)}
    # Shells have what they start in the background ignore it.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _verify(chosen: argparse.Namespace) -> int:
    network = lab_args.network_of(chosen)
    rows = []
    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    with _stoppable(), Lab(network, backend=chosen.backend) as lab:
        backend = lab.backend
        for row in verify.verify(lab, mbit=chosen.mbit):
            rows.append(row)
            _add(table, row)
        gateways = list(verify.verify_gateways(lab))
    complaints = [f"{row.pair[0]}-{row.pair[1]}: {text}" for row in rows for text in row.complaints]
    complaints += [f"site {one.sites[0]}: {text}" for one in gateways for text in one.complaints]
    if chosen.json:
        data: dict[str, Any] = {
            "links": [{**asdict(row), "complaints": row.complaints} for row in rows],
            "gateways": [{**asdict(one), "complaints": one.complaints} for one in gateways],
        }
        print(json.dumps({"backend": backend, **data, "ok": not complaints}))
    else:
        console = Console(width=max(WIDTH, Console().width))
        console.print(f"backend {backend}, {_described(network)}, MTU {network.mtu}")
        console.print(table, highlight=False)
        for one in gateways:
            console.print(
                f"site {one.sites[0]} to {one.sites[1]}: {one.asked:g} Mbit/s asked, "
                f"{one.offered:g} offered, {one.got:.0f} got through",
                highlight=False,
            )
        for text in complaints:
            console.print(f"not as asked: {text}", highlight=False, markup=False)
    return 1 if complaints else 0


def _add(table: Table, row: verify.LinkCheck) -> None:
    for name, one in (("datagrams", row.plain), ("aggregates", row.aggregated)):
        table.add_row(
            f"{row.pair[0]}-{row.pair[1]}",
            name,
            f"{row.link.loss:.3%}",
            f"{one.loss:.3%}",
            f"{row.link.mean_burst:.2f}" if row.link.loss else "-",
            f"{one.burst:.2f}" if one.lost else "-",
            f"{row.round_trip_asked:.2f}",
            f"{row.round_trip:.2f}",
            f"{one.mbit:.0f}",
            "ok" if not row.complaints else "not as asked",
        )


def _check(chosen: argparse.Namespace) -> int:
    findings = backends.examine()
    if chosen.json:
        print(json.dumps([asdict(one) for one in findings]))
    else:
        table = Table(box=None, pad_edge=False)
        for _ in range(3):
            table.add_column(overflow="fold")
        for one in findings:
            table.add_row("[green]ok[/]" if one.good else "[yellow]no[/]", one.name, one.found)
        Console().print(table, highlight=False)
    return 0 if backends.can_run(findings) else 1


def _clean(chosen: argparse.Namespace) -> int:
    killed = leftovers.clean()
    if chosen.json:
        print(json.dumps([asdict(one) for one in killed]))
    else:
        for one in killed:
            print(f"ended {one.pid} of laboratory {one.lab}: {one.command}")
        print(f"{len(killed)} leftovers")
    return 0


def _profiles(chosen: argparse.Namespace) -> int:
    if chosen.json:
        data: dict[str, Any] = {
            name: {**asdict(one), "network": network_io.as_data(one.network)}
            for name, one in PROFILES.items()
        }
        print(json.dumps(data))
        return 0
    for name, one in PROFILES.items():
        print(f"{name}: {one.meaning}\n  {one.network.link}\n  {one.network.port}")
        if one.network.sites > 1:
            print(f"  between sites: {one.network.wan}\n  {one.network.gateway}")
        print(f"  source: {one.source}\n  assumed: {one.assumed}")
    return 0
