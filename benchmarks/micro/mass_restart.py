"""All peers of a swarm are killed at once: python -m benchmarks.micro.mass_restart --report docs

Each peer has one command line, and a checkpoint of its own. All train, all are ended by SIGKILL at
the same moment, and all are started again by their command lines. Before that all checkpoints but
one are replaced by older ones. Prints a markdown table: seconds from the last peer's import until
the first round of all, and whether that is one swarm that continues from the newest checkpoint.
All processes share this machine.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.common.results import ROOT
from benchmarks.common.tables import Table, add_report
from benchmarks.micro.directory import valkey_binary, valkey_server
from benchmarks.micro.swarm_processes import Peer, common_round, free_ports, wait_for
from lossycoll.cli.argtypes import whole

WAYS: Final = {
    "list": "one list on all peers, all listen",
    "valkey": "a valkey server",
    "directory": "a directory of its own",
}
HEAD: Final = (
    "meeting place",
    "peers",
    "runs",
    "imports took, s",
    "first round of all, s after the last import: median, longest",
    "swarms",
    "samples of the newest checkpoint, of the oldest",
    "of the first round of all, at least",
)
TABLE: Final = Table("moshpit.md", "mass-restart", " | ".join(HEAD), keys=2)
OLDER_SECONDS: Final = 20.0
"""Age of the older checkpoints."""


@dataclass(frozen=True)
class Restart:
    """What became of a swarm whose peers were all killed.

    Attributes:
        imports: Seconds from the first start until the last peer has imported torch.
        seconds: From then on until the first round of all.
        sessions: Number of swarms that peers have been in.
        newest, oldest: Samples of the checkpoints.
        samples: Least number of samples of a peer at the end of that round.
        is_newest: Whether that round continued from the newest checkpoint alone.
    """

    imports: float
    seconds: float
    sessions: int
    newest: int
    oldest: int
    samples: int
    is_newest: bool


@contextmanager
def meeting_place(way: str, peers: int, environ: dict[str, str]) -> Iterator[list[dict[str, Any]]]:
    """The part of each peer's command line that says where the swarm is."""
    if way == "list":
        places = [f"127.0.0.1:{port}" for port in free_ports(peers)]
        yield [{"listen": own, "join": places} for own in places]
        return
    if way == "valkey":
        with valkey_server() as url:
            yield [{"listen": "", "join": [url]}] * peers
        return
    place = f"127.0.0.1:{free_ports(1)[0]}"
    process = subprocess.Popen(
        [sys.executable, "-m", "lossycoll.cli", "directory", "--new", place],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield [{"listen": "", "join": [place]}] * peers
    finally:
        process.terminate()
        process.wait(20)


def outcome(peers: Sequence[Peer], began: float) -> Restart:
    """Figures of peers that were started again at the time ``began``."""
    lines = common_round(peers)
    imported = max(one["time"] for peer in peers for one in peer.said("imported"))
    loaded = [peer.said("loaded")[0] for peer in peers]
    newest = max(loaded, key=lambda one: int(one["samples"]))
    everything = [line for peer in peers for line in peer.lines if "session" in line]
    values = [line["value"] for line in lines]
    return Restart(
        imports=imported - began,
        seconds=max(line["time"] for line in lines) - imported,
        sessions=len({line["session"] for line in everything}),
        newest=newest["samples"],
        oldest=min(one["samples"] for one in loaded),
        samples=min(line["samples"] for line in lines),
        # A mean with an older state would be below the newest, and not the same on all peers.
        is_newest=min(values) >= newest["value"] and max(values) - min(values) < 1,
    )


def restart(
    way: str, peers: int, seed: int, older: float = OLDER_SECONDS, python: str = sys.executable
) -> Restart:
    """Let a swarm train, kill all of it, and start it again. ``older``: age in seconds of all
    checkpoints but one; ``seed`` draws which one. ``python``: interpreter of the peers."""
    secret = {"LOSSYCOLL_SECRET": secrets.token_hex(16), "OMP_NUM_THREADS": "1"}
    environ = {**os.environ, **secret}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places = stack.enter_context(meeting_place(way, peers, environ))
        paths = [folder / f"{number}.pt" for number in range(peers)]
        configs = [
            {**place, "name": f"peer {number}", "checkpoint": str(path)}
            for number, (place, path) in enumerate(zip(places, paths, strict=True))
        ]

        def start() -> list[Peer]:
            started = []
            for config in configs:
                started.append(Peer.of_module("mass_restart_peer", config, environ, python))
                stack.callback(started[-1].close)
            return started

        first = start()
        wait_for(first, lambda: common_round(first))
        wait_for(first, lambda: all(path.exists() for path in paths))
        old = [shutil.copy(path, path.with_suffix(".old")) for path in paths]
        time.sleep(older)
        for peer in first:
            peer.signal()
        for peer in first:
            peer.close()
        newest = random.Random(seed).randrange(peers)
        for number, path in enumerate(paths):
            if number != newest:
                shutil.copy(old[number], path)
        began = time.monotonic()
        again = start()
        wait_for(again, lambda: common_round(again))
        return outcome(again, began)


def row(way: str, peers: int, found: Sequence[Restart]) -> list[str]:
    """As the table has them."""

    def ends(values: Iterable[float]) -> str:
        known = list(values)
        return f"{statistics.median(known):.1f}, {max(known):.1f}"

    newest = sum(one.is_newest for one in found)
    samples = [f"{one.newest:,}, {one.oldest:,}" for one in found]
    return [
        WAYS[way],
        f"{peers}",
        f"{len(found)}",
        f"{statistics.median(one.imports for one in found):.1f}",
        ends(one.seconds for one in found),
        ", ".join(f"{one.sessions}" for one in found),
        "; ".join(samples),
        "; ".join(f"{one.samples:,}" for one in found)
        + ("" if newest == len(found) else f" (the newest in {newest} of {len(found)})"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--peers", type=whole(2), default=16, help="how many (%(default)s)")
    add("--ways", nargs="+", choices=[*WAYS], default=[*WAYS], help="to meet (all)")
    add("--runs", type=whole(1), default=3, help="of each way (%(default)s)")
    add("--older", type=float, default=OLDER_SECONDS, help="age of checkpoints, s (%(default)g)")
    add_report(parser, TABLE.page)
    options = parser.parse_args()
    rows = []
    for way in options.ways:
        if way == "valkey" and valkey_binary() is None:
            print("valkey is left out: neither valkey-server nor redis-server is installed")
            continue
        found = []
        for seed in range(options.runs):
            found.append(restart(way, options.peers, seed, options.older))
            print(f"{way}, run {seed}: {found[-1]}", flush=True)
        rows.append(row(way, options.peers, found))
    print(TABLE.report(options.report, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
