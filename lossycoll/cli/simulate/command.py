"""Predict what collectives take on a network (docs/simulate.md), or a swarm's rounds."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Column, Table

from lossycoll.cli.answer import Answer, add_json, give, must_be_png
from lossycoll.cli.argtypes import real, share, whole
from lossycoll.options.fields import Options
from lossycoll.plan.grid import Grid, parse
from lossycoll.simulate.averaging import METHODS, rounds_to, variances
from lossycoll.simulate.control import Control, simulate_control

from . import collective
from .collective import seconds, tracked

TARGETS: Final = {"1e-9": 1e-9, "1e-4": 1e-4}
"""Variances, as the published table has them."""
MOST_ROUNDS: Final = 50


def _add_moshpit(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--peers", type=whole(2, 1 << 17), default=512, help="how many there are (default 512)")
    add("--grid", type=_grid, default=Grid((32, 32)), help="the grid's shape (default 32x32)")
    text = "probability that a peer fails in a round (default 0)"
    add("--failure", type=share, default=0.0, help=text)
    add("--seeds", type=whole(1, 10_000), default=40, help="runs, seeded from 0 on (default 40)")
    add("--picture", type=Path, metavar="FILE.png", help="where to draw variances round by round")


def _moshpit(options: argparse.Namespace) -> Answer:
    peers, grid, failure = options.peers, options.grid, options.failure
    of = f"{peers} peers, grid {grid}, failure {failure:g}"
    columns = (Column(target, justify="right") for target in TARGETS)
    table = Table("method", *columns, title=f"Rounds until the variance is below, {of}")
    found = {}
    for name in tracked([*METHODS]):
        rounds = rounds_to(
            METHODS[name], peers, grid, failure, list(TARGETS.values()), seeds=options.seeds
        )
        found[name] = dict(zip(TARGETS, rounds, strict=True))
        shown = (f"{mean:.1f}" if mean < MOST_ROUNDS else f"{MOST_ROUNDS} +" for mean in rounds)
        table.add_row(name, *shown)
    return Answer(found, [table], partial(draw_moshpit, peers, grid, failure))


def _grid(text: str) -> Grid:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


ROUNDS: Final = 16
SEEDS: Final = 20
LABELS: Final = {
    "moshpit": "Moshpit, peers stay in their cells",
    "moshpit_chunks": "Moshpit, peers move by the paper's rule",
    "random_groups": "random groups",
    "all_reduce": "one all-reduce of all",
    "sgp": "SGP",
    "gossip": "gossip on a ring",
}


def draw_moshpit(peers: int, grid: Grid, failure: float, plt: Any, path: Path) -> None:
    """Writes the picture to ``path``, a PNG: the mean variance of ``SEEDS`` runs of each method."""
    figure, axes = plt.subplots(figsize=(8, 5.4))
    for name, method in METHODS.items():
        runs = [variances(method, peers, grid, failure, ROUNDS, seed) for seed in range(SEEDS)]
        mean = np.maximum(np.mean(runs, axis=0), 1e-16)  # below it there is but rounding
        axes.semilogy(mean, marker="o", markersize=3.5, label=LABELS[name])
    for target in (1e-4, 1e-9):
        axes.axhline(target, color="black", linewidth=0.7, linestyle=":")
        text = f"$10^{{{math.log10(target):.0f}}}$, as in the table"
        where: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "top"}
        axes.annotate(text, (0.8, target), fontsize=9, **where)
    axes.set(xlabel="round", ylabel="variance of the peers' values", xlim=(0, ROUNDS))
    axes.set_title(f"{peers} peers, grid {grid}, {failure:.1%} of peers fail in each round")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(path, dpi=130)


def _add_control(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=whole(4), default=1000, metavar="N", help="of the job (%(default)s)")
    text = "option of that name, which says when a silent rank is lost (%(default)s)"
    default = Options().liveness
    add("--liveness", type=real(0.1), default=default, metavar="SECONDS", help=text)
    text = "longest way of a message from one host to another (%(default)s)"
    add("--delay-ms", type=real(0), default=1.0, metavar="MS", help=text)
    add("--seed", type=whole(0), default=0, metavar="N", help="of all chance (%(default)s)")


def _control(options: argparse.Namespace) -> Answer:
    found = simulate_control(
        options.ranks,
        liveness=options.liveness,
        delay=1e-3 * options.delay_ms,
        seed=options.seed,
    )
    return Answer(asdict(found), [_deaths(found)])


def _deaths(found: Control) -> Table:
    columns = (
        Column(one, justify="right") for one in ("half know", "all know", "coordinator busy")
    )
    title = f"coordinator of {found.ranks:,} ranks, liveness {found.liveness:g} s"
    out = Table("", *columns, title=title)
    out.add_row("start: all are here", "", seconds(found.ready), seconds(found.ready_busy))
    for name, told in (
        ("a process ends", found.ended),
        ("a host falls silent", found.silent),
        ("the coordinator ends", found.coordinator),
    ):
        out.add_row(name, seconds(told.median), seconds(told.last), seconds(told.busy))
    out.add_row("all follow the next one", "", seconds(found.followed))
    out.caption = (
        f"heartbeats: {found.messages:,.0f} messages and {found.bytes / 1000:,.1f} KB a second, "
        f"{found.busy:.2%} of a processor; {found.descriptors:,} descriptors, "
        f"{found.memory / 1e6:,.0f} MB for connections"
    )
    return out


PARTS: Final = {
    "collective": (
        "A collective on a network, by the engine itself in virtual time: its time and what is "
        "missing.",
        collective.add_collective,
        collective.run_collective,
    ),
    "training": (
        "Steps of training on a network, by the engine itself in virtual time.",
        collective.add_training,
        collective.run_training,
    ),
    "moshpit": (
        "Moshpit All-Reduce and what it competes with: rounds that a swarm needs, where peers "
        "fail.",
        _add_moshpit,
        _moshpit,
    ),
    "control": (
        "The control plane of a large job: start, deaths and heartbeats, by its state machines.",
        _add_control,
        _control,
    ),
}
"""Each with a summary, its arguments, and what answers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="what", required=True, metavar="what")
    for name, (summary, add_arguments, answer) in PARTS.items():
        part = parts.add_parser(name, help=summary, description=summary)
        add_arguments(part)
        add_json(part)
        part.set_defaults(answer=answer, picture=None)


def run(options: argparse.Namespace) -> int:
    must_be_png(options.picture)
    return give(options.answer(options), options, picture=options.picture)
