"""Train a small GPT with gloo, on a clean network, and with each method while packets are lost.

The runs have the same seed, data and steps.
"""

from __future__ import annotations

import argparse
import platform
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from lossycoll.cli.answer import (
    Answer,
    add_json,
    console_of,
    give,
    must_be_writable,
)
from lossycoll.cli.argtypes import inject_text, names, real, share, whole
from lossycoll.cli.launcher import launch, progress

from . import report
from .methods import DEMO_RUNS
from .report import demo_runs

HEAD_WIDTH = 32  # as in model, which would import torch before --help can answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = tuple(demo_runs())
    add = parser.add_argument
    add("--loss", type=share, default=0.1, help="share of packets to drop (default 0.1)")
    add("--burst", type=real(1), default=1.0, help="mean length of a loss, in packets (default 1)")
    add("--ranks", type=whole(2, 64), default=4, help="processes (default 4)")
    add("--steps", type=whole(1), default=200, help="optimizer steps of each run (default 200)")
    add("--seed", type=whole(0, 2**31 - 1), default=7, help="of everything random (default 7)")
    add("--layers", type=whole(1, 96), default=2, help="transformer blocks (default 2)")
    width = whole(HEAD_WIDTH, 8192, HEAD_WIDTH)
    add("--width", type=width, default=64, help="width of the model (default 64)")
    add("--context", type=whole(8, 4096), default=64, help="bytes of context (default 64)")
    add("--batch", type=whole(1, 4096), default=64, help="windows per rank and step (default 64)")
    add("--mtu", type=whole(576, 65535), default=1500, help="of the lossy runs (default 1500)")
    how = f"which to do: some of {','.join(known)} (default: all)"
    add("--runs", type=names(known), default=known, help=how)
    add("--out", type=Path, default=Path("demo-results"), help="folder for results")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    console = console_of(options)
    saved = options.out / "demo.json"
    must_be_writable(saved, make_folder=True)
    results: dict[str, Any] = {
        "lossycoll": metadata.version("lossycoll"),
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "options": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items()
            if name not in ("command", "run", "json")
        },
        "runs": {},
    }
    for name in options.runs:
        results["runs"][name] = _one_run(name, options, console)
    report.compare(results["runs"])
    said = [report.table(results["runs"]), *report.remarks(results["runs"])]
    said.append(f"figures: {saved}")
    answer = Answer(results, said, partial(report.draw, results))
    return give(answer, options, file=saved, picture=options.out / "demo.png")


def _one_run(name: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Starts the ranks, shows how far they are, and sums up what they found."""
    method = demo_runs()[name]
    backend = "gloo" if name == "gloo" else "lossy"
    loss = 0.0 if name in DEMO_RUNS else options.loss
    config = {"backend": backend, "method": method.name, "module": method.module, "loss": loss}
    for option in ("steps", "seed", "layers", "width", "context", "batch"):
        config[option] = getattr(options, option)
    environment = {
        "LOSSYCOLL_INJECT": inject_text(loss, options.burst, options.seed),
        # Loopback would take packets of 64 KiB, of which a loss would be another matter.
        "LOSSYCOLL_MTU": str(options.mtu),
    }
    label = f"{name}, {loss:.0%} lost" if loss else name
    started = time.monotonic()
    with progress(console, label, options.steps) as on_event:
        ranks = launch(
            "lossycoll.cli.demo.worker",
            config,
            ranks=options.ranks,
            folder=options.out / name,
            environment=environment,
            on_event=on_event,
        )
    return report.summarize(ranks, backend, loss, time.monotonic() - started)
