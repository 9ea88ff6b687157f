"""Collectives and steps of training on a network, by the engine itself in virtual time."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from lossycoll.cli.answer import EXIT_FAILED, Answer
from lossycoll.cli.argtypes import real, size, whole
from lossycoll.cli.lab import NUMBERS, add_numbers, numbers, tcp_flows
from lossycoll.errors import OptionError
from lossycoll.lab import network_io, report
from lossycoll.lab.network import Network
from lossycoll.lab.profiles import PROFILES, profile
from lossycoll.options.fields import Options
from lossycoll.options.schema import read
from lossycoll.simulate.collective import (
    COLLECTIVES,
    FOLDED_HOSTS,
    SETTLE,
    USUALLY_SIMULATED,
    Simulated,
    simulate_collective,
    usual_whole,
)
from lossycoll.simulate.fold import NotAlikeError
from lossycoll.simulate.training import METHODS, Trained, buckets_of, simulate_training

T = TypeVar("T")
SIZE: Final = size(4, 1 << 32)


def add_collective(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--collective", choices=list(COLLECTIVES), default="all_reduce", help="(%(default)s)")
    add("--bytes", type=SIZE, default=25 << 20, metavar="N", help="of the largest buffer (25M)")
    text = (
        f"simulate so many hosts, which stand for all ({FOLDED_HOSTS} or fewer beyond "
        f"{USUALLY_SIMULATED} ranks, where hosts are alike; else all)"
    )
    add("--whole", type=whole(1), metavar="N", help=text)
    _add_network(parser)
    add("--calls", type=whole(1), default=7, metavar="N", help="in a row (%(default)s)")
    text = "of these, the first that don't count (%(default)s)"
    add("--settle", type=whole(0), default=SETTLE, metavar="N", help=text)
    text = "for which ranks compute between calls (%(default)s)"
    add("--gap", type=real(0), default=0.0, metavar="SECONDS", help=text)
    text = "flows of TCP (reno, cubic) beside the calls, as of lossycoll lab; may be repeated"
    form = "NAME[:COUNT[:A-B]][@SHARE]"
    add("--tcp", action="append", type=tcp_flows, default=[], metavar=form, help=text)
    text = (
        "a rank rests so long between two turns, as on a busy machine (a 200th of the round trip)"
    )
    add("--wake-ms", type=real(0), metavar="MS", help=text)
    add(
        "--sweep",
        metavar="NAME=A:B",
        help="repeat with hosts, ranks_per_host, bytes or a number of the network from A to B, "
        "twice as much each time, or with NAME=A,B,...",
    )
    add("--picture", type=Path, metavar="FILE.png", help="where to draw a sweep")


def _add_network(parser: argparse.ArgumentParser) -> None:
    """The options of both commands: the network, what is on it, and the group's own options."""
    add = parser.add_argument
    add("--hosts", type=whole(1), metavar="N", help="how many there are (the network's)")
    add("--ranks-per-host", type=whole(1), default=1, metavar="N", help="(%(default)s)")
    text = f"one of {', '.join(PROFILES)}, or a file as of lossycoll lab --file (%(default)s)"
    add("--network", default="clean", metavar="NAME", help=text)
    add_numbers(parser, NUMBERS)
    add("--seed", type=whole(0), metavar="N", help="of all chance")
    text = "of the group (options.md), as in delivery=reliable; may be repeated"
    add("--option", action="append", default=[], metavar="NAME=VALUE", help=text)


SWEPT: Final[dict[str, Callable[[str], int]]] = {"hosts": int, "ranks_per_host": int, "bytes": SIZE}
"""Names that can be swept besides a network's numbers, and their types."""


def run_collective(options: argparse.Namespace) -> Answer:
    if options.picture is not None and options.sweep is None:
        raise OptionError("--picture draws a sweep: give --sweep, as in --sweep hosts=2:64")
    group = group_options(options.option)
    points = [*swept(options)]
    found = [simulated(one, group) for _, one in tracked(points)]
    name = options.sweep.partition("=")[0] if options.sweep else ""
    rows = [
        figures(one) | ({name: value} if name else {})
        for (value, _), one in zip(points, found, strict=True)
    ]
    folded = [
        f"{row['hosts']} hosts: {row['hosts_simulated']} were simulated and stand for all, each "
        f"calling with {row['bytes']:,} bytes"
        for row in rows
        if row["hosts_simulated"] < row["hosts"]
    ]
    beside = [line for one in found for line in report.tcp_flows(one.tcp)]
    title = f"{options.collective} of {options.bytes / (1 << 20):g} MiB on {options.network}"
    return Answer(
        rows if name else rows[0],
        [table(name, rows, title), *folded, *beside],
        partial(draw, name, rows, title),
        EXIT_FAILED if any(one.failed for one in found) else 0,
    )


def tracked(points: Sequence[T]) -> Iterable[T]:
    """The points, with a bar of progress on a terminal."""
    errors = Console(stderr=True)
    hidden = not errors.is_terminal
    return track(points, "simulating", console=errors, transient=True, disable=hidden)


def group_options(texts: Sequence[str]) -> Options:
    """The environment's, and before these what is written. OptionError for what can't be."""
    table = {entry.name: entry for entry in fields(Options)}
    written: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise OptionError(f"--option {text!r}: wanted NAME=VALUE, as in delivery=reliable")
        written[name] = read(table[name], value) if name in table else value
    return Options.from_env(None, **written)


def network_of(options: argparse.Namespace) -> Network:
    """A profile or a file, changed by what else is written."""
    name = options.network
    is_file = name not in PROFILES and Path(name).suffix in (".json", ".toml")
    network = network_io.load(name) if is_file else profile(name)
    network = network.with_parts(**numbers(options, NUMBERS))
    return network if options.seed is None else replace(network, seed=options.seed)


def swept(options: argparse.Namespace) -> list[tuple[Any, argparse.Namespace]]:
    """Each value of the sweep, and the options with it; one point where nothing is swept."""
    if options.sweep is None:
        return [(None, options)]
    name, equals, text = options.sweep.partition("=")
    field = network_io.SHORT.get(name, name)
    if not equals or (name not in SWEPT and field not in NUMBERS):
        known = ", ".join([*SWEPT, *NUMBERS])
        raise OptionError(f"--sweep {options.sweep!r}: wanted NAME=A:B, NAME one of {known}")

    def value_of(word: str) -> Any:
        try:
            return SWEPT[name](word) if name in SWEPT else network_io.quantity(name, field, word)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise OptionError(f"--sweep {options.sweep!r}: {error}") from None

    first, colon, last = text.partition(":")
    values = [value_of(word) for word in ([first, last] if colon else text.split(","))]
    if colon:
        begin, end = values
        if None in values or not 0 < begin <= end:  # "none" is a rate's lack
            raise OptionError(f"--sweep {options.sweep!r}: wanted A above 0, and B no less")
        values = [begin]
        while values[-1] * 2 <= end:
            values.append(values[-1] * 2)
    dest = name if name in SWEPT else field
    return [(one, argparse.Namespace(**{**vars(options), dest: one})) for one in values]


def simulated(options: argparse.Namespace, group: Options) -> Simulated:
    """One point. Where it isn't said how many hosts stand for all, and none can, all are whole."""
    network = network_of(options)
    hosts = network.total_hosts if options.hosts is None else options.hosts

    def with_whole(whole: int | None) -> Simulated:
        return simulate_collective(
            network,
            options.bytes,
            collective=options.collective,
            hosts=hosts,
            ranks_per_host=options.ranks_per_host,
            options=group,
            calls=options.calls,
            settle=min(options.settle, options.calls - 1),
            gap=options.gap,
            tcp=options.tcp,
            grain=None if options.wake_ms is None else options.wake_ms * 1e-3,
            whole=whole,
        )

    if options.whole is not None:
        return with_whole(options.whole)
    try:
        return with_whole(usual_whole(hosts, options.ranks_per_host))
    except NotAlikeError:
        return with_whole(None)


def figures(found: Simulated) -> dict[str, Any]:
    """For JSON: medians, and sums over the calls that count, per call."""
    calls = found.steady
    counts = [asdict(call.counts) for call in calls]
    per_call = {name: sum(one[name] for one in counts) / len(calls) for name in counts[0]}
    return {
        "hosts": found.hosts,
        "hosts_simulated": found.whole,
        "bytes": found.nbytes,
        "seconds": found.seconds,
        "seconds_interval": found.interval,
        "seconds_p99": found.seconds_p99,
        "limit_seconds": calls[-1].limit,
        "ratio": found.ratio if calls[-1].limit else None,
        "bound": found.bound,
        "missing": found.missing,
        "resent": sum(call.resent for call in calls) / len(calls),
        "failed": found.failed,
        "network_packets": per_call["packets"],
        "network_bytes": per_call["bytes"],
        "site_packets": per_call["site_packets"],
        "site_bytes": per_call["site_bytes"],
        "host_packets": per_call["local_packets"],
        "host_bytes": per_call["local_bytes"],
        "dropped": {
            "own_port": per_call["dropped_up"],
            "gateway": per_call["dropped_gateway"],
            "link": per_call["dropped_link"],
            "receivers_port": per_call["dropped_down"],
            "policer": per_call["policed"],
            "network": per_call["lost"],
            "receive_buffer": per_call["overflow"],
        },
        "tcp": report.tcp_flows_data(found.tcp),
        "calls": [
            {"seconds": call.seconds, "missing": call.missing, "code": call.code}
            for call in found.calls
        ],
    }


def table(name: str, rows: Sequence[dict[str, Any]], title: str) -> Table:
    numbers = (*([name] if name else []), "median", "p99", "of limit", "missing", "network")
    columns = (Column(one, justify="right") for one in numbers)
    out = Table(*columns, "lost where", "bound", title=title)
    for row in rows:
        causes = [
            f"{cause.replace('_', ' ')} {count:,.0f}"
            for cause, count in row["dropped"].items()
            if count
        ]
        low, high = row["seconds_interval"]
        interval = f" ({seconds(low)} to {seconds(high)})" if high > low else ""
        out.add_row(
            *([f"{row[name]:g}"] if name else []),
            seconds(row["seconds"]) + interval,
            seconds(row["seconds_p99"]),
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            f"{row['missing']:.2%}",
            f"{row['network_bytes'] / (1 << 20):,.1f} MiB",
            ", ".join(causes) or "nothing",
            row["bound"] if not row["failed"] else f"failed with code {row['failed']}",
        )
    return out


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def draw(name: str, rows: Sequence[dict[str, Any]], title: str, plt: Any, path: Path) -> None:
    values = [row[name] for row in rows]
    figure, (time, missing) = plt.subplots(2, 1, figsize=(8, 7), sharex=True)
    time.plot(values, [row["seconds"] for row in rows], marker="o", label="median")
    time.plot(values, [row["seconds_p99"] for row in rows], marker=".", label="99th percentile")
    intervals = np.array([row["seconds_interval"] for row in rows])
    if (intervals[:, 1] > intervals[:, 0]).any():
        label = "error of hosts that stand for others"
        time.fill_between(values, *intervals.T, alpha=0.2, label=label)
    limits = [row["limit_seconds"] for row in rows]
    time.plot(values, limits, color="black", linestyle=":", label="limit")
    time.set(ylabel="seconds", title=title, yscale="log")
    time.legend()
    missing.plot(values, [100 * row["missing"] for row in rows], marker="o")
    missing.set(xlabel=name.replace("_", " "), ylabel="missing, % of packets")
    missing.set_ylim(bottom=0)
    if min(values) > 0 and max(values) >= 8 * min(values):
        missing.set_xscale("log", base=2)
        missing.set_xticks(values, [f"{value:g}" for value in values])
    figure.savefig(path, dpi=130)


MODELS: Final = {"resnet50": 25_557_032, "bert-large": 336_226_108, "gpt2": 124_439_808}
"""Parameters, as published."""


def add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    text = "whose parameters have gradients in float32 (%(default)s)"
    what.add_argument("--model", choices=list(MODELS), default="resnet50", help=text)
    what.add_argument("--bytes", type=SIZE, metavar="N", help="of all gradients, as 100M")
    add("--bucket", type=SIZE, default=25 << 20, metavar="N", help="bytes of a bucket (25M)")
    text = "of a micro-batch, forward and backward pass (%(default)s)"
    add("--compute", type=real(0), default=0.2, metavar="SECONDS", help=text)
    text = "standard deviation of its logarithm, over ranks and steps (%(default)s)"
    add("--sigma", type=real(0), default=0.05, metavar="S", help=text)
    add("--micro-batches", type=whole(1), default=1, metavar="N", help="of a step (%(default)s)")
    add("--method", choices=METHODS, default="plain", help="(%(default)s)")
    text = "DropCompute: a rank that has computed for so long begins no further micro-batch"
    add("--threshold", type=real(0), metavar="SECONDS", help=text)
    text = "in which the last host dies, from 0 (never); wants --option on_peer_loss=continue"
    add("--death", type=whole(0), metavar="STEP", help=text)
    add("--steps", type=whole(1), default=7, metavar="N", help="in a row (%(default)s)")
    text = "of these, the first that don't count (%(default)s)"
    add("--settle", type=whole(0), default=2, metavar="N", help=text)
    _add_network(parser)


def run_training(options: argparse.Namespace) -> Answer:
    network = network_of(options)
    hosts = network.total_hosts if options.hosts is None else options.hosts
    shape = options.steps, hosts * options.ranks_per_host, options.micro_batches
    spread = np.random.default_rng(network.seed).lognormal(0, options.sigma, shape)
    found = simulate_training(
        network,
        buckets_of(options.bytes or 4 * MODELS[options.model], options.bucket),
        options.compute * spread,
        hosts=hosts,
        ranks_per_host=options.ranks_per_host,
        options=group_options(options.option),
        method=options.method,
        threshold=options.threshold,
        death=options.death,
        settle=min(options.settle, options.steps - 1),
    )
    shown = ("seconds", "seconds_p99", "computing", "missing", "bound")
    said = {name: getattr(found, name) for name in shown}
    return Answer(said | {"steps": [asdict(one) for one in found.steps]}, [_steps(found, options)])


def _steps(found: Trained, options: argparse.Namespace) -> Table:
    """A row for each step, and one for those that count."""
    names = ("step", "seconds", "computing", "missing", "dropped", "network")
    title = f"{options.method} on {options.network}: {found.bound} takes most of a step"
    out = Table(*(Column(name, justify="right") for name in names), title=title)
    for number, step in enumerate(found.steps):
        out.add_row(
            str(number),
            f"{step.seconds:.3f}",
            f"{step.computing:.3f}",
            f"{step.missing:.2%}",
            f"{step.dropped:.1%}",
            f"{step.bytes / (1 << 20):,.1f} MiB",
        )
    out.add_section()
    out.add_row("median", f"{found.seconds:.3f}", f"{found.computing:.3f}", f"{found.missing:.2%}")
    out.add_row("p99", f"{found.seconds_p99:.3f}")
    return out
