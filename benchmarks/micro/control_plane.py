"""What the control plane of many processes costs: python -m benchmarks.micro.control_plane

Processes without torch, one plane each, forked from this one, with one group of all and maybe some
smaller ones. First the CPU time of all of them together while nothing happens, then the time from
the kill of one (the coordinator, and another) until the last of the others has been told. Clock:
the machine's own, the same for all. CPU time: what the kernel counts for the processes, without
their start. ``--report docs`` writes the tables of measured-costs.md, and of simulate-accuracy.md
beside what a simulation has.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import statistics
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.common.tables import Table, add_report
from lossycoll.runtime.world.control_plane import ControlPlane
from lossycoll.runtime.world.membership import Membership
from lossycoll.runtime.world.messages import View
from lossycoll.simulate.control import simulate_control

COSTS: Final = Table(
    "measured-costs.md",
    "control-plane",
    "members | groups of each | cores | of it the coordinator | another rank killed"
    " | the coordinator killed",
    keys=2,
)
SIMULATED: Final = Table(
    "simulate-accuracy.md",
    "control-planes",
    "ranks | processor until all are here | simulated | share of a processor for heartbeats"
    " | simulated | processor for a death that it tells | simulated | descriptors | simulated"
    " | memory | simulated",
    keys=1,
)
ADDRESS = "127.0.0.1"
TOLD = struct.Struct("!id")
"""Of which death this is (-1: all have met), and when it was heard of."""


class Listener:
    """Writes each death to a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def on_dead(self, rank: int, silent: float, ended: bool) -> None:
        os.write(self._pipe, TOLD.pack(rank, time.monotonic()))

    def on_abort(self, rank: int, reason: str, kind: str) -> None: ...
    def on_bye(self, rank: int, seq: int, why: str) -> None: ...
    def on_mismatch(self, seq: int, calls: dict[int, str]) -> None: ...
    def on_broken(self, error: Exception) -> None: ...
    def on_differs(self, how: str) -> None: ...
    def on_own_host(self, rank: int, options: Mapping[str, Any]) -> None: ...
    def on_round(self) -> None: ...
    def call_at(self, seq: int) -> str | None: ...

    def stats(self) -> dict[str, Any]:
        return {}

    def on_lost(self, rank: int, silent: float, ended: bool) -> int:
        return 0

    def on_views(self, views: Sequence[View], agreed: bool) -> None: ...
    def on_no_quorum(self, lost: Sequence[int], left: Sequence[int]) -> None: ...


class Quiet(Listener):
    """For the smaller groups, whose deaths aren't measured."""

    def on_dead(self, rank: int, silent: float, ended: bool) -> None: ...


def be_a_member(
    plane: ControlPlane, endpoints: list[tuple[str, int]], pipe: int, groups: int
) -> None:
    """A process's life, until it is killed."""
    world = len(endpoints)
    plane.start("secret", endpoints)
    Membership(plane, 1, range(world)).open(Listener(pipe))
    for number in range(groups):
        size = 2 << number % 3
        block = plane.rank // size
        members = range(block * size, min(world, (block + 1) * size))
        Membership(plane, 1000 + number * world + block, members).open(Quiet(pipe))
    met = plane.meet(120)
    os.write(pipe, TOLD.pack(-1 if met else -2, time.monotonic()))
    while True:
        signal.pause()


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    ends = [socket.create_server((ADDRESS, 0)) for _ in range(count)]
    found = [end.getsockname()[1] for end in ends]
    for end in ends:
        end.close()
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process's threads so far."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as stat:
            total += int(stat.read().split()[0])
    return total / 1e9


def memory_bytes(pid: int) -> int:
    """Memory that is a process's own."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as maps:
        lines = [line.split() for line in maps if line.startswith("Private_")]
    return 1024 * sum(int(line[1]) for line in lines)


def hear(pipe: int, what: int, count: int, seconds: float) -> list[float]:
    """When each of ``count`` processes has told of ``what``; fewer if time runs out."""
    end, found = time.monotonic() + seconds, list[float]()
    while len(found) < count and (left := end - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0]:
            data = os.read(pipe, TOLD.size)
            kind, when = TOLD.unpack(data)
            if kind == what:
                found.append(when)
    return found


def measure(members: int, groups: int, liveness: float, seconds: float) -> dict[str, Any]:
    """One world, from its making to its end."""
    read, write = os.pipe()
    go, gone_off = os.pipe()
    ports = free_ports(members)
    endpoints = [(ADDRESS, port) for port in ports]
    pids = []
    for rank in range(members):
        pid = os.fork()
        if not pid:
            try:
                os.close(read)
                os.close(gone_off)
                plane = ControlPlane(rank, members, liveness)
                plane.open(ADDRESS, (ports[rank], ports[rank]))
                os.read(go, 1)  # until all are there, as after a rendezvous
                be_a_member(plane, endpoints, write, groups)
            finally:
                os._exit(1)
        pids.append(pid)
    time.sleep(1 + members / 50)
    begin, at_first = time.monotonic(), cpu_seconds(pids[0])
    memory = memory_bytes(pids[0])
    os.close(gone_off)
    os.close(go)
    try:
        met = hear(read, -1, members, 150)
        if len(met) < members:
            raise RuntimeError(f"only {len(met)} of {members} have met")
        start = cpu_seconds(pids[0]) - at_first
        time.sleep(2)
        memory = memory_bytes(pids[0]) - memory
        descriptors = len(os.listdir(f"/proc/{pids[0]}/fd"))
        before, since = sum(map(cpu_seconds, pids)), time.monotonic()
        coordinator_before = cpu_seconds(pids[0])
        time.sleep(seconds)
        spent = time.monotonic() - since
        share = (sum(map(cpu_seconds, pids)) - before) / spent
        coordinator_share = (cpu_seconds(pids[0]) - coordinator_before) / spent
        noticed = {}
        for gone, (name, victim) in enumerate((("other", members - 1), ("coordinator", 0)), 1):
            killed, spends = time.monotonic(), cpu_seconds(pids[0])
            os.kill(pids[victim], signal.SIGKILL)
            told = hear(read, victim, members - gone, 3 * liveness)
            if len(told) < members - gone:
                raise RuntimeError(f"{len(told)} of {members - gone} know of the {name}'s end")
            times = sorted(1e3 * (when - killed) for when in told)
            noticed[name] = {
                "median_ms": round(statistics.median(times), 1),
                "longest_ms": round(times[-1], 1),
            }
            time.sleep(1)
            if victim:
                noticed[name]["coordinator_ms"] = round(1e3 * (cpu_seconds(pids[0]) - spends), 1)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        os.close(read)
        os.close(write)
    return {
        "members": members,
        "groups_each": 1 + groups,
        "liveness_s": liveness,
        "met_s": round(max(met) - begin, 2),
        "cores": round(share, 4),
        "coordinator_cores": round(coordinator_share, 4),
        "coordinator_start_s": round(start, 3),
        "coordinator_memory": memory,
        "coordinator_descriptors": descriptors,
        "killed": noticed,
    }


def costs(found: Mapping[str, Any]) -> list[str]:
    """A row of COSTS."""
    killed = [found["killed"][which] for which in ("other", "coordinator")]
    return [
        f"{found['members']}",
        f"{found['groups_each']}",
        f"{found['cores']:.3f}",
        f"{found['coordinator_cores']:.3f}",
        *(f"{one['median_ms']:.0f} and {one['longest_ms']:,.0f} ms" for one in killed),
    ]


def beside_simulated(found: Mapping[str, Any]) -> list[str]:
    """A row of SIMULATED: of the coordinator."""
    simulated = simulate_control(found["members"], liveness=found["liveness_s"])
    return [
        f"{found['members']}",
        f"{1e3 * found['coordinator_start_s']:.0f} ms",
        f"{1e3 * simulated.ready_busy:.0f} ms",
        f"{found['coordinator_cores']:.2%}",
        f"{simulated.busy:.2%}",
        f"{found['killed']['other']['coordinator_ms']:.1f} ms",
        f"{1e3 * simulated.ended.busy:.1f} ms",
        f"{found['coordinator_descriptors']}",
        f"{simulated.descriptors}",
        f"{found['coordinator_memory'] / 1e6:.1f} MB",
        f"{simulated.memory / 1e6:.1f} MB",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--groups", type=int, default=0, help="of 2 to 8 ranks, for each (0)")
    parser.add_argument("--liveness", type=float, default=10.0, help="seconds (10)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of CPU time measured (30)")
    add_report(parser, "measured-costs.md and simulate-accuracy.md")
    options = parser.parse_args()
    every = []
    for members in options.members:
        every.append(measure(members, options.groups, options.liveness, options.seconds))
        print(json.dumps(every[-1]), flush=True)
    COSTS.report(options.report, [costs(found) for found in every])
    if options.report and not options.groups:
        SIMULATED.report(options.report, [beside_simulated(found) for found in every])
    return 0


if __name__ == "__main__":
    sys.exit(main())
