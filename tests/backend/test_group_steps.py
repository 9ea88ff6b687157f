"""A group is made: how often its ranks look into the store, and who hears of one that can't."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lossycoll.backend import bootstrap, builder, group_steps
from tests.support.failure_cases import CALM, QUIET, catch
from tests.support.harness import init, kill_self, run_good, run_ranks


def noted(rank: int, world: int, mtu: int) -> list[Any]:
    """The rounds of the rendezvous beyond the first, and the packets' payload, of two groups."""
    rounds: list[str] = []

    class Noted(bootstrap.Rendezvous):
        def exchange(self, name: str, *rest: Any) -> list[Any]:
            rounds.append(name)
            return super().exchange(name, *rest)

    bootstrap.Rendezvous = Noted  # type: ignore[misc]
    out: list[Any] = []
    init(pg_options={"mtu": mtu if rank else 0})
    # A group of the world's host neither looks for interfaces nor takes descriptors.
    for name in ("candidates", "check_descriptors"):
        setattr(group_steps, name, None)
    for group in (dist.group.WORLD, dist.new_group(pg_options={"mtu": mtu if rank else 0})):
        t = torch.full((50_000,), float(rank))
        dist.all_reduce(t, group=group)
        assert (t == sum(range(world))).all()
        out.append(group._group._host.link().payload_bytes)
    out.append(rounds)
    dist.destroy_process_group()
    return out


def rank_like_the_others(rank: int, world: int) -> list[Any]:
    return noted(rank, world, 0)


def rank_of_smaller_packets(rank: int, world: int) -> list[Any]:
    return noted(rank, world, 1500)


SHARING = ["sent", "shared"]
"""The rounds in which ranks of one machine find out whether they can share memory."""


@pytest.mark.parametrize(
    ("function", "link", "payload", "rounds"),
    [
        (rank_like_the_others, "udp", 8896, []),
        (rank_like_the_others, "auto", 8896, SHARING),
        (rank_of_smaller_packets, "udp", 1408, ["payload", "ends"]),
        (rank_of_smaller_packets, "auto", 1408, ["payload", "ends", *SHARING]),
    ],
)
def test_ranks_meet_once_unless_packets_must_become_smaller_or_they_share_a_machine(
    function: Any, link: str, payload: int, rounds: list[str]
) -> None:
    for found in run_good(function, 3, {**CALM, "LOSSYCOLL_LINK": link}):
        assert found == [payload, payload, rounds]


def rank_fails_after_the_meeting(rank: int, world: int) -> tuple[str, str, str]:
    """What ``new_group`` and its first call raised here, and whether the world's group goes on."""
    init()
    works = bootstrap.open_engine

    def fails(*_: object) -> Any:
        raise MemoryError("no room")

    if rank == 1:
        bootstrap.open_engine = fails
    made: list[Any] = []
    first = catch(lambda: made.append(dist.new_group()))
    bootstrap.open_engine = works
    used = catch(lambda: dist.all_reduce(torch.ones(10), group=made[0])) if made else first
    dist.barrier()
    dist.destroy_process_group()
    return first.kind, used.kind, used.text


def test_a_rank_that_fails_after_the_meeting_is_heard_by_all() -> None:
    found = run_good(rank_fails_after_the_meeting, 3, CALM)
    assert found[1][0] == "EngineError", found[1]
    for first, used, text in (found[0], found[2]):
        assert "EngineError" not in (first, used)
        assert used in ("AbortedError", "RendezvousError"), (first, used, text)
        assert "rank 1" in text
        assert "no room" in text


# ---- ranks that have met in the store, and can't reach one another ----


@contextlib.contextmanager
def control_where_nobody_listens(claims: bool, host: str) -> Iterator[None]:
    """If the rank claims so, it gives others a control address that is taken and doesn't listen."""
    with socket.socket() as closed:
        closed.bind((host, 0))
        place = closed.getsockname()
        if claims:
            works = builder.Ends.to_json
            builder.Ends.to_json = lambda self: works(self) | {"control": place}  # type: ignore
        yield


def says_another_port(rank: int, world: int) -> None:
    """Rank 0 says that it listens where nobody does: as a firewall that rejects, or a wrong
    address."""
    with control_where_nobody_listens(rank == 0, "127.0.0.1"):
        init()


def test_a_control_port_that_refuses_is_no_process_that_has_ended() -> None:
    for rank, outcome in enumerate(run_ranks(says_another_port, 3, QUIET)):
        assert outcome.error == "RendezvousError", str(outcome)
        assert f"rank {rank}/3: " in outcome.text
        assert " can't reach rank 0's control port, TCP 127.0.0.1:" in outcome.text
        assert "(lo): connection refused" in outcome.text
        assert "LOSSYCOLL_PORT_RANGE" in outcome.text
        assert "LOSSYCOLL_INTERFACE" in outcome.text
        assert "process has ended" not in outcome.text
        assert "LOSSYCOLL_LIVENESS" not in outcome.text


def says_another_address(rank: int, world: int) -> None:
    """Rank 1 gives an address at which it isn't, and connects from its own: as behind a NAT."""
    with control_where_nobody_listens(rank == 1, "127.0.0.9"):
        init()
        import torch
        import torch.distributed as dist

        while True:
            dist.all_reduce(torch.ones(10))


def test_a_rank_whose_address_is_translated_is_named() -> None:
    for outcome in run_ranks(says_another_address, 2, CALM):
        assert outcome.error == "RendezvousError", str(outcome)
        assert "can't reach rank 1's control port, TCP 127.0.0.9:" in outcome.text
        assert "from 127.0.0.1: a NAT translates its address" in outcome.text


def dies_before_it_connects(rank: int, world: int) -> None:
    if rank == 1:
        bootstrap.join = lambda *_: kill_self()  # type: ignore[assignment, return-value]
    init()


def test_a_process_that_ends_between_store_and_control_plane_is_lost() -> None:
    first, killed, third = run_ranks(dies_before_it_connects, 3, QUIET)
    assert killed.code == -9
    for outcome in (first, third):
        assert outcome.error == "PeerLostError", str(outcome)
        assert "lost rank 1 (127.0.0.1:" in outcome.text


# ---- families ----


def rank_address(rank: int, world: int) -> str:
    init()
    t = torch.full((1000,), float(rank))
    dist.all_reduce(t)
    assert (t == sum(range(world))).all()
    address = dist.group.WORLD._group.endpoint.health.where.addresses[rank]
    dist.destroy_process_group()
    return str(address)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ranks_take_the_family_that_all_have() -> None:
    of = {0: {"LOSSYCOLL_INTERFACE": "::1"}, 1: {"LOSSYCOLL_INTERFACE": "lo"}}
    assert all(found.startswith("[::1]:") for found in run_good(rank_address, 2, CALM, per_rank=of))


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ranks_without_a_common_family_say_so() -> None:
    of = {0: {"LOSSYCOLL_INTERFACE": "::1"}, 1: {"LOSSYCOLL_INTERFACE": "127.0.0.1"}}
    for rank, outcome in enumerate(run_ranks(rank_address, 2, CALM, per_rank=of)):
        assert outcome.error == "RendezvousError", str(outcome)
        assert f"rank {rank}/2: the ranks have addresses of different families" in outcome.text
        assert "rank 0 has IPv6 (::1), rank 1 IPv4 (127.0.0.1)" in outcome.text
