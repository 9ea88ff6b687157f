"""All-reduce with nccl-tests' sizes and columns, NCCL beside this backend and gloo.

    python -m benchmarks nccl --report docs
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m benchmarks nccl --report docs            (on each host)

By itself it starts a rank for each GPU of this machine, or two on the only one. NCCL needs torch's
build for CUDA and a GPU; ``--dry-run`` says what is there and what would be run, and
``--backend lossy,gloo`` does without.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from benchmarks.common import runner
from benchmarks.common.runner import Study, one_by_one

from .measure import measure, ranks_of_torchrun, seen_by_all
from .sweep import Sweep, arguments, plan, preview, under_torchrun


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
