"""How soon a job's status is told and true: eight ranks of this machine, one of which
is late, holds the GIL, is stopped, or is killed.

``python -m benchmarks.micro.status_answer`` prints, for each state, the seconds until the status
shows it, and the median and longest seconds of an answer from the pages and by a rank's port.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.tables import Table, add_report

LATE, VICTIM = 2, 5
STATES = ("late", "gil", "stopped", "killed", "coordinator killed")
FUNCTION = "benchmarks.micro.status_answer:rank_waits"
ANSWER = "median, longest"
TABLE = Table(
    "measured-costs.md",
    "status-answer",
    f"rank | shown after | answer from pages: {ANSWER} | answer by a port: {ANSWER}",
    keys=1,
)

Job = dict[str, Any]


def rank_waits(rank: int, world: int) -> None:
    """Calls, then one that a rank makes late."""
    import ctypes

    import torch
    import torch.distributed as dist

    from lossycoll.errors import LossyError
    from tests.support.harness import init, note

    init()
    t = torch.ones(20_000)
    for _ in range(20):
        dist.all_reduce(t)
    dist.barrier()
    note("all are here")
    go = Path(os.environ["GO"])
    libc = ctypes.PyDLL(None) if os.environ["HOW"] == "gil" else ctypes.CDLL(None)
    while rank == LATE and not go.exists():
        libc.usleep(100_000)  # with PyDLL it keeps the GIL
    try:
        dist.all_reduce(t)
        dist.barrier()
    except LossyError:
        return
    dist.destroy_process_group()


def shown_after(holds: Callable[[Job], bool], place: str | None) -> float:
    """Seconds until the status says so."""
    from lossycoll.cli.status import find_jobs

    begin = time.monotonic()
    while not holds(find_jobs(place)[0]):
        if time.monotonic() > begin + 60:
            raise SystemExit("it is never shown")
    return time.monotonic() - begin


def answers(place: str | None, times: int) -> list[float]:
    """Seconds of an answer, a few times, each made anew by the rank."""
    from lossycoll.cli.status import find_jobs
    from lossycoll.runtime.world.queries import FRESH_SECONDS

    found = []
    for _ in range(times):
        time.sleep(FRESH_SECONDS)
        begin = time.monotonic()
        find_jobs(place)
        found.append(time.monotonic() - begin)
    return found


def measure(state: str, world: int, times: int, folder: Path) -> dict[str, float]:
    """One job, in one state."""
    from lossycoll.cli.status import find_jobs
    from tests.support.harness import Ranks

    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    go = folder / "go"
    env = {"XDG_RUNTIME_DIR": str(folder), "GO": str(go), "LOSSYCOLL_LIVENESS": "30"}
    env["LOSSYCOLL_ON_PEER_LOSS"] = "continue"  # ranks that are left still answer
    victim = 0 if state == "coordinator killed" else VICTIM
    with Ranks(FUNCTION, world, {**env, "HOW": state}) as ranks:
        for rank in range(world):
            ranks.wait_for(rank, "all are here")
        place = find_jobs(None)[0]["ranks"][1]["control"]
        late = shown_after(
            lambda job: job["ranks"][1]["waits_for"] == [LATE] and bool(job["ranks"][1]["call"]),
            None,
        )
        found = {"shown": late}
        if state == "stopped":
            ranks.signal(victim, signal.SIGSTOP)
            found["shown"] = shown_after(
                lambda job: job["ranks"][victim]["state"] == "stopped", place
            )
        elif "killed" in state:
            ranks.signal(victim, signal.SIGKILL)
            found["shown"] = shown_after(lambda job: job["ranks"][victim]["state"] == "dead", place)
        for name, where in (("pages", None), ("port", place)):
            taken = answers(where, times)
            found |= {f"{name} median": median(taken), f"{name} longest": max(taken)}
        if state == "stopped":
            ranks.signal(victim, signal.SIGCONT)
        go.touch()
        ranks.collect(90, (victim,) if "killed" in state else ())
    return found


def cells(state: str, found: dict[str, float]) -> list[str]:
    """A row of TABLE."""
    ms = {name: f"{1e3 * seconds:.0f}" for name, seconds in found.items()}
    pages, port = (f"{ms[f'{how} median']}, {ms[f'{how} longest']} ms" for how in ("pages", "port"))
    return [state, f"{ms['shown']} ms", pages, port]


def main() -> None:
    """Measures all states, and prints them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--times", type=int, default=20, help="answers, of each kind")
    parser.add_argument("--states", nargs="+", choices=STATES)
    parser.add_argument("--json", action="store_true")
    add_report(parser, TABLE.page)
    options = parser.parse_args()
    rows = {}
    for state in options.states or STATES:
        with tempfile.TemporaryDirectory() as folder:
            rows[state] = measure(state, options.ranks, options.times, Path(folder))
        if not options.json:
            print(f"{state}: " + ", ".join(f"{k} {v:.3f} s" for k, v in rows[state].items()))
    if options.json:
        print(json.dumps(rows))
    TABLE.report(options.report, [cells(state, found) for state, found in rows.items()])


if __name__ == "__main__":
    main()
