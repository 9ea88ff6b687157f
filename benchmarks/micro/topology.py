"""All-reduce between sites: python -m benchmarks.micro.topology

A laboratory of sites, hosts and ranks (docs/lab.md says what it needs), with a rate, a delay and
loss between the sites and none within. Flat and hierarchical plans and gloo take turns, several
operations each. The first of a row find the path's rate, which the flows of others have left
otherwise, and aren't counted: a job repeats one and the same. A time is from the last rank's begin
to the last one's end. It stands beside what the way between the sites allows: 2 S (H - 1) / H bytes
at its rate for a tensor of S bytes and H sites, and a one-way delay for each of two phases. Bytes
are those that left a host or a site at the laboratory's ports, of the host or site with the most,
as multiples of that for as many hosts or sites.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import tables, tcp
from benchmarks.common.lab_job import run_job
from benchmarks.common.rank_kit import between_ranks
from lossycoll.cli.argtypes import names, real, whole
from lossycoll.lab import Lab, Link, Network, Port
from lossycoll.lab.counters import LevelBytes
from lossycoll.plan import algorithm_names

from .topology_rank import GO, READY, VARIANTS, algorithm_of

MIB = 1 << 20
QUEUE_MS = 25.0
"""Room before each gateway, in time at its rate."""
LEFT_OUT = 1 / 3
"""Of each row: the first operations find the path's rate."""
JOB_SECONDS = 3600.0


@dataclass(frozen=True)
class Measured:
    """A variant: seconds of each operation that counts, and the share of packets that was missing.
    Bytes are of the host and the site that sent the most, the mean over the operations."""

    variant: str
    seconds: list[float]
    missing: float
    host_bytes: float
    site_bytes: float


def network_of(options: argparse.Namespace) -> Network:
    return Network(
        sites=options.sites,
        hosts=options.hosts,
        ranks=options.ranks,
        wan=Link(loss=options.loss, burst=options.burst, delay_ms=options.delay_ms),
        gateway=Port(up_mbit=options.mbit, down_mbit=options.mbit, queue_ms=QUEUE_MS),
    )


def least_bytes(options: argparse.Namespace, count: int) -> float:
    """That leave each of ``count`` hosts or sites, headers and all else left out."""
    size: float = options.mib * MIB
    return 2 * size * (count - 1) / count


def limit(options: argparse.Namespace) -> float:
    """Seconds."""
    rate: float = options.mbit * 125_000
    delay: float = options.delay_ms / 1e3
    return least_bytes(options, options.sites) / rate + 2 * delay


def available(chosen: Sequence[str]) -> list[str]:
    """Those that this version and this kernel have."""
    has = algorithm_names("all_reduce")
    controls = tcp.controls()
    return [
        name
        for name in chosen
        if (name in VARIANTS and algorithm_of(name) in (*has, "auto"))
        or (name.startswith("gloo-") and name.removeprefix("gloo-") in controls)
    ]


class Counting:
    """Counts the bytes between the points at which rank 0 says that it is about to begin."""

    def __init__(self, lab: Lab, out: Path) -> None:
        self.lab, self.out = lab, out
        self.levels: list[dict[str, LevelBytes]] = []

    def on_line(self, rank: int, line: str) -> None:
        if line.startswith(READY):
            self.levels.append(self.lab.counters().levels)
            Path(f"{self.out}.{GO}.{len(self.levels) - 1}").touch()

    def between(self, number: int) -> Mapping[str, LevelBytes]:
        before, after = self.levels[number : number + 2]
        return {name: less(level, before[name]) for name, level in after.items()}


def less(level: LevelBytes, before: LevelBytes) -> LevelBytes:
    """Bytes since ``before``."""
    pairs = ((level.out, before.out), (level.into, before.into))
    return LevelBytes(*(tuple(map(operator.sub, *pair)) for pair in pairs))


def measure(
    options: argparse.Namespace, variants: Sequence[str]
) -> tuple[list[Measured], dict[str, int]]:
    """What was measured, and how many hosts and sites the ranks took themselves to be of.

    Raises LossyError where a rank fails.
    """
    network = network_of(options)
    each = options.each
    config = {"mib": options.mib, "variants": variants, "rounds": options.rounds, "each": each}
    with tempfile.TemporaryDirectory() as folder, Lab(network) as lab:
        out = Path(folder) / "out"
        counting = Counting(lab, out)
        module = "benchmarks.micro.topology_rank"
        ranks = run_job(lab, module, config, JOB_SECONDS, out=out, on_line=counting.on_line)
        unasked = sum(host.unasked for host in lab.counters().hosts)
    if unasked:
        print(f"{unasked} packets were lost by the laboratory itself", file=sys.stderr)
    operations = [rank["operations"] for rank in ranks]
    seen = {name: ranks[0][name] for name in ("hosts", "sites")}
    from_nth = int(each * LEFT_OUT)
    return [_of_variant(name, operations, counting, from_nth) for name in variants], seen


def _of_variant(
    variant: str, ranks: Sequence[Sequence[Mapping[str, Any]]], counting: Counting, from_nth: int
) -> Measured:
    all_ = [n for n, one in enumerate(ranks[0]) if one["variant"] == variant]
    numbers = [n for n in all_ if ranks[0][n]["nth"] >= from_nth] or all_
    bytes_ = [counting.between(n) for n in numbers]
    missing = [rank[n]["missing"] for rank in ranks for n in numbers]
    return Measured(
        variant,
        [between_ranks([rank[n]["time"] for rank in ranks]) for n in numbers],
        statistics.mean(missing),
        *(statistics.mean(max(one[level].out) for one in bytes_) for level in ("host", "site")),
    )


HEADINGS = (
    *("variant", "runs", "median, ms", "longest", "limit", "of it"),
    *("MB from a host", "of least", "MB from a site", "of least", "missing"),
)
TABLE = tables.Table("performance.md", "sites", " | ".join(HEADINGS))


def cells(options: argparse.Namespace, one: Measured) -> list[str]:
    """A variant's row, under HEADINGS."""
    median = statistics.median(one.seconds)
    hosts = options.sites * options.hosts
    return [
        one.variant,
        str(len(one.seconds)),
        f"{1e3 * median:.0f}",
        f"{1e3 * max(one.seconds):.0f}",
        f"{1e3 * limit(options):.0f}",
        f"{median / limit(options):.2f}",
        f"{one.host_bytes / 1e6:.1f}",
        f"{one.host_bytes / least_bytes(options, hosts):.2f}",
        f"{one.site_bytes / 1e6:.1f}",
        f"{one.site_bytes / least_bytes(options, options.sites):.2f}",
        f"{one.missing:.2%}",
    ]


def described(options: argparse.Namespace, seen: Mapping[str, int]) -> str:
    path = f"{options.mbit:g} Mbit/s, {options.delay_ms:g} ms one way, {options.loss:.3g} lost"
    shape = f"{options.sites} sites x {options.hosts} hosts x {options.ranks} ranks"
    found = f"the ranks found {seen['hosts']} hosts and {seen['sites']} sites"
    return f"All-reduce of {options.mib:g} MiB, {shape}; between sites {path}; {found}"


def table(options: argparse.Namespace, found: Sequence[Measured], seen: Mapping[str, int]) -> Table:
    out = Table(title=described(options, seen))
    for heading in HEADINGS:
        side: Any = "left" if heading == "variant" else "right"
        out.add_column(heading, justify=side, no_wrap=True)
    for one in found:
        out.add_row(*cells(options, one))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--sites", type=whole(2), default=2, help="(%(default)s)")
    add("--hosts", type=whole(1), default=2, help="of each site (%(default)s)")
    add("--ranks", type=whole(1), default=2, help="of each host (%(default)s)")
    add("--mib", type=real(0.001), default=25.0, help="size of the tensor (%(default)g)")
    add("--mbit", type=real(0.01), default=1000.0, help="of a site's gateway (%(default)g)")
    add("--delay-ms", type=real(0), default=20.0, help="between sites, one way (%(default)g)")
    add("--loss", type=real(0, 1), default=0.01, help="between sites (%(default)g)")
    add("--burst", type=real(1), default=1.0, help="mean length of a loss (%(default)g)")
    add("--rounds", type=whole(1), default=3, help="turns of each; 1 if it's slow (%(default)s)")
    add("--each", type=whole(1), default=6, help="in a row, a third not counted (%(default)s)")
    every = (*VARIANTS, "gloo-cubic", "gloo-bbr")
    add("--variants", type=names(every), default=every, help=f"of {', '.join(every)}")
    tables.add_report(parser, TABLE.page)
    add("--json", action="store_true", help="print every time instead of a table")
    options = parser.parse_args()
    variants = available(options.variants)
    for name in options.variants:
        if name not in variants:
            print(f"{name}: not here", file=sys.stderr)
    found, seen = measure(options, variants)
    if options.json:
        measured = [asdict(one) for one in found]
        print(json.dumps({"limit": limit(options), "seen": seen, "measured": measured}))
    else:
        Console(width=150).print(table(options, found, seen))
    rows = [cells(options, one) for one in found]
    TABLE.report(options.report, rows, below=f"{described(options, seen)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
