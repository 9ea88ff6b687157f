"""All-reduce with nccl-tests' sizes and columns, NCCL beside this backend and gloo.

    python -m benchmarks nccl --report docs
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        -m benchmarks nccl --report docs            (on each host)

By itself it starts a rank for each GPU of this machine, or two on the only one. NCCL needs torch's
build for CUDA and a GPU; ``--dry-run`` says what is there and what would be run, and
``--backend lossy,gloo`` does without.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.common import runner
from benchmarks.common.runner import PieceFailed, Study, one_by_one
from lossycoll.cli.bench import command as bench
from lossycoll.cli.bench import nccl
from lossycoll.cli.bench import worker as bench_rank

from .sweep import Sweep, arguments, plan, preview, under_torchrun


def measure(sweep: Sweep, options: argparse.Namespace) -> dict[str, Any]:
    """Rows for each size and backend, and what was measured (``measured``, ``nccl``)."""
    del options
    console = Console(stderr=True, highlight=False)
    try:
        if under_torchrun():
            found = _together(sweep.configuration)
        else:
            found = bench.measure(sweep.configuration, sweep.ranks, {}, console)
    except nccl.NcclMissing as error:
        raise PieceFailed(str(error)) from error
    assert found is not None
    return {
        "measured": found["measured"],
        "nccl": found["nccl"],
        "rows": bench.rows_of(found, sweep.ranks),
    }


def seen_by_all(sweep: Sweep) -> Sequence[nccl.Seen]:
    """What each rank would find."""
    if under_torchrun():
        _tell("look")
        return bench_rank.seen_by_all()
    return [nccl.look()] * sweep.ranks


@contextlib.contextmanager
def ranks_of_torchrun() -> Iterator[bool]:
    """The default group of torchrun's ranks. Yields whether this one leads.

    The others do what the leader says, and are done when it leaves the block.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        leads = dist.get_rank() == 0
        if not leads:
            _follow()
        try:
            yield leads
        finally:
            if leads:
                _tell(None)
    finally:
        dist.destroy_process_group()


def _together(configuration: dict[str, Any]) -> dict[str, Any] | None:
    _tell(configuration)
    return bench_rank.take_part(configuration)


def _tell(what: object) -> None:
    dist.broadcast_object_list([what], src=0)


def _follow() -> None:
    while True:
        told: list[Any] = [None]
        dist.broadcast_object_list(told, src=0)
        if told[0] is None:
            return
        if told[0] == "look":
            bench_rank.seen_by_all()
            continue
        with contextlib.suppress(nccl.NcclMissing):  # all see the same, and the leader says so
            bench_rank.take_part(told[0])


def _preview(pieces: Sequence[Sweep], options: argparse.Namespace) -> Iterable[str]:
    del options
    for piece in pieces:
        yield from preview(piece, seen_by_all(piece))


STUDY = Study(
    name="nccl",
    description=__doc__,
    plan=plan,
    measuring=one_by_one(measure),
    arguments=arguments,
    preview=_preview,
    reports_planned=True,
    report_help="folder of performance.md, for the JSON and the table",
)


def main(words: Sequence[str] | None = None) -> int:
    if not under_torchrun():
        return runner.main(STUDY, words)
    with ranks_of_torchrun() as leads:
        return runner.main(STUDY, words) if leads else 0
