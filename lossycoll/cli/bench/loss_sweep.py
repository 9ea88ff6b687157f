"""Time against loss: the benchmark's ranks on the hosts of a laboratory, one loss after another.

There packets of TCP are lost as well. Without a laboratory, loss is injected into what the lossy
backend receives, which gloo doesn't feel.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

from lossycoll.cli.argtypes import inject_text
from lossycoll.cli.demo.report import percentile
from lossycoll.cli.launcher import (
    LaunchError,
    launch,
    on_one_machine,
    outcome,
    prepare,
    scratch,
    with_last_lines,
)
from lossycoll.lab import Lab, Link, Network, Port
from lossycoll.lab.backends import missing

WORKER = "lossycoll.cli.bench.worker"
MBIT, ONE_WAY_MS, QUEUE_MS = 1000.0, 10.0, 25.0
"""The laboratory's network: a good wide-area path, as in benchmarks/studies/lossy_links."""
MOST_BYTES = 1 << 20
"""Bytes that gloo carries over such a path within a second or two at 1%."""
LOSS_TIME, STEP_TIME = 3, 10
"""Factor of time for a loss and for steps, relative to a size."""
RANK_SECONDS = 900.0


def measure(
    options: argparse.Namespace,
    config: Mapping[str, Any],
    environment: Mapping[str, str | None],
    on_loss: Callable[[str], None],
) -> dict[str, Any]:
    """A row per loss and backend, and steps of training at the loss in the middle."""
    lacking = missing("switch")
    size = min(MOST_BYTES, max(options.sizes))
    middle = options.losses[len(options.losses) // 2]
    rows: list[dict[str, Any]] = []
    steps: dict[str, list[float]] = {}
    injected = 0
    for loss in options.losses:
        on_loss(f"time against loss: {loss:.3g}")
        own = {
            **config,
            "backends": [name for name in options.backend if name != "nccl"],
            "sizes": (size,),
            "seconds": LOSS_TIME * options.seconds,
            "verify": False,
            "compute_seconds": 0,
            "step_seconds": STEP_TIME * options.seconds if loss == middle else 0,
        }
        if lacking:
            inject = inject_text(loss, 1, options.seed)
            found = run_here(own, options.ranks, {**environment, "LOSSYCOLL_INJECT": inject})
        else:
            without = {**environment, "LOSSYCOLL_INJECT": None}
            found = _run_in_laboratory(own, options.ranks, loss, without)
        steps = found["steps"] or steps
        injected += (found["traffic"] or {}).get("packets_injected", 0)
        rows += [
            {"loss": loss, "backend": name, **summary(times), "seconds": times}
            for name, times in found["sizes"][0]["seconds"].items()
        ]
    told = f"laboratory, {MBIT:g} Mbit/s, {2 * ONE_WAY_MS:g} ms there and back, all packets alike"
    if lacking:
        told = "loss injected into what lossy receives; gloo's TCP loses nothing"
    return {
        "network": told,
        "without_laboratory": lacking,
        "injected": injected,
        "bytes": size,
        "rows": rows,
        "steps": {"loss": middle, "seconds": steps},
    }


def summary(seconds: list[float]) -> dict[str, float]:
    return {
        "median_ms": 1e3 * percentile(seconds, 0.5),
        "p99_ms": 1e3 * percentile(seconds, 0.99),
    }


def run_here(
    config: Mapping[str, Any],
    ranks: int,
    environment: Mapping[str, str | None],
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """What the benchmark's ranks measure on this machine."""
    with scratch("lossycoll-bench-") as folder:
        found: dict[str, Any] = launch(
            WORKER,
            config,
            ranks=ranks,
            folder=folder,
            environment=environment,
            on_event=on_event,
        )
        return found


def _run_in_laboratory(
    config: Mapping[str, Any], ranks: int, loss: float, environment: Mapping[str, str | None]
) -> dict[str, Any]:
    network = Network(
        hosts=ranks,
        link=Link(loss=loss, delay_ms=ONE_WAY_MS),
        port=Port(up_mbit=MBIT, down_mbit=MBIT, queue_ms=QUEUE_MS),
    )
    # A host has one interface, and the laboratory names it.
    own = {k: v for k, v in on_one_machine().items() if k != "GLOO_SOCKET_IFNAME"}
    with scratch("lossycoll-bench-") as folder, Lab(network) as lab:
        command = [sys.executable, "-m", WORKER, prepare(folder, config)]
        for rank in lab.run(command, {**own, **environment}, timeout=RANK_SECONDS):
            if rank.code:
                text = f"rank {rank.rank} failed in the laboratory with exit code {rank.code}"
                raise LaunchError(with_last_lines(text, rank.output))
        found: dict[str, Any] = outcome(folder)
        return found
