"""Large calls at two commits, side by side: python -m benchmarks.micro.commits 72221fb

Each commit is built into build/commits/ once. Ranks of the one and of the other then run in turn,
several jobs each, on the hosts of a laboratory (docs/lab.md says what it needs): on one host,
through loopback and UDP; and between hosts. A time is the mean over the ranks of one call after a
barrier; a figure is the median over the calls of all jobs, with the quartiles. Jobs of one commit
differ more than calls of one job, so there are several. `--also pyzmq` installs what an older
commit needs besides. Old builds need the rank's file to know their options: it sets few.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks.common.results import ROOT, commit, machine
from benchmarks.common.tables import Table, add_report, markdown, write_json
from lossycoll.errors import LossyError
from lossycoll.lab import Lab, Link, Network, Port

RANK = Path(__file__).with_name("commits_rank.py")
BUILDS = ROOT / "build" / "commits"
JOB_SECONDS = 300.0
HEADINGS = ("where", "ranks", "call", "size", "before, ms", "after, ms", "before / after")
TABLE = Table("performance.md", "commits", " | ".join(HEADINGS))


@dataclass(frozen=True)
class Place:
    """Where ranks run: on hosts of a laboratory, or without one on this machine."""

    name: str
    ranks: int
    network: Network | None = None


def places(ranks: int) -> list[Place]:
    """Loopback; hosts of one rank each, without and with a rate, a delay and loss."""
    wan = Link(delay_ms=10, loss=0.01)
    slow = Network(hosts=ranks, link=wan, port=Port(up_mbit=1000))
    return [
        Place("loopback", ranks),
        Place("hosts", ranks, Network(hosts=ranks)),
        Place("1 Gbit/s, 20 ms, 1%", ranks, slow),
    ]


def built(name: str, also: Sequence[str]) -> Path:
    """The folder from which a commit's package is imported; it is built if it isn't there."""
    full = subprocess.check_output(["git", "rev-parse", name], cwd=ROOT, text=True).strip()
    folder = BUILDS / full[:10]
    if not (folder / "lossycoll").is_dir():
        archive = subprocess.check_output(["git", "archive", full], cwd=ROOT)
        with tempfile.TemporaryDirectory() as source:
            with tarfile.open(fileobj=BytesIO(archive)) as files:
                files.extractall(source, filter="data")
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            target = ["--target", str(folder)]
            subprocess.run([*pip, "--no-build-isolation", *target, source], check=True)
            if also:
                subprocess.run([*pip, *target, *also], check=True)
    return folder


def here(command: Sequence[str], ranks: int, environment: Mapping[str, str]) -> bool:
    """Runs a command as each rank on this machine; whether all ended well."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    common = {**os.environ, **environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common["WORLD_SIZE"] = str(ranks)
    started = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    try:
        codes = [one.wait(JOB_SECONDS) for one in started]  # of all: none is left running
        return not any(codes)
    finally:
        for one in started:
            one.kill()


def job(place: Place, package: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One job of one commit: a row for each call and size, with its times in seconds.

    Raises LossyError if a rank fails.
    """
    environment = {"OMP_NUM_THREADS": "1", "LOSSYCOLL_LOG": "warning", "PYTHONPATH": str(package)}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        # -P: not the package of the folder where this was started.
        command = [sys.executable, "-P", str(RANK), json.dumps(config), str(out)]
        if place.network is None:
            well = here(command, place.ranks, environment)
        else:
            with Lab(place.network) as lab:
                ended = lab.run(command, environment, timeout=JOB_SECONDS)
                well = not any(one.code for one in ended)
        if not well:
            raise LossyError(f"{place.name}, {package.name}: a rank failed")
        rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return rows


def compare(place: Place, packages: Mapping[str, Path], options: Any) -> list[dict[str, Any]]:
    """Rows of one place: of each call and size, the times by commit."""
    config = {"sizes": options.sizes, "calls": options.calls, "iterations": options.iterations}
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for number in range(options.jobs):
        turn = list(packages.items())
        for side, package in turn if number % 2 else reversed(turn):
            for row in job(place, package, config):
                times = found.setdefault((row["call"], row["bytes"]), {})
                times.setdefault(side, []).extend(row["seconds"])
    return [
        {"where": place.name, "ranks": place.ranks, "call": call, "bytes": size, **by}
        for (call, size), by in found.items()
    ]


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row's text, under HEADINGS."""
    quartiles = [statistics.quantiles(row[side], n=4) for side in ("before", "after")]
    times = [f"{1e3 * q[1]:.3g} ({1e3 * q[0]:.3g} to {1e3 * q[2]:.3g})" for q in quartiles]
    before, after = (q[1] for q in quartiles)
    size = f"{row['bytes'] / (1 << 20):g} MiB"
    return [row["where"], str(row["ranks"]), row["call"], size, *times, f"{before / after:.2f}x"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", nargs="?", default="HEAD", help="another (%(default)s)")
    parser.add_argument("--also", nargs="*", default=[], help="packages that `before` needs")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--mib", type=float, nargs="*", default=[1, 4, 25, 100])
    parser.add_argument("--calls", nargs="*", default=["all_reduce", "broadcast", "all_gather"])
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=6, help="of each commit and place")
    parser.add_argument("--json", type=Path, help="write every time to this file")
    add_report(parser, TABLE.page)
    options = parser.parse_args()
    options.sizes = [int(mib * (1 << 20)) for mib in options.mib]
    packages = {
        "before": built(options.before, options.also),
        "after": built(options.after, []),
    }
    rows = []
    for place in [place for ranks in options.ranks for place in places(ranks)]:
        rows += compare(place, packages, options)
        print(
            markdown(
                HEADINGS,
                [
                    cells(row)
                    for row in rows
                    if (row["where"], row["ranks"]) == (place.name, place.ranks)
                ],
            )
        )
    TABLE.report(options.report, list(map(cells, rows)))
    if options.json:
        names = {side: os.path.basename(package) for side, package in packages.items()}
        write_json(options.json, {"commits": names, "machine": machine(), "rows": rows})
    print(f"commits {options.before} and {options.after}, measured by {commit()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
