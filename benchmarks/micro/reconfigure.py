"""``reconfigure`` on one machine: python -m benchmarks.micro.reconfigure [--ranks 8] [--jobs 5]

All processes of a job meet: the first time, and again as the same members. Seconds from the first
rank's call to the last rank's return, and processor seconds of all ranks meanwhile. With the right
to it (root, or a limit of rtprio), ranks have precedence over other work of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time

from tests.support.harness import run_good, warm_python
from tests.support.members import Member, job_store

ROUNDS = 4
Round = tuple[float, float, float]
"""Begin and end of a rank's call, by time.monotonic(), and its processor seconds."""


def take_precedence() -> bool:
    """True if this process and its later threads come before other work from now on."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        return True
    return False


def rank_main(rank: int, world: int) -> list[Round]:
    take_precedence()
    member = Member(job_store(), rank, world)
    handles = member.handles("handle")
    found = []
    for uuid in range(ROUNDS):
        member.await_all(f"begin/{uuid}")
        begin, cpu = time.monotonic(), time.process_time()
        member.meet(uuid, handles)
        found.append((begin, time.monotonic(), time.process_time() - cpu))
        member.await_all(f"end/{uuid}")
    member.group.shutdown()
    return found


def measure(ranks: int) -> list[tuple[float, float]]:
    """Seconds, and processor seconds of all ranks, of each round of one job."""
    name = f"benchmarks.micro.reconfigure:{rank_main.__name__}"
    said = run_good(name, ranks, {"LOSSYCOLL_LOG": "warning"}, timeout=600)
    rounds = [list(zip(*each, strict=True)) for each in zip(*said, strict=True)]
    return [(max(ends) - min(begins), sum(cpu)) for begins, ends, cpu in rounds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=5)
    args = parser.parse_args()
    warm_python()  # ranks are forks of a process that has none
    with_precedence = take_precedence()  # as this process serves the store
    jobs = [measure(args.ranks) for _ in range(args.jobs)]
    for which, rounds in (
        ("first", [job[0] for job in jobs]),
        ("later", [one for job in jobs for one in job[1:]]),
    ):
        seconds, cpu = zip(*rounds, strict=True)
        print(
            f"{args.ranks} ranks, {which}: {statistics.median(seconds):.3f} s (of {len(seconds)}, "
            f"{min(seconds):.3f} to {max(seconds):.3f}), {statistics.median(cpu):.3f} s of "
            f"processors{'' if with_precedence else ', without precedence'}"
        )


if __name__ == "__main__":
    main()
