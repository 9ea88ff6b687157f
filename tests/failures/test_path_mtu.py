"""Routers between two hosts carry smaller packets than their interfaces."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.failures.test_network import _enter, _run
from tests.support.failure_cases import good
from tests.support.harness import Ranks, init, note

ENDS = ("10.213.78.1", "10.213.79.1")
BETWEEN = ("10.213.80.1", "10.213.80.2")
ON_LOOPBACK = ("10.213.81.1", "10.213.81.2")
ELEMENTS = 200_000
LINE: Final = re.compile(
    r"rank (\d)/\d: the path to rank (\d) \(.*\) carries UDP datagrams of (\d+) bytes and none of "
    r"(\d+) \(.*\), so packets go there in pieces; LOSSYCOLL_MTU=(\d+) on all ranks avoids that"
)


def _six(address: str) -> str:
    """The address of IPv6 that stands for one of 10.213.0.0/16."""
    return "fd00:213:{2}::{3}".format(*address.split("."))


class Routed:
    """Two hosts with interfaces of one MTU, and between their routers a link of a smaller one.

    ``on_loopback``: each host's address is one of ``lo`` (/32, /128), as on routed fabrics.
    ``silent``: the routers say nothing of what they drop (ICMP). ``six``: all addresses are of
    IPv6.
    """

    def __init__(
        self,
        undo: contextlib.ExitStack,
        mtu: int,
        between: int,
        on_loopback: bool = False,
        silent: bool = False,
        six: bool = False,
    ) -> None:
        family, own, length = ("-6", _six, "64") if six else ("-4", str, "24")
        self.hosts = [f"lossycoll{os.getpid()}{side}" for side in "ab"]
        self._routers = [f"{name}r" for name in self.hosts]
        self.addresses = tuple(map(own, ON_LOOPBACK if on_loopback else ENDS))
        for name in (*self.hosts, *self._routers):
            _run("ip", "netns", "add", name)
            undo.callback(_run, "ip", "netns", "del", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        self._join(self._routers[0], "far", self._routers[1], "far")
        self.carry(between)
        for i, (host, router) in enumerate(zip(self.hosts, self._routers, strict=True)):
            gate = f"{ENDS[i].rpartition('.')[0]}.254"
            self._join(host, "cable", router, "near")
            for name, device, address in (
                (host, "cable", ENDS[i]),
                (router, "near", gate),
                (router, "far", BETWEEN[i]),
            ):
                place = [f"{own(address)}/{length}", "dev", device, *["nodad"] * six]
                _run("ip", "-n", name, "addr", "add", *place)
            for name, device in ((host, "cable"), (router, "near")):
                _run("ip", "-n", name, "link", "set", device, "mtu", str(mtu))
            route = ["default", "via", own(gate)]
            if on_loopback:
                place = f"{self.addresses[i]}/{128 if six else 32}"
                _run("ip", "-n", host, "addr", "add", place, "dev", "lo")
                route += ["src", self.addresses[i]]
                _run("ip", family, "-n", router, "route", "add", place, "via", own(ENDS[i]))
            _run("ip", family, "-n", host, "route", "add", *route)
            far = ["default", "via", own(BETWEEN[1 - i])]
            _run("ip", family, "-n", router, "route", "add", *far)
            forward = "net.ipv6.conf.all.forwarding=1" if six else "net.ipv4.ip_forward=1"
            _inside(router, "sysctl", "-qw", forward)
            if silent:
                _inside(router, "nft", "add table inet quiet")
                chain = "{ type filter hook output priority 0; policy accept; }"
                _inside(router, "nft", f"add chain inet quiet out {chain}")
                for what in ("icmp type destination-unreachable", "icmpv6 type packet-too-big"):
                    _inside(router, "nft", f"add rule inet quiet out {what} drop")

    def _join(self, one: str, port: str, other: str, its_port: str) -> None:
        ends = ("type", "veth", "peer", "name", its_port, "netns", other)
        _run("ip", "-n", one, "link", "add", port, *ends)
        _run("ip", "-n", one, "link", "set", port, "up")
        _run("ip", "-n", other, "link", "set", its_port, "up")

    def carry(self, mtu: int, by: str = "far") -> None:
        """Sets the MTU between the routers, or of the hosts' interfaces (``by``: ``cable``)."""
        for name in self._routers if by == "far" else self.hosts:
            _run("ip", "-n", name, "link", "set", by, "mtu", str(mtu))

    def too_large(self) -> int:
        """Packets that a router has dropped for their size."""
        total = 0
        for router in self._routers:
            if ":" in self.addresses[0]:
                words = _inside(router, "cat", "/proc/net/snmp6").split()
                total += int(words[words.index("Ip6InTooBigErrors") + 1])
                continue
            lines = _inside(router, "cat", "/proc/net/snmp").splitlines()
            names, figures = (line.split() for line in lines if line.startswith("Ip:"))
            total += int(figures[names.index("FragFails")])
        return total


def _inside(name: str, *words: str) -> str:
    return _run("ip", "netns", "exec", name, *words)


@pytest.fixture
def routed(request: pytest.FixtureRequest) -> Iterator[Routed]:
    if shutil.which("ip") is None or shutil.which("nft") is None:
        pytest.skip("needs ip and nft (packages iproute2 and nftables)")
    with contextlib.ExitStack() as undo:
        try:
            made = Routed(undo, *request.param)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"can't make network namespaces here: {error.stderr.strip()}")
        yield made


class Seen(NamedTuple):
    """``missing``: packets of each lossy call. ``lines``: what was logged of the path's size."""

    right: bool
    missing: list[int]
    lines: list[str]


def rank_routed(rank: int, world: int) -> Any:
    """Calls until the path is as small as it gets, and some more."""
    _enter(os.environ["NAMESPACE"])
    import torch
    import torch.distributed as dist

    import lossycoll

    lines: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lossycoll").addHandler(heard)
    init()
    t = torch.full((ELEMENTS,), float(rank + 1))
    with lossycoll.reliable():
        dist.all_reduce(t)
    right = bool((t == world * (world + 1) / 2).all())
    missing: list[int] = []

    def call() -> None:
        before = lossycoll.stats().packets_missing
        dist.all_reduce(t.fill_(1))
        missing.append(lossycoll.stats().packets_missing - before)

    if "FALLEN" in os.environ:
        call()
        note("calls")
        fallen = torch.zeros(1)
        while not fallen.item():
            dist.all_reduce(t.fill_(1))
            fallen.fill_(float(Path(os.environ["FALLEN"]).exists()))
            with lossycoll.reliable():
                dist.all_reduce(fallen)
    for _ in range(12):
        call()
        time.sleep(0.1)  # what the path carries is known after four attempts, and then said
    with lossycoll.reliable():
        dist.broadcast(t.fill_(rank), 0)
    right = right and bool((t == 0).all())
    lossycoll.stats()
    dist.destroy_process_group()
    return Seen(right, missing, [line for line in lines if "datagrams" in line or "vanish" in line])


def _ranks(routed: Routed, world: int = 2, **more: str) -> Ranks:
    env = {
        "MASTER_ADDR": routed.addresses[0],
        "LOSSYCOLL_LIVENESS": "20",
        "LOSSYCOLL_LOG": "warning",
        **more,
    }
    homes = {rank: {"NAMESPACE": routed.hosts[2 * rank // world]} for rank in range(world)}
    return Ranks(rank_routed, world, env, per_rank=homes, own_store=True)


def _is_said_once(rank: int, seen: Seen, mtu_of_route: int, carries: int) -> None:
    (line,) = seen.lines
    named = LINE.match(line)
    assert named, line
    assert [int(named[1]), int(named[2])] == [rank, 1 - rank]
    found, wanted, mtu = (int(named[i]) for i in (3, 4, 5))
    assert found < wanted < mtu_of_route  # not lo's 65,536, where the address is a /32 on lo
    assert 0.9 * carries < mtu <= carries


CASES = (
    (9000, 1280),
    (1500, 1420, True),
    (1500, 1280),
    (1500, 1280, False, True),
    (1500, 1280, False, False, True),
    pytest.param((1500, 1420, True, False, True), marks=pytest.mark.long),
    pytest.param((1500, 1280, False, True, True), marks=pytest.mark.long),
)
NAMES = ("jumbo", "loopback", "usual", "silent", "six", "loopback-six", "silent-six")


@pytest.mark.parametrize("routed", CASES, indirect=True, ids=NAMES)
def test_calls_work_where_a_router_carries_less(
    routed: Routed, request: pytest.FixtureRequest
) -> None:
    mtu, carries = request.node.callspec.params["routed"][:2]
    with _ranks(routed) as ranks:
        outcomes = ranks.collect(90)
    assert routed.too_large() > 0
    for rank, seen in enumerate(good(outcomes)):
        assert seen.right
        assert sum(seen.missing) == 0
        _is_said_once(rank, seen, mtu, carries)


@pytest.mark.parametrize("routed", [(1500, 1500, False, True)], indirect=True, ids=[""])
@pytest.mark.parametrize("device", ["far", "cable"], ids=["router", "interface"])
def test_calls_work_after_a_router_carries_less(
    device: str, routed: Routed, tmp_path: Path
) -> None:
    """Or the hosts' own interfaces, whose kernels refuse what is larger."""
    fallen = tmp_path / "fallen"
    with _ranks(routed, FALLEN=str(fallen)) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "calls")
        assert routed.too_large() == 0
        routed.carry(1280, device)
        fallen.touch()
        outcomes = ranks.collect(90)
    assert (routed.too_large() > 0) == (device == "far")
    for rank, seen in enumerate(good(outcomes)):
        assert seen.right
        assert seen.missing[0] == sum(seen.missing[-4:]) == 0
        _is_said_once(rank, seen, 1500, 1280)


@pytest.mark.parametrize("routed", [(1500, 1280)], indirect=True)
def test_one_rank_of_each_host_says_that_a_router_carries_less(routed: Routed) -> None:
    with _ranks(routed, 4) as ranks:
        found = good(ranks.collect(90))
    assert routed.too_large() > 0
    assert all(seen.right and sum(seen.missing) == 0 for seen in found)
    for host in (found[:2], found[2:]):
        (line,) = [line for seen in host for line in seen.lines]
        assert LINE.match(line), line
