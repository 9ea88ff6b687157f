"""A group is made: how often its ranks look into the store, and who hears of one that can't."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.failure_cases import CALM, catch
from tests.support.harness import init, run_good


def noted(rank: int, world: int, mtu: int) -> list[Any]:
    """The rounds of the rendezvous beyond the first, and the packets' payload, of two groups."""
    import torch
    import torch.distributed as dist

    from lossycoll.backend import bootstrap, group_steps

    rounds: list[str] = []

    class Noted(bootstrap.Rendezvous):
        def exchange(self, name: str, *rest: Any) -> list[Any]:
            rounds.append(name)
            return super().exchange(name, *rest)

    bootstrap.Rendezvous = Noted  # type: ignore[misc]
    out: list[Any] = []
    init(pg_options={"mtu": mtu if rank else 0})
    # A group of the cohort's host neither looks for interfaces nor takes descriptors.
    for name in ("choose", "check_descriptors"):
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
    import torch
    import torch.distributed as dist

    from lossycoll.backend import bootstrap

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
