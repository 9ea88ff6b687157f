"""What is measured, as data: nccl-tests' sizes, each all-reduced by several backends in turns."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.results import Piece
from lossycoll.cli.argtypes import names, real, whole
from lossycoll.cli.bench import command as bench
from lossycoll.cli.bench import nccl
from lossycoll.cli.launcher import LaunchError


@dataclass(frozen=True)
class Sweep(Piece):
    """All-reduces of ``begin`` to ``end`` bytes, each ``factor`` times the one before."""

    backends: tuple[str, ...]  # those that take turns
    ranks: int  # how many
    begin: int  # bytes
    end: int  # bytes
    factor: int  # from size to size
    dtype: str  # of the elements
    seconds: float  # for each size

    @property
    def sizes(self) -> tuple[int, ...]:
        """As nccl-tests' -b, -e and -f give them: from begin up to end at most, times factor."""
        size, out = self.begin, []
        while size <= self.end:
            out.append(size)
            size *= self.factor
        return tuple(out)

    @property
    def configuration(self) -> dict[str, Any]:
        """What the ranks of the bench measure."""
        return {
            "backends": list(self.backends),
            "sizes": self.sizes,
            "dtype": self.dtype,
            "seconds": self.seconds,
            "verify": True,
            "compute_seconds": 0,
            "step_seconds": 0,
        }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a sweep."""
    add = parser.add_argument
    add("--backend", type=names(bench.BACKENDS), default=bench.BACKENDS)
    add("--ranks", type=whole(2, 64), help="on this machine; with torchrun, torchrun's")
    add("-b", "--begin", type=_size, default=8, help="first size, as in nccl-tests (8)")
    add("-e", "--end", type=_size, default=128 << 20, help="last size (128M)")
    add("-f", "--factor", type=whole(2, 1024), default=2, help="from size to size (2)")
    add("--dtype", choices=bench.DTYPES, default="float32")
    add("--seconds", type=real(0.01), default=1.0, help="time for each size (1)")


def _size(text: str) -> int:
    (found,) = bench.sizes(text)
    return found


def plan(options: argparse.Namespace) -> list[Sweep]:
    """The sweep that the options ask for: a rank for each GPU, or two, unless they say more."""
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else options.ranks
    return [
        Sweep(
            backends=tuple(options.backend),
            ranks=ranks or max(2, len(nccl.look().gpus)),
            begin=options.begin,
            end=options.end,
            factor=options.factor,
            dtype=options.dtype,
            seconds=options.seconds,
        )
    ]


def under_torchrun() -> bool:
    """Whether this process is one of the ranks, rather than what starts them."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def preview(sweep: Sweep, seen: Sequence[nccl.Seen]) -> Iterator[str]:
    """What would be run."""
    sizes, hosts = sweep.configuration["sizes"], len({rank.host for rank in seen})
    yield (
        f"would run: {', '.join(sweep.backends)}; {len(seen)} ranks on "
        f"{'one host' if hosts == 1 else f'{hosts} hosts'}; "
        f"{len(sizes)} sizes, {sizes[0]} to {sizes[-1]} bytes, about {sweep.seconds:g} s each"
    )
    if "nccl" in sweep.backends:
        try:
            yield from nccl.describe(nccl.choose(seen))
        except nccl.NcclMissing as error:
            raise LaunchError(str(error)) from error
