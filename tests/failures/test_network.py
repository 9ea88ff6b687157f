"""The network between ranks is cut by a firewall, and the store goes away under them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.failure_cases import QUIET, SLACK, catch, good, must_name_the_lost
from tests.support.harness import Ranks, init, note
from tests.support.waiting import until

PATIENT = 10.0
"""The liveness. Half of it is promised to do no harm, and no slow machine reaches all of it."""
CALMER = {**QUIET, "LOSSYCOLL_LIVENESS": str(PATIENT)}
LOADED = 10.0
"""Seconds that a starved machine may add to any bound; far below the timeouts."""
CLONE_NEWNET = 0x40000000
ENDS = ("10.213.77.1", "10.213.77.2")


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


class Cable:
    """Two network namespaces that a cable joins, and a firewall in each that can cut it."""

    def __init__(self, undo: contextlib.ExitStack) -> None:
        self.names = [f"lossycoll{os.getpid()}{side}" for side in "ab"]
        for name in self.names:
            _run("ip", "netns", "add", name)
            undo.callback(_run, "ip", "netns", "del", name)
        ends = ("type", "veth", "peer", "name", "cable", "netns", self.names[1])
        _run("ip", "-n", self.names[0], "link", "add", "cable", *ends)
        for name, address in zip(self.names, ENDS, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _run("ip", "-n", name, "link", "set", device, "up")
            self.nft(name, "add table ip cut")
            chain = "{ type filter hook input priority 0; policy accept; }"
            self.nft(name, f"add chain ip cut in {chain}")

    def nft(self, name: str, command: str) -> str:
        return _run("ip", "netns", "exec", name, "nft", command)

    def cut(self) -> float:
        for name in self.names:
            self.nft(name, 'add rule ip cut in iifname "cable" counter drop')
        return time.monotonic()

    def mend(self) -> int:
        """Returns how many packets the firewall has dropped."""
        listed = "".join(self.nft(name, "list chain ip cut in") for name in self.names)
        for name in self.names:
            self.nft(name, "flush chain ip cut in")
        return sum(int(part.split()[0]) for part in listed.split("counter packets ")[1:])


@pytest.fixture
def cable() -> Iterator[Cable]:
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} (packages iproute2 and nftables)")
    with contextlib.ExitStack() as undo:
        try:
            made = Cable(undo)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"can't make network namespaces here: {error.stderr.strip()}")
        yield made


def _enter(namespace: str) -> None:
    """For this thread and those that it starts."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.setns(file.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def rank_across(rank: int, world: int) -> Any:
    """Sums over the cable until it fails. A sum of ones is right whatever part of it arrives."""
    _enter(os.environ["NAMESPACE"])
    import torch
    import torch.distributed as dist

    init()
    t = torch.ones(100_000)
    count = 0
    while True:
        caught = catch(lambda: dist.all_reduce(t.fill_(1)))
        if caught.kind:
            break
        assert (t == world).all()
        count += 1
        if count % 20 == 0:
            note(f"sum {count}")
        time.sleep(0.005)
    dist.destroy_process_group()
    return caught


def _sums(ranks: Ranks, number: int) -> int:
    return int(ranks.output(number).rpartition("sum ")[2].split()[0])


def test_a_network_that_is_cut_shortly_heals_and_one_cut_for_long_is_an_error(
    cable: Cable,
) -> None:
    env = {
        **CALMER,
        "MASTER_ADDR": ENDS[0],
        "LOSSYCOLL_INTERFACE": "cable",
    }
    homes = {rank: {"NAMESPACE": cable.names[rank == 2]} for rank in range(3)}
    with Ranks(rank_across, 3, env, per_rank=homes, own_store=True) as ranks:
        for number in range(3):
            ranks.wait_for(number, "sum 20", 100)
        since = cable.cut()
        time.sleep(max(0.0, since + 0.42 * PATIENT - time.monotonic()))  # half, and a slow machine
        assert cable.mend() > 0
        for number in range(3):  # it goes on, well beyond what was under way
            ranks.wait_for(number, f"sum {_sums(ranks, number) + 60}", 60)
        since = cable.cut()
        outcomes = ranks.collect(150)
        assert cable.mend() > 0
    found = good(outcomes)
    for rank in (0, 1):
        must_name_the_lost(
            found[rank],
            "this side",
            rank=rank,
            world=3,
            victim=2,
            since=since,
            liveness=PATIENT,
            address=ENDS[1],
        )
    # The other side can't know that it is the smaller one: it has lost rank 0.
    assert found[2].kind in {"PeerLostError", "AbortedError"}, found[2]
    assert "rank 2/3" in found[2].text
    assert f"rank 0 ({ENDS[0]}:" in found[2].text
    for caught in found:
        assert since + 0.25 * PATIENT < caught.when < since + PATIENT + SLACK, caught


# ---- the store ----


def rank_without_store(rank: int, world: int) -> Any:
    import torch
    import torch.distributed as dist

    init()
    t = torch.ones(60_000)
    dist.all_reduce(t.fill_(1))
    note("ready")
    until(lambda: os.path.exists(os.environ["GONE"]), "the end of the store", seconds=200)
    for _ in range(20):
        dist.all_reduce(t.fill_(1))
        assert (t == world).all()
    group = dist.new_group(backend="lossy")
    dist.all_reduce(t.fill_(1), group=group)
    assert (t == world).all()
    begin = time.monotonic()
    caught = catch(lambda: dist.new_group(backend="lossy", pg_options={"mtu": 1500}))
    seconds = caught.when - begin
    dist.all_reduce(t.fill_(1))
    assert (t == world).all()
    dist.destroy_process_group()
    return caught, seconds


def test_a_store_that_goes_away_is_missed_by_groups_with_a_host_of_their_own_only(
    tmp_path: Any,
) -> None:
    env = {**CALMER, "GONE": str(tmp_path / "gone")}
    with Ranks(rank_without_store, 2, env) as ranks:
        for number in range(2):
            ranks.wait_for(number, "ready", 100)
        ranks.lose_store()
        (tmp_path / "gone").touch()
        outcomes = ranks.collect(100)
    for outcome, (caught, seconds) in zip(outcomes, good(outcomes), strict=True):
        assert caught.kind == "RendezvousError", caught
        assert f"rank {outcome.rank}/2" in caught.text
        assert "the store failed in the rendezvous" in caught.text
        assert seconds < PATIENT + LOADED


def rank_joins(rank: int, world: int) -> Any:
    import torch.distributed as dist

    # A client that finds no server at first would look for it until its timeout.
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False)
    note("joining")
    return catch(lambda: init(timeout=100, store=store, rank=rank, world_size=world))


def test_a_store_that_goes_away_in_the_rendezvous_is_an_error() -> None:
    with Ranks(rank_joins, 3, CALMER, ranks=[0, 2]) as ranks:
        for number in range(2):
            ranks.wait_for(number, "joining", 100)
        time.sleep(2)
        since = ranks.lose_store()
        outcomes = ranks.collect(100)
    for caught in good(outcomes):
        assert caught.kind in {"RendezvousError", "DistNetworkError"}, caught
        assert since < caught.when < since + PATIENT + LOADED, caught
