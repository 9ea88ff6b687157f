"""All-reduce with nccl-tests' sizes and columns, NCCL beside this backend and gloo.

    python -m benchmarks.studies.nccl
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m benchmarks.studies.nccl                          (on each host)

By itself it starts a rank for each GPU of this machine, or two on the only one. NCCL needs torch's
build for CUDA and a GPU; ``--dry-run`` says what is there and what would be run, and
``--backend lossy,gloo`` does without.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common.results import commit
from lossycoll.cli.argtypes import names, real, whole
from lossycoll.cli.bench import command as bench
from lossycoll.cli.bench import nccl
from lossycoll.cli.launcher import LaunchError, must_be_writable

from .report import table


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(stderr=True, highlight=False)
    if options.out:
        must_be_writable(options.out)
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return as_rank(options)
        if options.ranks is None:
            options.ranks = max(2, len(nccl.look().gpus))
        if options.dry_run:
            return say_plan([nccl.look()] * options.ranks, options)
        tell(bench.measure(configuration(options), options.ranks, {}, console), options)
    except (nccl.NcclMissing, LaunchError) as error:
        console.print(str(error), markup=False)
        return 1
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.nccl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", type=names(bench.BACKENDS), default=bench.BACKENDS)
    add("--ranks", type=whole(2, 64), help="on this machine; with torchrun, torchrun's")
    add("-b", "--begin", type=size, default=8, help="first size, as in nccl-tests (8)")
    add("-e", "--end", type=size, default=128 << 20, help="last size (128M)")
    add("-f", "--factor", type=whole(2, 1024), default=2, help="from size to size (2)")
    add("--dtype", choices=bench.DTYPES, default="float32")
    add("--seconds", type=real(0.01), default=1.0, help="time for each size (1)")
    add("--dry-run", action="store_true", help="say what would be run, and what it lacks")
    add("--out", type=Path, help="also write the results to this file, as JSON")
    return parser.parse_args(arguments)


def size(text: str) -> int:
    (found,) = bench.sizes(text)
    return found


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """What the ranks of the bench measure."""
    return {
        "backends": options.backend,
        "sizes": bench.sweep(options.begin, options.end, options.factor),
        "dtype": options.dtype,
        "seconds": options.seconds,
        "verify": True,
        "staged": False,
        "step_seconds": 0,
    }


def as_rank(options: argparse.Namespace) -> int:
    """What torchrun starts: this process is one of the ranks."""
    import torch
    import torch.distributed as dist

    from lossycoll.cli.bench import worker as bench_rank

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    options.ranks = dist.get_world_size()
    try:
        if options.dry_run:
            seen = bench_rank.seen_by_all()
            return say_plan(seen, options) if rank == 0 else 0
        measured = bench_rank.take_part(configuration(options), lambda _, __: None)
        if measured is not None:
            tell(measured, options)
    except nccl.NcclMissing:
        # All see the same, and one says so.
        if rank == 0:
            raise
        return 1
    finally:
        dist.destroy_process_group()
    return 0


def say_plan(seen: Sequence[nccl.Seen], options: argparse.Namespace) -> int:
    """The dry run. Raises NcclMissing where NCCL is asked for and can't run."""
    sizes = configuration(options)["sizes"]
    hosts = len({rank.host for rank in seen})
    print(
        f"would run: {', '.join(options.backend)}; {len(seen)} ranks on "
        f"{'one host' if hosts == 1 else f'{hosts} hosts'}; "
        f"{len(sizes)} sizes, {sizes[0]} to {sizes[-1]} bytes, about {options.seconds:g} s each",
        flush=True,
    )
    if "nccl" in options.backend:
        print("\n".join(nccl.describe(nccl.choose(seen))), flush=True)
    return 0


def tell(measured: dict[str, Any], options: argparse.Namespace) -> None:
    results = {
        "date": date.today().isoformat(),
        "commit": commit("benchmarks/studies/nccl"),
        "ranks": options.ranks,
        "dtype": options.dtype,
        "measured": measured["measured"],
        "nccl": measured["nccl"],
        "rows": bench.rows_of(measured, options.ranks),
    }
    print(table(results), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
