"""A swarm whose peers are killed all the time: python -m tools.swarm_soak --seconds 600

Sixteen processes on this machine average over packets of which 5% are lost. Every few seconds one
of them is ended by SIGKILL, whichever it is, also those that have a directory, and started again;
it takes the others' state. Prints what happened, and fails if a peer hung, if the mean wasn't kept,
or if memory or descriptors grew. With --join they meet by a valkey server.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from lossycoll.cli.argtypes import whole
from lossycoll.runtime.swarm.valkey_server import SCHEME

ROOT: Final = Path(__file__).resolve().parents[1]
GRID: Final = (4, 4)
PEERS: Final = 16
LISTENING: Final = 3
FIRST_ROUNDS: Final = 20
"""Of each peer before the first is killed: they come one after another, and find their mean."""
START_SECONDS: Final = 120.0
DOWN_SECONDS: Final = 1.0
SETTLED_SECONDS: Final = 30.0
"""Of a process's life, after which its memory shouldn't grow."""
MOST_GAP: Final = 60.0
MOST_OFF: Final = 0.005
"""By so much the mean square may change of the distance to the mean of what all began with, which
has variance 1, once peers are killed. What 5% lost packets cost comes before, as values differ."""
MOST_GROWTH: Final = 8 << 20
MOST_DESCRIPTORS: Final = PEERS + 4
"""A directory that takes over has a connection to each peer."""


class Life:
    """A process, and what it says."""

    def __init__(self, peer: int, places: list[str], *, again: bool) -> None:
        self.peer = peer
        relayed = places[0].startswith(SCHEME)
        first, others = peer == 0 and not again, enumerate(places)
        config = {
            "peer": peer,
            "peers": PEERS,
            "grid": GRID,
            "listen": places[peer] if peer < LISTENING and not relayed else "",
            "join": places if relayed else [one for i, one in others if i != peer and not first],
            "again": again,
        }
        environment = {**os.environ, "LOSSYCOLL_INJECT": "loss=0.05", "OMP_NUM_THREADS": "1"}
        self.began = time.monotonic()
        self.lines: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.killed = False
        self.ended = float("inf")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.swarm_soak_peer", json.dumps(config)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(json.loads(line))

    def _read_errors(self) -> None:
        self.errors.extend(self.process.stderr or ())

    def kill(self) -> None:
        self.killed = True
        self.ended = time.monotonic()
        self.process.kill()
        self._over()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.errors.append("it doesn't end")
            self.process.kill()
        self._over()

    def _over(self) -> None:
        self.process.wait()
        for thread in self._threads:
            thread.join(10)

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == "round"]

    @property
    def longest_gap(self) -> float:
        """Seconds without a round."""
        times = [self.began, *(line["time"] for line in self.rounds)]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def growth(self, what: str) -> int:
        """Of its memory or descriptors, since it has settled."""
        settled = [line[what] for line in self.lines if line["time"] - self.began > SETTLED_SECONDS]
        if len(settled) < 20:
            return 0
        tenth = len(settled) // 10
        return int(statistics.median(settled[-tenth:]) - statistics.median(settled[:tenth]))


def free_places(count: int) -> list[str]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    places = [f"127.0.0.1:{one.getsockname()[1]}" for one in held]
    for one in held:
        one.close()
    return places


def soak(seconds: float, every: float, seed: int, join: str) -> list[Life]:
    """All that lived, in the order in which they began. None lives on, whatever happens here."""
    lives: list[Life] = []
    try:
        _soak(lives, seconds, every, seed, join)
    finally:
        for one in lives:
            if one.process.poll() is None:
                one.process.kill()
                one.process.wait()
    return lives


def _soak(lives: list[Life], seconds: float, every: float, seed: int, join: str) -> None:
    chosen = random.Random(seed)
    places = [join] if join else free_places(LISTENING)
    lives.append(Life(0, places, again=False))
    time.sleep(3.0)
    lives += [Life(peer, places, again=False) for peer in range(1, PEERS)]
    now = list(lives)
    begin = time.monotonic()
    while min(len(one.rounds) for one in now) < FIRST_ROUNDS:
        if time.monotonic() - begin > START_SECONDS:
            raise SystemExit(f"peers haven't had {FIRST_ROUNDS} rounds in {START_SECONDS:g} s")
        time.sleep(0.5)
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        i = chosen.randrange(PEERS)
        now[i].kill()
        time.sleep(DOWN_SECONDS)
        now[i] = Life(i, places, again=True)
        lives.append(now[i])
        time.sleep(max(0.0, every - DOWN_SECONDS))
        said = max((len(one.lines) and one.lines[-1].get("round", 0) for one in now), default=0)
        print(f"{time.monotonic() - begin:.0f} s: peer {i} killed, round {said}", flush=True)
    begin = time.monotonic()
    while not all(one.rounds for one in now) and time.monotonic() - begin < START_SECONDS:
        time.sleep(0.5)
    ending = [threading.Thread(target=one.end) for one in now]
    for thread in ending:
        thread.start()
    for thread in ending:
        thread.join()


def verdict(lives: list[Life]) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what is wrong."""
    living = [one for one in lives if not one.killed]
    rounds = [line for one in lives for line in one.rounds]
    last = [one.rounds[-1]["off"] if one.rounds else float("inf") for one in living]
    first_kill = min((one.ended for one in lives if one.killed), default=float("inf"))
    agreed = [line["off"] for line in rounds if first_kill - 5 < line["time"] < first_kill]
    before = statistics.median(agreed) if agreed else float("inf")
    caught = [line["report"] for one in lives for line in one.lines if line["kind"] == "caught up"]
    known = [seconds for seconds in caught if seconds is not None]
    figures = {
        "lives": len(lives),
        "killed": sum(one.killed for one in lives),
        "rounds": max((line["round"] for line in rounds), default=0),
        "off before the first was killed": before,
        "off at the end: median, most": [statistics.median(last), max(last)],
        "failed rounds": sum(bool(line["failure"]) for line in rounds) / max(1, len(rounds)),
        "contributions": statistics.mean(line["contributions"] for line in rounds),
        "seconds of a round": [
            statistics.median(line["seconds"] for line in rounds),
            max(line["seconds"] for line in rounds),
        ],
        "seconds to catch up": [statistics.median(known), max(known)] if known else [],
        "longest without a round": max(one.longest_gap for one in lives),
        "of first lives, after the first kill": max(
            (
                b["time"] - a["time"]
                for one in lives[:PEERS]
                for a, b in pairwise(one.rounds)
                if a["time"] > first_kill
            ),
            default=0.0,
        ),
        "memory grew, MiB": max(one.growth("memory") for one in lives) / 2**20,
        "descriptors grew": max(one.growth("descriptors") for one in lives),
        "errors": sorted({line["error"] for one in lives for line in one.lines if "error" in line}),
    }
    wrong = [
        f"peer {one.peer} ended with status {one.process.returncode}: {''.join(one.errors)[-2000:]}"
        for one in living
        if one.process.returncode
    ]
    if figures["longest without a round"] > MOST_GAP:
        wrong.append(f"a peer had no round for {figures['longest without a round']:.0f} s")
    if not all(abs(one - before) < MOST_OFF for one in last):
        wrong.append(f"the mean wasn't kept: {before:g} off before, at the end {max(last):g}")
    if max(one.growth("memory") for one in lives) > MOST_GROWTH:
        wrong.append(f"memory grew by {figures['memory grew, MiB']:.1f} MiB")
    if figures["descriptors grew"] > MOST_DESCRIPTORS:
        wrong.append(f"descriptors grew by {figures['descriptors grew']}")
    return figures, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--seconds", type=float, default=600.0, help="of killing (%(default)g)")
    add("--every", type=float, default=4.0, help="seconds from kill to kill (%(default)g)")
    add("--seed", type=whole(0), default=1, help="of who is killed (%(default)s)")
    add("--join", default="", metavar="URL", help=f"of a server: {SCHEME}HOST:PORT/PREFIX")
    options = parser.parse_args()
    figures, wrong = verdict(soak(options.seconds, options.every, options.seed, options.join))
    print(json.dumps(figures, indent=1))
    for one in wrong:
        print(f"WRONG: {one}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
