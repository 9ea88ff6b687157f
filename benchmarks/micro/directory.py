"""What a swarm's directory can do: python -m benchmarks.micro.directory --peers 2000

Peers without engines, of which each says to the directory what a real one does, over connections
of its own: it joins, gives signs of life, is ready and hears of its group. Nothing is exchanged.
Prints a markdown table for each way: how long until all have joined, from the last one's word that
it is ready to the last one that hears of its group, and what the directory takes. By valkey each
peer has its two connections with a server that is started for it.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from benchmarks.common.tables import Table, add_report
from lossycoll.cli.argtypes import whole

HEAD: Final = (
    "peers",
    "transport",
    "sealed",
    "all have joined, s",
    "groups",
    "all ready at once: last group after, ms",
    "within 2 s: last group after, ms",
    "directory's CPU in a round, s",
    "and between rounds",
    "its memory, MiB",
    "of it for the peers",
    "all have left, s",
)
SPREAD_SECONDS: Final = 2.0
REST_SECONDS: Final = 5.0
TABLE: Final = Table("moshpit.md", "directory", " | ".join(HEAD), keys=3)
TRIES: Final = 100


class Part:
    """A process of the benchmark, which answers each line that it is told."""

    def __init__(self, module: str, config: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.micro.{module}", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, *words: object) -> None:
        """Says what to do."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What it says of it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a part of the benchmark has ended early")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def all_of(parts: Sequence[Part], *words: object) -> list[dict[str, Any]]:
    """What all of them say of the same."""
    for part in parts:
        part.tell(*words)
    return [part.answer() for part in parts]


def valkey_binary() -> str | None:
    """The server's program; None: there is none."""
    return shutil.which("valkey-server") or shutil.which("redis-server")


@contextmanager
def valkey_server() -> Iterator[str]:
    """Serves, and gives the address that swarms join by."""
    binary = valkey_binary()
    if binary is None:
        raise SystemExit("neither valkey-server nor redis-server is installed: --ways tcp")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "no", "--dir", folder, "--loglevel", "warning"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            for _ in range(TRIES):
                try:
                    socket.create_connection(("127.0.0.1", port), 1.0).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield f"valkey://127.0.0.1:{port}/benchmark"
        finally:
            process.terminate()
            process.wait(10)


def row(way: str, sealed: bool, peers: int, processes: int, rounds: int) -> list[str]:
    """The figures of one way."""
    with ExitStack() as stack:
        config: dict[str, Any] = {"join": "", "secret": secrets.token_hex(16) if sealed else ""}
        if way == "valkey":
            config["join"] = stack.enter_context(valkey_server())
        directory = Part("directory_serves", config)
        stack.callback(directory.close)
        config |= directory.answer()
        shares = [len(range(one, peers, processes)) for one in range(processes)]
        parts = [
            Part("directory_peers", {**config, "name": f"process {one}", "peers": share})
            for one, share in enumerate(shares)
        ]
        for part in parts:
            stack.callback(part.close)
            part.answer()
        empty = all_of([directory], "figures")[0]
        begin = time.monotonic()
        joined = max(one["at"] for one in all_of(parts, "join")) - begin
        begins = all_of([directory], "figures")[0]
        all_of(parts, "rest", REST_SECONDS)
        rested = all_of([directory], "figures")[0]
        # First, as the directory learns by it how long peers take, and waits so long for them.
        spread = [of_round(parts, SPREAD_SECONDS) for _ in range(rounds)]
        before = all_of([directory], "figures")[0]
        bursts = [of_round(parts, 0.0) for _ in range(rounds)]
        after = all_of([directory], "figures")[0]
        idle = (rested["cpu"] - begins["cpu"]) / (rested["at"] - begins["at"])
        busy = after["cpu"] - before["cpu"] - idle * (after["at"] - before["at"])
        begin = time.monotonic()
        all_of(parts, "leave")
        while all_of([directory], "figures")[0]["peers"]:
            time.sleep(0.01)
        left = time.monotonic() - begin
        return [
            f"{peers:,}",
            way,
            "yes" if sealed else "no",
            f"{joined:.1f}",
            f"{statistics.median(one['groups'] for one in bursts):.0f}",
            f"{1e3 * statistics.median(one['after'] for one in bursts):.0f}",
            f"{1e3 * statistics.median(one['after'] for one in spread):.0f}",
            f"{max(0.0, busy) / rounds:.2f}",
            f"{idle:.0%}",
            f"{after['rss'] / 2**20:.0f}",
            f"{(after['rss'] - empty['rss']) / 2**20:.0f}",
            f"{left:.1f}",
        ]


def of_round(parts: Sequence[Part], seconds: float) -> dict[str, float]:
    """How many groups there were, and how long it took after the last peer was ready."""
    found = all_of(parts, "round", seconds)
    numbers = {number for one in found for number in one["groups"]}
    after = max(one["told"] for one in found) - max(one["ready"] for one in found)
    return {"groups": len(numbers), "after": after}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--peers", type=whole(2), nargs="+", default=[2000], help="how many (%(default)s)")
    add("--processes", type=whole(1), default=1, help="that have them (%(default)s)")
    add("--rounds", type=whole(1), default=5, help="of each kind (%(default)s)")
    add("--ways", nargs="+", choices=["tcp", "valkey"], default=["tcp", "valkey"], help="(both)")
    add("--sealed", nargs="+", choices=["no", "yes"], default=["no", "yes"], help="(both)")
    add_report(parser, TABLE.page)
    options = parser.parse_args()
    rows = [
        row(way, sealed == "yes", peers, options.processes, options.rounds)
        for peers in options.peers
        for way in options.ways
        for sealed in options.sealed
    ]
    print(TABLE.report(options.report, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
