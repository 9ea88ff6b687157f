"""A host's interface drops what is sent together, or goes away."""

from __future__ import annotations

import logging
import os
import time
from typing import Any, NamedTuple

import pytest

from tests.failures.test_network import ENDS, Cable, _enter, _run, cable, rank_across
from tests.support.failure_cases import LIVENESS, QUIET, SLACK, good
from tests.support.harness import Ranks, init

__all__ = ["cable"]

ELEMENTS = 400_000
TOGETHER = "are sent together (GSO) vanish"


class Seen(NamedTuple):
    """``missing``: packets of each lossy call. ``lines``: what was logged as a warning."""

    right: bool
    missing: list[int]
    lines: list[str]


def _warnings() -> list[str]:
    """The warnings of this process from now on."""
    lines: list[str] = []
    heard = logging.Handler(logging.WARNING)
    heard.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lossycoll").addHandler(heard)
    return lines


def rank_behind_a_device(rank: int, world: int) -> Any:
    _enter(os.environ["NAMESPACE"])
    import torch
    import torch.distributed as dist

    import lossycoll

    lines = _warnings()
    init()
    t = torch.full((ELEMENTS,), float(rank + 1))
    right = True
    if os.environ.get("DELIVERY") == "reliable":
        with lossycoll.reliable():
            dist.all_reduce(t)
        right = bool((t == 3).all())
    missing: list[int] = []
    for _ in range(12):
        before = lossycoll.stats().packets_missing
        dist.all_reduce(t.fill_(1))
        right = right and bool((t == 2).all())
        missing.append(lossycoll.stats().packets_missing - before)
    dist.destroy_process_group()
    return Seen(right, missing, lines)


def _ranks(cable: Cable, case: Any, **more: str) -> Ranks:
    env = {
        "MASTER_ADDR": ENDS[0],
        "LOSSYCOLL_INTERFACE": "cable",
        "LOSSYCOLL_LIVENESS": "20",
        "LOSSYCOLL_LOG": "warning",
        **more,
    }
    homes = {rank: {"NAMESPACE": cable.names[rank]} for rank in range(2)}
    return Ranks(case, 2, env, per_rank=homes, own_store=True)


def _drop(cable: Cable, hook: str) -> None:
    """Drops UDP that is larger than the interface's packets: at its ends, nobody cuts it before."""
    where = {"input": "iifname", "output": "oifname"}[hook]
    for name in cable.names:
        chain = f"{{ type filter hook {hook} priority 0; policy accept; }}"
        cable.nft(name, f"add chain ip cut large {chain}")
        rule = f'{where} "cable" meta l4proto udp meta length > 1500 counter drop'
        cable.nft(name, f"add rule ip cut large {rule}")


def _dropped(cable: Cable) -> int:
    listed = "".join(cable.nft(name, "list chain ip cut large") for name in cable.names)
    return sum(int(part.split()[0]) for part in listed.split("counter packets ")[1:])


@pytest.mark.parametrize("hook", ["input", "output"])
@pytest.mark.parametrize("delivery", ["reliable", "lossy"])
def test_calls_work_where_what_is_sent_together_vanishes(
    cable: Cable, delivery: str, hook: str
) -> None:
    _drop(cable, hook)
    with _ranks(cable, rank_behind_a_device, DELIVERY=delivery) as ranks:
        outcomes = ranks.collect(60)
    assert _dropped(cable) > 0
    for rank, seen in enumerate(good(outcomes)):
        assert seen.right
        assert sum(seen.missing[-4:]) == 0
        (line,) = [line for line in seen.lines if TOGETHER in line]
        assert line.startswith(f"rank {rank}/2: packets to rank {1 - rank} (10.213.77.{2 - rank}:")
        assert "LOSSYCOLL_DISABLE=gso" in line


def test_nothing_is_sent_together_where_that_is_switched_off(cable: Cable) -> None:
    _drop(cable, "input")
    with _ranks(cable, rank_behind_a_device, LOSSYCOLL_DISABLE="gso") as ranks:
        outcomes = ranks.collect(60)
    assert _dropped(cable) == 0
    for seen in good(outcomes):
        assert seen.right
        assert sum(seen.missing) == 0
        assert not [line for line in seen.lines if TOGETHER in line]


# ---- the interface or its address goes away ----

GONE = {
    "address": (("addr", "del", f"{ENDS[1]}/24", "dev", "cable"), f"the address {ENDS[1]} of"),
    "interface": (("link", "set", "cable", "down"), f"cable ({ENDS[1]}) of this host is down"),
    "route": (("route", "add", "prohibit", f"{ENDS[0]}/32"), f"no route from {ENDS[1]} (cable)"),
}
"""What is done to the host of rank 1, and what its error says of that."""


@pytest.mark.parametrize("fault", GONE)
def test_a_host_that_can_no_longer_send_names_its_interface(cable: Cable, fault: str) -> None:
    command, cause = GONE[fault]
    env = {**QUIET, "MASTER_ADDR": ENDS[0], "LOSSYCOLL_INTERFACE": "cable"}
    homes = {rank: {"NAMESPACE": cable.names[rank]} for rank in range(2)}
    with Ranks(rank_across, 2, env, per_rank=homes, own_store=True) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "sum 20", 100)
        since = time.monotonic()
        _run("ip", "-n", cable.names[1], *command)
        here, there = good(ranks.collect(100))
    for rank, caught in enumerate((here, there)):
        assert caught.kind in {"PeerLostError", "AbortedError"}, caught
        assert since < caught.when < since + LIVENESS + SLACK, caught
        assert f"rank {rank}/2" in caught.text
    assert cause in there.text
    assert "LOSSYCOLL_LIVENESS if it was only busy" not in there.text
    assert cause not in here.text
    assert f"rank 1 ({ENDS[1]}:" in here.text
