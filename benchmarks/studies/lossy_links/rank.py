"""One host of the benchmark: ``python -m benchmarks.studies.lossy_links.rank CONFIG OUT``.

CONFIG is JSON: rounds of each variant, and what is timed (a size in MiB, "step" for a step of DDP,
or a training method's name) in which variants. They take turns, and the order turns around each
time. OUT gets when this rank began and ended, by the clock that all hosts of a laboratory share,
and what was missing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from benchmarks.common.lab_job import answer
from benchmarks.common.rank_kit import agreed, tcp_group
from lossycoll.cli.demo.methods import methods
from lossycoll.cli.demo.model import VOCABULARY, ByteGPT, next_byte_loss
from lossycoll.cli.demo.worker import ADAMW

SCOPES: dict[str, Any] = {
    "lossy": lambda: lossycoll.lossy(repair=0),
    "repair": lambda: lossycoll.lossy(repair=1),
    "reliable": lossycoll.reliable,
    "gloo": contextlib.nullcontext,
    "gloo-bbr": contextlib.nullcontext,
}
SLOW_SECONDS = 5.0
"""A variant that takes longer is measured once: the others would wait for it."""
CONTROL = {"gloo": "cubic", "gloo-bbr": "bbr"}
LAYERS, WIDTH, CONTEXT, BATCH = 2, 256, 64, 2
"""Of the DDP step's model: many gradients for few sums, as on a machine with an accelerator."""


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    used = {variant for _, variants in config["what"] for variant in variants}
    groups = {name: tcp_group(CONTROL[name]) for name in sorted(used) if name in CONTROL}
    out = []
    for what, variants in config["what"]:
        work = work_of(what, groups)
        out.append(measure(work, variants, config["rounds"], groups))
        del work
        gc.collect()  # DDP is part of a reference cycle, and holds the group
    answer(out)
    dist.destroy_process_group()


Work = Callable[[str], None]
"""What is timed, done in one of the variants."""


def work_of(what: str | float, groups: dict[str, dist.ProcessGroup]) -> Work:
    if isinstance(what, float):
        return all_reduces(what, groups)
    return ddp_steps(groups) if what == "step" else method_steps(what)


def method_steps(name: str) -> Work:
    """Whole steps of a training method, with its defaults."""
    (method,) = (method for method in methods() if method.name == name)
    model = ByteGPT(LAYERS, WIDTH, CONTEXT)
    prepared = method.prepare(model, torch.optim.AdamW, ADAMW)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))

    def work(variant: str) -> None:
        prepared.optimizer.zero_grad()
        inputs, wanted = tokens[:, :-1], tokens[:, 1:]
        next_byte_loss(prepared.forward(inputs), wanted).backward()  # type: ignore[no-untyped-call]
        prepared.optimizer.step()
        prepared.wait_parameters()

    return work


def all_reduces(mib: float, groups: dict[str, dist.ProcessGroup]) -> Work:
    tensor = torch.ones(int(mib * (1 << 18)))

    def work(variant: str) -> None:
        with SCOPES[variant]():
            dist.all_reduce(tensor, group=groups.get(variant))
        tensor.fill_(1.0)

    return work


def ddp_steps(groups: dict[str, dist.ProcessGroup]) -> Work:
    replicas: dict[str, DistributedDataParallel] = {}
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))

    def work(variant: str) -> None:
        replica = replicas.get(variant)
        if replica is None:
            model = ByteGPT(LAYERS, WIDTH, CONTEXT)
            group = groups.get(variant)
            replica = replicas[variant] = DistributedDataParallel(model, process_group=group)
        replica.zero_grad()
        with SCOPES[variant]():
            inputs, wanted = tokens[:, :-1], tokens[:, 1:]
            next_byte_loss(replica(inputs), wanted).backward()  # type: ignore[no-untyped-call]

    return work


def measure(
    work: Work, variants: list[str], rounds: dict[str, int], groups: dict[str, dist.ProcessGroup]
) -> dict[str, Any]:
    times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in variants}
    missing: dict[str, list[float]] = {variant: [] for variant in variants}
    slow: set[str] = set()
    for number in range(max(rounds.values())):
        order = variants if number % 2 == 0 else variants[::-1]
        for variant in order:
            if number >= rounds[variant] or variant in slow:
                continue
            with lossycoll.reliable():
                dist.barrier()
            began = time.monotonic()
            work(variant)
            times[variant].append((began, time.monotonic()))
            report = lossycoll.last_report()
            if variant not in groups and report is not None:
                packets = report.packets_received + report.packets_missing
                missing[variant].append(report.packets_missing / packets if packets else 0.0)
            if variant in groups and agreed(times[variant][-1][1] - began > SLOW_SECONDS):
                slow.add(variant)
    return {"times": times, "missing": missing}


if __name__ == "__main__":
    main()
