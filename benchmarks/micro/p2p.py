"""Point to point against gloo, between two ranks: python -m benchmarks.micro.p2p

Trips: a tensor goes to the other rank and back again; half of that time counts. Streams: one rank
sends many, some of them at a time, as a stage of a pipeline does. Backends take turns of
milliseconds, so that a busy moment of the machine hits them alike. Rank 0's clock. With --loss or
--delay the ranks are hosts of a laboratory (docs/lab.md says what that needs).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import lab_job, local_job, tables
from lossycoll.cli.argtypes import human, real, whole
from lossycoll.cli.demo.report import percentile
from lossycoll.lab import Lab, Link, Network

from .p2p_rank import BACKENDS

RANK = "benchmarks.micro.p2p_rank"
LOCAL = {
    "trips": ((4096, 1000), (1 << 16, 500), (1 << 20, 200), (16 << 20, 40)),
    "streams": ((4096, 100), (1 << 16, 60), (1 << 20, 30)),
}
"""Bytes, and how often."""
REMOTE = {
    "trips": ((4096, 100), (1 << 16, 60), (1 << 20, 30)),
    "streams": ((4096, 10), (1 << 16, 8), (1 << 20, 5)),
}
"""The same where each takes long."""
JOB_SECONDS = 3600.0
RATIO = "gloo's median / lossy's"
LOOPBACK = tables.Table(
    "measured-costs.md", "p2p-loopback", f"loopback | lossy, us | gloo, us | {RATIO}", keys=1
)
LABORATORY = tables.Table(
    "measured-costs.md", "p2p-lab", f"laboratory | lossy, ms | gloo, ms | {RATIO}", keys=1
)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The ranks' events. Raises LossyError or LaunchError where a rank fails."""
    remote = options.loss or options.delay
    chosen = {
        what: [
            (size, max(3, round(times * options.share)))
            for size, times in sizes
            if options.bytes in (None, size)
        ]
        for what, sizes in (REMOTE if remote else LOCAL).items()
        if options.only in (None, what)
    }
    config = {"trips": [], "streams": [], **chosen}
    config |= {"messages": options.messages, "depth": options.depth, "tcp": options.tcp}
    if not remote:
        return local_job.run_job(RANK, config, 2)
    network = Network(link=Link(loss=options.loss, delay_ms=options.delay / 2))
    with tempfile.TemporaryDirectory() as folder, Lab(network) as lab:
        out = Path(folder) / "events"
        lab_job.run_job(lab, RANK, config, JOB_SECONDS, out=out)
        return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def cells(event: Mapping[str, Any], scale: float, tcp: str) -> list[str]:
    """A row of LOOPBACK or LABORATORY: p10, median and p90 of a message.

    Args:
        event: Of one kind and size.
        scale: Of seconds.
        tcp: What is named beside the size; empty: nothing.
    """
    times = {
        name: [percentile(event["seconds"][name], part) * scale for part in (0.1, 0.5, 0.9)]
        for name in BACKENDS
    }
    digits = 1 if tcp else 0
    return [
        ", ".join(filter(None, (event["what"].removesuffix("s"), human(event["bytes"]), tcp))),
        *(", ".join(f"{value:.{digits}f}" for value in times[name]) for name in BACKENDS),
        f"{times['gloo'][1] / times['lossy'][1]:.2f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--json", action="store_true", help="print every time instead of tables")
    add("--only", choices=("trips", "streams"), help="measure these alone")
    add("--bytes", type=whole(1), help="measure this size alone")
    add("--share", type=real(0.001), default=1.0, help="of the usual number of times (%(default)g)")
    add("--messages", type=whole(1), default=64, help="of a stream (%(default)s)")
    add("--depth", type=whole(1), default=8, help="of them in flight (%(default)s)")
    add("--tcp", default="cubic", help="gloo's congestion control (%(default)s, as Linux's own)")
    add("--loss", type=real(0, 1), default=0.0, help="share of packets lost, in a laboratory")
    add("--delay", type=real(0), default=0.0, help="round trip in ms, in a laboratory")
    tables.add_report(parser, LOOPBACK.page)
    options = parser.parse_args()
    events = measure(options)
    if options.json:
        print(json.dumps(events))
        return 0
    table, scale, tcp = LOOPBACK, 1e6, ""
    if options.loss or options.delay:
        table, scale, tcp = LABORATORY, 1e3, options.tcp
    print(table.report(options.report, [cells(event, scale, tcp) for event in events]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
