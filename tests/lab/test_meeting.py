"""Ranks of two hosts that meet at the master and can't reach one another otherwise."""

from __future__ import annotations

import sys

import pytest

from lossycoll.lab import Lab, Link, Network
from lossycoll.lab.job import MASTER_PORT
from tests.support.lab_kit import ROOT, needs_lab

pytestmark = needs_lab

JOIN = "import torch.distributed as dist; dist.init_process_group('lossy')"
FILTER = (
    f"ip rule add pref 1 ipproto tcp sport {MASTER_PORT} lookup local; "
    f"ip rule add pref 2 ipproto tcp dport {MASTER_PORT + 1}-65534 iif eth0 blackhole; "
    "ip rule add pref 10 lookup local; ip rule del pref 0"
)
"""A filter that lets only the master's port in, by the routing table."""
DOCKER = (
    "ip link add docker0 type bridge; ip address add 172.17.0.1/16 dev docker0; "
    "ip link set docker0 up"
)
ENVIRONMENT: dict[str, str | None] = {
    "LOSSYCOLL_INTERFACE": None,
    "LOSSYCOLL_LIVENESS": "3",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}


def texts(setup: str, **environment: str) -> list[str]:
    """What the ranks of a job on two hosts end with, after ``setup`` on each host."""
    with Lab(hosts=2) as lab:
        for host in range(2):
            assert lab.start(host, ["sh", "-ec", setup]).wait(30) == 0
        command = [sys.executable, "-c", JOIN]
        ended = lab.run(command, {**ENVIRONMENT, **environment}, timeout=60)
    assert all(one.code for one in ended), ended
    return [one.output.strip().splitlines()[-1] for one in ended]


def test_a_job_of_which_only_the_masters_port_is_open_names_the_others() -> None:
    for rank, text in enumerate(texts(FILTER)):
        assert text.startswith(f"lossycoll.errors.RendezvousError: rank {rank}/2: "), text
        assert (
            "rank 1 at 10.77.0.2 (eth0) can't reach rank 0's control port, TCP 10.77.0.1:" in text
        )
        assert "LOSSYCOLL_PORT_RANGE" in text
        assert "LOSSYCOLL_INTERFACE" in text
        assert "process has ended" not in text
        assert "LOSSYCOLL_LIVENESS" not in text


@pytest.mark.long
def test_two_hosts_that_give_the_address_of_docker0_are_named() -> None:
    for rank, text in enumerate(texts(DOCKER, LOSSYCOLL_INTERFACE="docker0")):
        assert text.startswith(f"lossycoll.errors.RendezvousError: rank {rank}/2: "), text
        assert "rank 0 and rank 1 are on two machines" in text
        assert "172.17.0.1 (docker0 and docker0)" in text


@pytest.mark.long
def test_hosts_that_are_far_apart_meet() -> None:
    """By satellite, say: a connection takes seconds, several times a member's first patience."""
    with Lab(Network(hosts=2, link=Link(delay_ms=250))) as lab:
        command = [sys.executable, "-c", f"{JOIN}; dist.barrier(); dist.destroy_process_group()"]
        ended = lab.run(command, {**ENVIRONMENT, "LOSSYCOLL_LIVENESS": "10"}, timeout=240)
    assert not any(one.code for one in ended), ended
