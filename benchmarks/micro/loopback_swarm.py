"""Times of a swarm on one machine: python -m benchmarks.micro.loopback_swarm --report docs

Peers are processes on loopback, with a secret. Prints two markdown tables. The first has the time
from the start of the first process to the first round of all, and that of a newcomer to the end of
its ``catch_up``. The second has rounds of 100 MiB, as float32 and as int8. A group of one machine
averages plain floats whatever the wire; with the option ``link=udp`` its packets have few bits.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from benchmarks.common.tables import Table, add_report
from benchmarks.micro.swarm_processes import Peer, common_round, free_ports, wait_for
from lossycoll.cli.argtypes import whole

OF_STATE: Final = 3
"""AdamW's state, as a multiple of the parameters: these, and two moments."""
STATE_MIB: Final = 100.0
NEWCOMER_AMONG: Final = 3
ROUND_MIB: Final = 100.0
STARTS: Final = Table(
    "moshpit.md",
    "loopback-starts",
    "peers | what | runs | state of each, MiB | imports over after, s: median | "
    "done after, s: median, longest",
)
ROUNDS: Final = Table(
    "moshpit.md",
    "loopback-rounds",
    "peers | wire | option `link` | round of 100 MiB, s: median, longest",
)
WIRES: Final = ((None, "auto"), ("int8", "auto"), ("int8", "udp"))

Start = Callable[..., Peer]


@contextmanager
def peers_of(peers: int, mib: float, *, every: int = 1, **how: Any) -> Iterator[Start]:
    """How to start a process of a swarm, by its number. ``mib``: of its parameters; ``how``:
    ``wire`` and ``link``."""
    environ = {**os.environ, "LOSSYCOLL_SECRET": secrets.token_hex(16), "OMP_NUM_THREADS": "1"}
    environ["LOSSYCOLL_LINK"] = how.get("link", "auto")
    place = f"127.0.0.1:{free_ports(1)[0]}"
    with ExitStack() as stack:

        def start(number: int, *, newcomer: bool = False) -> Peer:
            config = {
                "name": f"peer {number}",
                "listen": "" if number else place,
                "join": [place] if number else [],
                "peers": peers,
                "values": int(mib * 2**18),
                "wire": how.get("wire"),
                "every": every,
                "newcomer": newcomer,
            }
            found = Peer.of_module("loopback_swarm_peer", config, environ, sys.executable)
            stack.callback(found.close)
            return found

        yield start


def first_round(peers: int) -> tuple[float, float]:
    """Seconds until all have imported torch, and until all have had a round of all."""
    begin = time.monotonic()
    with peers_of(peers, STATE_MIB / OF_STATE / 100) as start:
        started = [start(number) for number in range(peers)]
        lines = wait_for(started, lambda: common_round(started))
        imported = max(one.said("imported")[0]["time"] for one in started)
        return imported - begin, max(line["time"] for line in lines) - begin


def newcomer() -> tuple[float, float]:
    """Seconds until it has imported torch, and until it has the others' state and has been in one
    of their rounds, which they have after each tenth step."""
    with peers_of(NEWCOMER_AMONG, STATE_MIB / OF_STATE, every=10) as start:
        started = [start(number) for number in range(NEWCOMER_AMONG)]
        wait_for(started, lambda: common_round(started))
        begin = time.monotonic()
        comes = start(NEWCOMER_AMONG, newcomer=True)
        (line,) = wait_for([*started, comes], lambda: comes.said("caught up"))
        return comes.said("imported")[0]["time"] - begin, line["time"] - begin


def rounds(peers: int, count: int, wire: str | None, link: str) -> list[float]:
    """Seconds of each round of 100 MiB, the wait for its group included."""
    with peers_of(peers, ROUND_MIB, wire=wire, link=link) as start:
        started = [start(number) for number in range(peers)]

        def whole_ones() -> list[list[float]]:
            found = [
                [one["seconds"] for one in peer.said("round") if one["members"] == peers]
                for peer in started
            ]
            return found if min(map(len, found)) > count else []

        found: list[list[float]] = wait_for(started, whole_ones)
        return [max(same) for same in zip(*(one[1 : count + 1] for one in found), strict=True)]


def ends(values: list[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f}, {max(values):.{digits}f}"


def starts_row(peers: int, what: str, state: float, found: list[tuple[float, float]]) -> list[str]:
    imported, done = ([one[at] for one in found] for at in (0, 1))
    middle = f"{statistics.median(imported):.1f}"
    return [f"{peers}", what, f"{len(found)}", f"{state:g}", middle, ends(done)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--peers", type=whole(2), nargs="+", default=[2, 4, 8], help="that start (%(default)s)")
    add("--runs", type=whole(1), default=3, help="of each start (%(default)s)")
    add("--rounds", type=whole(1), default=10, help="of each wire (%(default)s)")
    add_report(parser, STARTS.page)
    options = parser.parse_args()
    table = [
        starts_row(
            peers,
            "first round of all",
            STATE_MIB / 100,
            [first_round(peers) for _ in range(options.runs)],
        )
        for peers in options.peers
    ]
    came = [newcomer() for _ in range(options.runs)]
    what = f"a newcomer to {NEWCOMER_AMONG} has caught up"
    table.append(starts_row(NEWCOMER_AMONG + 1, what, STATE_MIB, came))
    print(STARTS.report(options.report, table), flush=True)
    table = [
        [f"{peers}", wire or "float32", link, ends(rounds(peers, options.rounds, wire, link), 2)]
        for peers in (2, 4)
        for wire, link in WIRES
    ]
    print(ROUNDS.report(options.report, table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
