"""A router between two hosts carries smaller packets than their interfaces.

Jumbo frames are in tests/native/test_packet_size.c: a veth drops them without a word, and TCP, of
the control plane, then hangs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.failures.test_network import _enter, _run
from tests.support.failure_cases import QUIET, good
from tests.support.harness import Ranks, init

ENDS = ("10.213.78.1", "10.213.79.1")
ELEMENTS = 200_000


class Routed:
    """Two hosts with interfaces of one MTU, and a router between them with a smaller one."""

    def __init__(self, undo: contextlib.ExitStack, mtu: int, carries: int) -> None:
        router, *self.names = (f"lossycoll{os.getpid()}{side}" for side in "rab")
        for name in (router, *self.names):
            _run("ip", "netns", "add", name)
            undo.callback(_run, "ip", "netns", "del", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for name, address in zip(self.names, ENDS, strict=True):
            port, gate = f"to{name[-1]}", f"{address.rpartition('.')[0]}.254"
            ends = ("type", "veth", "peer", "name", port, "netns", router)
            _run("ip", "-n", name, "link", "add", "cable", *ends)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            _run("ip", "-n", router, "addr", "add", f"{gate}/24", "dev", port)
            _run("ip", "-n", name, "link", "set", "cable", "mtu", str(mtu), "up")
            _run("ip", "-n", router, "link", "set", port, "mtu", str(carries), "up")
            _run("ip", "-n", name, "route", "add", "default", "via", gate)


@pytest.fixture(params=[(1500, 1280), (1500, 1420)])
def routed(request: pytest.FixtureRequest) -> Iterator[Routed]:
    if shutil.which("ip") is None:
        pytest.skip("needs ip (package iproute2)")
    with contextlib.ExitStack() as undo:
        try:
            made = Routed(undo, *request.param)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"can't make network namespaces here: {error.stderr.strip()}")
        yield made


def rank_routed(rank: int, world: int) -> Any:
    """Whether a reliable sum was right, and what lossy ones lack."""
    _enter(os.environ["NAMESPACE"])
    import torch
    import torch.distributed as dist

    import lossycoll

    init()
    t = torch.full((ELEMENTS,), float(rank + 1))
    with lossycoll.reliable():
        dist.all_reduce(t)
    right = bool((t == 3).all())
    for _ in range(4):
        dist.all_reduce(t.fill_(1))
    missing = lossycoll.stats().packets_missing
    with lossycoll.reliable():
        dist.broadcast(t, 0)
    dist.destroy_process_group()
    return right, missing


def test_calls_work_where_a_router_carries_less(routed: Routed) -> None:
    env = {
        **QUIET,
        "LOSSYCOLL_LIVENESS": "20",
        "MASTER_ADDR": ENDS[0],
        "LOSSYCOLL_INTERFACE": "cable",
    }
    homes = {rank: {"NAMESPACE": routed.names[rank]} for rank in range(2)}
    with Ranks(rank_routed, 2, env, per_rank=homes, own_store=True) as ranks:
        outcomes = ranks.collect(90)
    for right, missing in good(outcomes):
        assert right
        assert missing == 0
