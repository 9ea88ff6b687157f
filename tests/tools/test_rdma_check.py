"""The check of RDMA in a guest, without a guest: what would run there, and how it is judged."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tools import rdma_check
from tools.rdma_measures import LOSSES, WAYS
from tools.rdma_pair import ADDRESSES, INTERFACES

STATS = {
    "packets_sent": 200,
    "packets_received": 190,
    "packets_missing": 0,
    "packets_resent": 0,
    "socket_overflow": 0,
}
ROW = {
    "seconds": 0.4,
    "cpu": 0.1,
    "kernel_cpu": 0.01,
    "packets": 2000,
    "resent": 0,
    "bytes": 4_000_000,
    "wire": 4_200_000,
}


def measure(one: dict[str, Any], dropped: int = 0, **stats: int) -> dict[str, Any]:
    """What the guest writes of a measure in which both ranks found the same."""
    rank = {"torch": False, "codes": [0], "stats": STATS | stats, **one}
    counted = {"rcvd_pkts": 250, "rdma_recvs": 250, "sent_pkts": 260}
    found = {"ranks": [rank, rank], "counted": [counted, counted]}
    return {**found, "netem": [dropped, dropped], "seconds": 3.0}


def as_wanted() -> dict[str, Any]:
    """The guest's files, of a link without a fault."""
    call = {"operations": 9000, "wrong": 0, "loop_seconds": 40.0, "sizes": [1, 100]}
    found = {"exact": measure({**call, "mtu": 4096, "payload": 4032})}
    found["oracle"] = measure({"operations": 400, "asked": 459, "dropped": 370})
    for percent in LOSSES:
        right = {"deviations": [0.0] * 50, "strange": 0}
        found[f"reliable-{percent}"] = measure(right, dropped=20, packets_resent=15)
        means = {"deviations": [-0.1, 0.1] * 25, "strange": 0}
        found[f"lossy-{percent}"] = measure(means, dropped=20, packets_missing=10)
    error = {"kind": "LinkError", "peer": 1, "text": "the link from rank 1 is silent"}
    died = measure({"operations": 30, "after": 3.01, "bound": 3.0, **error})
    del died["ranks"][0]["stats"]
    died["ranks"][1] = {"error": "ended with -9"}
    found["killed"] = died
    found["speed"] = measure({"right": True, "rows": {name: [ROW] * 6 for name in WAYS}})
    off = {"operations": 170, "after": 130, "longest": 2.0, "wrong": 0, "events": ["FAILING"]}
    found["cut"] = measure(off, packets_resent=40)
    alone: dict[str, Any] = json.loads(json.dumps(found))  # nothing is in two places any more
    return alone


def complaints(found: dict[str, Any]) -> list[str]:
    files = {f"{name}.json": json.dumps(data) for name, data in found.items()}
    return [text for verdict in rdma_check.verdicts(files) for text in verdict.complaints]


def test_what_runs_is_a_script() -> None:
    text = rdma_check.script("/usr/bin/python3")
    done = subprocess.run(["sh", "-n"], input=text, text=True, check=False)
    assert done.returncode == 0
    lines = text.splitlines()
    for rank, (interface, address) in enumerate(zip(INTERFACES, ADDRESSES, strict=True)):
        assert f"rdma link add rxe{rank} type rxe netdev {interface}" in lines
        assert f"ip addr add {address}/24 dev {interface}" in lines
    # What is sent to the other end leaves by this end.
    assert f"ip route add {ADDRESSES[1]} dev va src {ADDRESSES[0]} table 10" in lines
    assert lines[-1] == "/usr/bin/python3 -m tools.rdma_measures /mnt/out"


def test_what_is_as_wanted_is_not_complained_of() -> None:
    found = as_wanted()
    assert complaints(found) == []
    files = {f"{name}.json": json.dumps(data) for name, data in found.items()}
    rows = rdma_check.table(rdma_check.verdicts(files)).splitlines()
    assert [row.split()[:2] for row in rows] == [[name, "ok"] for name in found]
    speeds = rdma_check.speeds(found["speed"])
    assert len(speeds) == len(WAYS)
    # 4 MiB in 0.4 s, 0.6 s for 12,000 packets, and the kernel's threads for both ranks.
    assert speeds[0] == ["RDMA", "10.5", "50.0 us", "50.0 us", "2.5 us", "0"]


@pytest.mark.parametrize(
    ("name", "place", "value", "said"),
    [
        ("exact", "ranks/0/wrong", 2, "exact: 2 results are wrong, 0 packets missing"),
        ("exact", "ranks/1/stats/packets_missing", 1, "0 results are wrong, 1 packets missing"),
        ("exact", "ranks/0/codes", [0, -8], "exact: operations ended with the codes"),
        ("exact", "ranks/0/operations", 16, "exact: only 16 operations, wanted 500 at least"),
        ("exact", "ranks/1/torch", True, "exact: rank 1 has imported torch"),
        ("exact", "counted/1/rcvd_pkts", 253, "exact: rank 1's device dropped 3 datagrams"),
        ("exact", "ranks/0/stats/socket_overflow", 4, "and the engine counts 4"),
        ("exact", "counted/0/sent_pkts", 9, "rank 0 sent 200 packets, its device only 9"),
        ("oracle", "ranks/0/dropped", 0, "oracle: the fault did not happen"),
        ("oracle", "ranks/1/error", "Traceback\n  x\nAssertionError: y\n", "rank 1: AssertionErr"),
        ("reliable-1", "ranks/0/deviations", [0.0, 0.5], "reliable-1: 1 results are wrong"),
        ("reliable-10", "netem", [0, 0], "reliable-10: the fault did not happen"),
        ("lossy-1", "ranks/0/deviations", [0.1, 0.3] * 25, "lossy-1: the means lean by +0.10000"),
        ("lossy-1", "netem", [3, 4], "20 packets are missing, netem dropped 7 only"),
        ("lossy-10", "ranks/1/strange", 1, "1 packets hold no mean of a part of the ranks"),
        ("killed", "ranks/0/after", 9.0, "killed: noticed after 9.0 s, wanted 3 s"),
        ("killed", "ranks/0/peer", None, "killed: wanted a LinkError that names rank 1"),
        ("killed", "ranks/1/error", "took too long", "killed: rank 1 was not killed"),
        ("cut", "ranks/0/after", 0, "cut: nothing has gone on after it"),
        ("cut", "ranks/1/wrong", 1, "cut: 1 results are wrong"),
        ("speed", "ranks/0/right", False, "speed: results are wrong"),
        ("speed", "ranks/1/rows/UDP/0/wire", 10, "speed: UDP of rank 1 went past vb"),
    ],
)
def test_what_is_not_as_wanted_is(name: str, place: str, value: Any, said: str) -> None:
    found = as_wanted()
    at: Any = found[name]
    *way, last = place.split("/")
    for step in way:
        at = at[int(step) if isinstance(at, list) else step]
    at[last] = value
    said_of_it = complaints(found)
    assert len(said_of_it) == 1
    assert said in said_of_it[0]
