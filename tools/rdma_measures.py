"""What is measured over two soft-RoCE devices, in the guest of tools/rdma_check.py, as root.

    python -m tools.rdma_measures FOLDER

writes a file of JSON for each measure: what rank 0 found and what rank 1 found.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from lossycoll.plan import hierarchical
from lossycoll.plan.order import draw_order
from lossycoll.runtime.engine.binding import EngineCall
from lossycoll.runtime.engine.failures import Where, error_of
from tests.support import oracle_cases
from tests.support.network import Ended, Network
from tests.support.oracle_checks import check
from tools.rdma_pair import GROUP, INTERFACES, WORLD, End, Floats, Peer, Task, both, counters

F32: Final = 4
PATIENT: Final[dict[str, Any]] = {"deadline_min": 10.0, "deadline_max": 20.0, "reorder_min": 0.02}
"""The guest is slow and its machine may be busy: nothing that comes late may count as lost."""

EXACT: Final = 10_000
EXACT_S: Final = 40.0
"""So many operations, or as many as fit."""
IN_FLIGHT: Final = 16
DIFFERENT: Final = 5
"""Inputs of one size."""

ORACLE_LOSS: Final = "loss=0.1,seed=6"
ORACLE_S: Final = 25.0
DELIVERIES: Final[tuple[dict[str, Any], ...]] = ({"repair": 0}, {"repair": 1}, {"reliable": True})

LOSSES: Final = (1, 10)
"""Percent, by netem."""
LOSS_S: Final = {True: 4.0, False: 10.0}
"""Reliable, lossy."""
LOSS_PACKETS: Final = 64
APART: Final = 2.0
"""By how much the two ranks' elements differ: then a mean is one from either."""

LIVENESS_S: Final = 1.0
DEADLINE_S: Final = 3.0
BEFORE_KILL_S: Final = 1.0

CUT_S: Final = 8.0
CUT_AFTER_S: Final = 1.5
CUT_FOR_S: Final = 1.5

SPEED_ELEMENTS: Final = (1 << 20) // F32
SPEED_ROUNDS: Final = 6
SPEED_EACH: Final = 4
WAYS: Final[dict[str, dict[str, Any]]] = {
    "RDMA": {},
    "UDP": {"udp": True},
    "UDP, packet by packet": {"udp": True, "disable": "gso,gro"},
}
"""What is compared. The kernel carries dozens of packets as one where it can."""


def exact(peer: Peer) -> dict[str, Any]:
    """Many operations of many sizes, where nothing is lost: every element is right."""
    end = End(peer, **PATIENT)
    each = end.payload_bytes // F32
    sizes = (1, 100, each - 1, each, 2 * each + 1, 6 * each + 5)
    calls = []
    for size, reliable in itertools.product(sizes, (False, True)):
        plan = hierarchical.all_reduce(WORLD, peer.rank, size, each)
        base = np.arange(size, dtype=np.float32) % 7
        for i in range(DIFFERENT):
            calls.append(
                (base * (1 + peer.rank) + i, base * 1.5 + i, end.call(plan, reliable=reliable))
            )
    begin, done, wrong, codes = time.monotonic(), 0, 0, set()
    while done < EXACT and peer.agree(time.monotonic() < begin + EXACT_S):
        now = [calls[(done + i) % len(calls)] for i in range(IN_FLIGHT)]
        arrays = [mine.copy() for mine, _, _ in now]
        tickets = [end.submit(one[2], array) for one, array in zip(now, arrays, strict=True)]
        codes |= {end.end(ticket)[1].code for ticket in tickets}
        for (_, want, _), array in zip(now, arrays, strict=True):
            wrong += not np.array_equal(array, want)
        done += IN_FLIGHT
    seconds = time.monotonic() - begin
    found = {"operations": done, "wrong": wrong, "codes": sorted(codes), "loop_seconds": seconds}
    found |= {"sizes": sizes, "mtu": end.mtu, "payload": end.payload_bytes, "queue": end.queue}
    return {**found, "stats": end.settled()}


class Halves(Network):
    """The oracle's network of two engines, of which each process has one."""

    def __init__(self, peer: Peer, payload_bytes: int, **options: Any) -> None:
        # Not the parent's, which opens all engines.
        self.peer = peer
        self.half = End(peer, payload_bytes=payload_bytes, **options)
        self.world, self.payload_bytes, self.op = WORLD, payload_bytes, 0
        self.engines = [self.half.engine] * WORLD

    def run(
        self,
        plans: Any,
        inputs: Any,
        outputs: Any,
        dtype: str,
        scale: float = 1.0,
        **how: Any,
    ) -> list[Ended]:
        own, other = self.peer.rank, self.peer.other
        ticket = self.submit(own, plans[own], (inputs[own], outputs[own]), dtype, scale, **how)
        self.op += 1
        ended = [self.end(own, ticket)] * WORLD
        ended[other], outputs[other][:] = self.peer.swap((ended[own], outputs[own]))
        return ended


def oracle(peer: Peer) -> dict[str, Any]:
    """The oracle's cases at injected loss: every element as the reference executor has it."""
    options: dict[str, Any] = {"deadline_min": 60.0, "deadline_max": 60.0, "reorder_min": 0.005}
    network = Halves(peer, oracle_cases.PAYLOAD, inject=ORACLE_LOSS, **options)
    # Sizes first: what doesn't fit into the time is some sizes of every case.
    asked = list(
        itertools.product(
            reversed(range(len(oracle_cases.sizes(WORLD, 1)))),
            DELIVERIES,
            oracle_cases.lossy_cases(WORLD),
        )
    )
    until, dropped = time.monotonic() + ORACLE_S, 0
    for size, how, case in asked:
        if not peer.agree(time.monotonic() < until):
            break
        dtype, itemsize = ("f32", F32) if case.sums else ("bytes", 1)
        elements = oracle_cases.sizes(WORLD, oracle_cases.PAYLOAD // itemsize)[size]
        dropped += check(network, case, elements, dtype, ORACLE_LOSS, **how)
    found = {"operations": network.op, "asked": len(asked), "dropped": dropped}
    return {**found, "stats": network.half.settled()}


def lossy(peer: Peer, reliable: bool) -> dict[str, Any]:
    """Means over links that lose: of both ranks where reliable, else of those that arrived."""
    end = End(peer, **PATIENT)
    each = end.payload_bytes // F32
    elements = LOSS_PACKETS * each
    calls = {
        order: end.call(
            hierarchical.all_reduce(WORLD, peer.rank, elements, each, order=order),
            reliable=reliable,
        )
        for order in itertools.permutations(range(WORLD))
    }
    base = (np.arange(elements) % 16 / 8).astype(np.float32)
    mine, middle = base + np.float32(APART * peer.rank), base + np.float32(APART / 2)
    begin, strange, codes = time.monotonic(), 0, set()
    deviations: list[float] = []
    while peer.agree(time.monotonic() < begin + LOSS_S[reliable]):
        array = mine.copy()
        order = draw_order(17, GROUP, len(deviations), WORLD)
        codes.add(end.end(end.submit(calls[order], array))[1].code)
        # -1: rank 0's elements alone; 0: the mean; 1: rank 1's alone.
        signs = ((array - middle) / np.float32(APART / 2)).reshape(LOSS_PACKETS, each)
        whole = (signs == signs[:, :1]).all(axis=1) & np.isin(signs[:, 0], (-1, 0, 1))
        strange += int(np.count_nonzero(~whole))
        deviations.append(float(signs[:, 0].mean()))
    found = {"deviations": deviations, "strange": strange, "codes": sorted(codes)}
    return {**found, "stats": end.settled()}


def killed(peer: Peer) -> dict[str, Any]:
    """Rank 1 is killed in the middle of an operation; what becomes of rank 0's."""
    end = End(peer, deadline_min=0.5, deadline_max=DEADLINE_S, liveness=LIVENESS_S)
    each = end.payload_bytes // F32
    array, done = np.zeros(100 * each, np.float32), 0
    call = end.call(hierarchical.all_reduce(WORLD, peer.rank, array.size, each), reliable=True)
    if peer.rank == 1:
        threading.Timer(BEFORE_KILL_S, _end_hard, [peer]).start()
    while (failure := end.end(end.submit(call, array))[1]).code == 0:
        done += 1
    failed = time.monotonic()
    error = error_of(failure, Where(peer.rank, WORLD, addresses=end.host.addresses))
    found = {"operations": done, "after": failed - peer.pipe.recv()}
    found |= {"bound": end.options.link_timeout}
    end.close()
    return {**found, "kind": type(error).__name__, "peer": error.peer, "text": str(error)}


def _end_hard(peer: Peer) -> None:
    peer.pipe.send(time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def cut(peer: Peer) -> dict[str, Any]:
    """The port of rank 0 loses its link for a while, in the middle of reliable calls."""
    end = End(peer, **PATIENT)
    each = end.payload_bytes // F32
    plan = hierarchical.all_reduce(WORLD, peer.rank, LOSS_PACKETS * each, each)
    call = end.call(plan, reliable=True)
    if peer.rank == 0:
        threading.Timer(CUT_AFTER_S, _cut_the_link).start()
    begin, longest, wrong, codes = time.monotonic(), 0.0, 0, set()
    ends: list[float] = []
    while peer.agree(time.monotonic() < begin + CUT_S):
        array, began = np.full(LOSS_PACKETS * each, float(peer.rank), np.float32), time.monotonic()
        codes.add(end.end(end.submit(call, array))[1].code)
        wrong += not (array == 0.5).all()
        ends.append(time.monotonic() - begin)
        longest = max(longest, time.monotonic() - began)
    events = []
    while (event := end.host.event()) is not None:
        events.append(event.kind.name)
    late = sum(one > CUT_AFTER_S + CUT_FOR_S for one in ends)
    found = {"operations": len(ends), "after": late, "longest": longest, "wrong": wrong}
    return {**found, "codes": sorted(codes), "events": events, "stats": end.settled()}


def _cut_the_link() -> None:
    _tool("ip", "link", "set", INTERFACES[0], "down")
    time.sleep(CUT_FOR_S)
    _tool("ip", "link", "set", INTERFACES[0], "up")


def speed(peer: Peer) -> dict[str, Any]:
    """All-reduces over each link in turn: seconds, and CPU time for each packet."""
    ends = {name: End(peer, **how, **PATIENT) for name, how in WAYS.items()}
    each = min(end.payload_bytes for end in ends.values()) // F32
    plan = hierarchical.all_reduce(WORLD, peer.rank, SPEED_ELEMENTS, each)
    calls = {name: end.call(plan, reliable=True) for name, end in ends.items()}
    array = np.ones(SPEED_ELEMENTS, np.float32)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ends}
    for number in range(1 + SPEED_ROUNDS):
        for name, end in ends.items():
            peer.swap(name)
            row = _timed(end, calls[name], array)
            if number:  # the first one warms up
                rows[name].append(row)
    found = {"rows": rows, "payload": each * F32, "right": bool((array == 1).all())}
    settled = {name: end.settled() for name, end in ends.items()}
    return {**found, "stats": settled["RDMA"], "others": settled}


def _timed(end: End, call: EngineCall, array: Floats) -> dict[str, float]:
    sent = Path("/sys/class/net", INTERFACES[end.peer.rank], "statistics", "tx_bytes")
    kernel, own = _kernel_seconds(), time.process_time()
    wire, begin = int(sent.read_text()), time.monotonic()
    reports = [end.end(end.submit(call, array))[0] for _ in range(SPEED_EACH)]
    return {
        "seconds": time.monotonic() - begin,
        "cpu": time.process_time() - own,
        "kernel_cpu": _kernel_seconds() - kernel,
        "packets": sum(one.packets_sent + one.packets_received for one in reports),
        "resent": sum(one.packets_resent for one in reports),
        "bytes": sum(one.bytes_sent for one in reports),
        "wire": int(sent.read_text()) - wire,
    }


@lru_cache
def _kernel_threads() -> tuple[Path, ...]:
    """Those to which the kernel puts off packets' work: it is no process's time then."""
    return tuple(
        path.parent / "schedstat"
        for path in Path("/proc").glob("[0-9]*/comm")
        if path.read_text().startswith("ksoftirqd/")
    )


def _kernel_seconds() -> float:
    return sum(int(path.read_text().split()[0]) for path in _kernel_threads()) * 1e-9


def _tool(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def lose(percent: int) -> None:
    """So much of what either interface sends from now on."""
    for interface in INTERFACES:
        netem = ("netem", "limit", "100000", "loss", f"{percent}%")
        _tool("tc", "qdisc", "replace", "dev", interface, "root", *netem)


def lose_nothing() -> None:
    """As before the first loss."""
    for interface in INTERFACES:
        _tool("tc", "qdisc", "del", "dev", interface, "root")


def drops() -> list[int]:
    """What netem has dropped, by interface."""
    shown = [_tool("tc", "-s", "-j", "qdisc", "show", "dev", one) for one in INTERFACES]
    return [sum(queue.get("drops", 0) for queue in json.loads(text)) for text in shown]


def measure(folder: Path, name: str, task: Task, seconds: float) -> None:
    """Runs a task in both ranks, and writes down what they found and what devices counted."""
    begin, before, dropped = time.monotonic(), [counters(r) for r in range(WORLD)], drops()
    ranks = both(task, seconds)
    counted = [
        {key: now - before[rank][key] for key, now in counters(rank).items()}
        for rank in range(WORLD)
    ]
    netem = [now - then for now, then in zip(drops(), dropped, strict=True)]
    took = time.monotonic() - begin
    found = {"ranks": ranks, "counted": counted, "netem": netem, "seconds": took}
    (folder / f"{name}.json").write_text(json.dumps(found))
    print(f"{name}: {took:.1f} s, netem dropped {netem}", flush=True)
    for rank, one in enumerate(ranks):
        happened = {key: n for key, n in counted[rank].items() if n}
        print(f"rank {rank}'s device: {happened}", flush=True)
        print(f"rank {rank}: {one.get('error', '') or one.get('stats', one)}", flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    print(f"imported after {time.process_time():.1f} s of CPU time", flush=True)
    measure(folder, "exact", exact, 120)
    measure(folder, "oracle", oracle, 120)
    for percent in LOSSES:
        lose(percent)
        for reliable in (True, False):
            name = f"{'reliable' if reliable else 'lossy'}-{percent}"
            measure(folder, name, partial(lossy, reliable=reliable), 90)
    lose_nothing()
    measure(folder, "killed", killed, 60)
    measure(folder, "speed", speed, 120)
    measure(folder, "cut", cut, 90)  # last: what routes there were for UDP goes with the link


if __name__ == "__main__":
    main()
