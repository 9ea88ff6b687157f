"""Steps of training on a network, by the engine itself in virtual time."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from lossycoll.cli.argtypes import real, whole
from lossycoll.cli.lab_args import NUMBERS, add_numbers
from lossycoll.lab.profiles import PROFILES
from lossycoll.simulate.training import METHODS, Trained, buckets_of, simulate_training

from .collective import group_options, network_of, size

MODELS: Final = {"resnet50": 25_557_032, "bert-large": 336_226_108, "gpt2": 124_439_808}
"""Parameters, as published."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    text = "whose parameters have gradients in float32 (%(default)s)"
    what.add_argument("--model", choices=list(MODELS), default="resnet50", help=text)
    what.add_argument("--bytes", type=size, metavar="N", help="of all gradients, as 100M")
    add("--bucket", type=size, default=25 << 20, metavar="N", help="bytes of a bucket (25M)")
    text = "of a micro-batch, forward and backward pass (%(default)s)"
    add("--compute", type=real(0), default=0.2, metavar="SECONDS", help=text)
    text = "standard deviation of its logarithm, over ranks and steps (%(default)s)"
    add("--sigma", type=real(0), default=0.05, metavar="S", help=text)
    add("--micro-batches", type=whole(1), default=1, metavar="N", help="of a step (%(default)s)")
    add("--method", choices=METHODS, default="plain", help="(%(default)s)")
    text = "DropCompute: a rank that has computed for so long begins no further micro-batch"
    add("--threshold", type=real(0), metavar="SECONDS", help=text)
    text = (
        "in which the last rank's host dies, from 0 (never); wants --option on_peer_loss=continue"
    )
    add("--death", type=whole(0), metavar="STEP", help=text)
    add("--steps", type=whole(1), default=7, metavar="N", help="in a row (%(default)s)")
    text = "of these, the first that don't count (%(default)s)"
    add("--settle", type=whole(0), default=2, metavar="N", help=text)
    add("--hosts", type=whole(1), metavar="N", help="how many there are (the network's)")
    add("--ranks-per-host", type=whole(1), default=1, metavar="N", help="(%(default)s)")
    text = f"one of {', '.join(PROFILES)}, or a file as of lossycoll lab --file (%(default)s)"
    add("--network", default="clean", metavar="NAME", help=text)
    add_numbers(parser, NUMBERS)
    add("--seed", type=whole(0), metavar="N", help="of all chance")
    text = "of the group (options.md), as in delivery=reliable; may be repeated"
    add("--option", action="append", default=[], metavar="NAME=VALUE", help=text)
    add("--json", action="store_true", help="print the result as JSON, not as a table")


def run(options: argparse.Namespace) -> int:
    """Prints what was found; returns the exit status."""
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
    if options.json:
        print(json.dumps(figures(found), allow_nan=False))
    else:
        Console().print(table(found, options))
    return 0


def figures(found: Trained) -> dict[str, Any]:
    """For JSON."""
    return {
        "seconds": found.seconds,
        "seconds_p99": found.seconds_p99,
        "computing": found.computing,
        "missing": found.missing,
        "bound": found.bound,
        "steps": [asdict(step) for step in found.steps],
    }


def table(found: Trained, options: argparse.Namespace) -> Table:
    """A row for each step, and one for those that count."""
    out = Table(title=f"{options.method} on {options.network}: {found.bound} takes most of a step")
    for column in ("step", "seconds", "computing", "missing", "dropped", "network"):
        out.add_column(column, justify="right")
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
