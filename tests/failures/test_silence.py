"""UDP between two ranks that live is blocked in the middle of a job, in one direction or both."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lossycoll
from tests.support.deaf_sockets import drop_data, drop_from
from tests.support.failure_cases import SLACK, Caught, catch, good
from tests.support.harness import init, run_ranks
from tests.support.sharded_cases import network, sharded
from tests.support.waiting import until

WORLD, FLOATS, CALLS = 3, 100_000, 4
FROM, TO = 1, 2
"""``silence`` of a peer in stats()."""
DEADLINE, LIVENESS = 1.0, 3.0
TIMEOUT = 50.0
ENV = {
    "LOSSYCOLL_LIVENESS": str(LIVENESS),
    "LOSSYCOLL_DEADLINE_MIN": "0.2",
    "LOSSYCOLL_DEADLINE_MAX": str(DEADLINE),
    "LOSSYCOLL_LINK": "udp",
    "LOSSYCOLL_LOG": "off",
}


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


@dataclass
class Seen:
    """At one rank."""

    filtered: int = 0
    seconds: list[float] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    silence: list[int] = field(default_factory=list)
    link_loss: list[float] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    healed: list[int] = field(default_factory=list)
    caught: Caught | None = None
    error_after: float = 0.0


def call(seen: list[int]) -> float:
    begin = time.monotonic()
    dist.all_reduce(torch.ones(FLOATS))
    report = lossycoll.last_report()
    assert report is not None
    seen.append(report.packets_missing)
    return time.monotonic() - begin


def await_figures(silent: bool) -> None:
    """The control plane's thread looks at them every eighth of liveness."""
    until(
        lambda: any(peer.silence for peer in lossycoll.stats().peers) == silent,
        "the link's state in stats()",
    )
    time.sleep(LIVENESS / 4)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def use(rank: int, world: int, deaf: Mapping[int, int]) -> Seen:
    """``deaf``: whom a rank doesn't hear."""
    init(TIMEOUT)
    kept, seen = Kept(), Seen()
    logging.getLogger("lossycoll").addHandler(kept)
    logging.getLogger("lossycoll").setLevel(logging.INFO)
    store = dist.distributed_c10d._get_default_store()
    for _ in range(3):
        call([])
    dist.barrier()
    unheard = [port_of(lossycoll.stats().peers[deaf[rank]].address)] if rank in deaf else []
    if unheard:
        seen.filtered = drop_from(unheard)
    store.set(f"deaf{rank}", "1")
    store.wait([f"deaf{one}" for one in range(world)])
    for _ in range(CALLS):
        seen.seconds.append(call(seen.missing))
    await_figures(rank in {*deaf, *deaf.values()})
    seen.silence = [peer.silence for peer in lossycoll.stats().peers]
    seen.link_loss = [peer.link_loss for peer in lossycoll.stats().peers]
    store.set(f"seen{rank}", "1")
    store.wait([f"seen{one}" for one in range(world)])
    if unheard:
        drop_from([])
    store.set(f"healed{rank}", "1")
    store.wait([f"healed{one}" for one in range(world)])
    for _ in range(3):
        call(seen.healed)
    await_figures(False)
    dist.barrier()
    if unheard:
        drop_from(unheard)
    begin = time.monotonic()
    with lossycoll.reliable():
        seen.caught = catch(lambda: [dist.all_reduce(torch.ones(FLOATS)) for _ in range(3)])
    seen.error_after = seen.caught.when - begin
    seen.lines = kept.lines
    return seen


def use_both(rank: int, world: int) -> Seen:
    return use(rank, world, {1: 2, 2: 1})


def use_one(rank: int, world: int) -> Seen:
    return use(rank, world, {2: 1})


def use_hosts(rank: int, world: int) -> Seen:
    """Ranks 1 and 3 hold the same half of what their hosts add up."""
    return use(rank, world, {3: 1})


def check_job(found: list[Seen], both: bool, pair: tuple[int, int], lacking: set[int]) -> None:
    """``lacking``: ranks that miss packets; what one lacks it can't hand on within its host."""
    one, other = pair
    for rank, seen in enumerate(found):
        assert bool(seen.filtered) == (rank == other or (both and rank == one))
        assert (sum(seen.missing) > 0) == (rank in lacking), seen.missing
        assert seen.seconds[0] < DEADLINE + SLACK
        # Each of those that follow waited for the whole deadline once.
        assert sum(seen.seconds[1:]) < (CALLS - 1) * DEADLINE, seen.seconds
        assert seen.healed[-1] == 0, seen.healed
        assert seen.error_after < 2 * LIVENESS + SLACK
    silence = [[0] * len(found) for _ in found]
    silence[one][other] = FROM if both else TO
    silence[other][one] = FROM
    assert [seen.silence for seen in found] == silence
    assert found[one].link_loss[other] == found[other].link_loss[one] == 1.0


def check_lines(found: list[Seen], rank: int, peer: int, text: str) -> None:
    lines = found[rank].lines
    warned = [line for level, line in lines if level == "WARNING" and f" rank {peer} " in line]
    assert len(warned) == 1, lines
    text = f"{text}rank {peer} (127.0.0.1:"
    who = f"rank {rank}/{len(found)}: "
    for part in (who, text, "does a firewall drop UDP", "LOSSYCOLL_PORT_RANGE"):
        assert part in warned[0], warned[0]
    assert any("again" in line for level, line in lines if level == "INFO"), lines


def test_a_link_that_is_dead_both_ways_is_said_once_and_costs_one_deadline() -> None:
    found = good(run_ranks(use_both, WORLD, ENV, 60))
    check_job(found, True, (1, 2), {1, 2})
    check_lines(found, 1, 2, "nothing comes from ")
    check_lines(found, 2, 1, "nothing comes from ")
    assert {seen.caught.kind for seen in found if seen.caught} <= {"LinkError", "AbortedError"}
    assert any(seen.caught and seen.caught.kind == "LinkError" for seen in found)


@pytest.mark.long
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_direction_that_is_dead_is_named_by_both_ends(hosts: int) -> None:
    """Of two hosts, whose ranks add up among themselves first, it is dead between two holders."""
    if hosts == 1:
        other, lacking = 2, {1, 2}
        found = good(run_ranks(use_one, WORLD, ENV, 60))
    else:
        other, lacking = 3, {0, 1, 2, 3}
        shared = {name: value for name, value in ENV.items() if name != "LOSSYCOLL_LINK"}
        names = {rank: {"LOSSYCOLL_HOST": "ab"[rank // 2]} for rank in range(4)}
        found = good(run_ranks(use_hosts, 4, shared, 60, per_rank=names))
    check_job(found, False, (1, other), lacking)
    check_lines(found, 1, other, "")
    assert any("hears nothing of this rank" in line for _, line in found[1].lines)
    check_lines(found, other, 1, "nothing comes from ")
    text = " ".join(seen.caught.text for seen in found if seen.caught)
    link = rf"the link from rank 1 \(127.0.0.1:\d+\) to rank {other} \(127.0.0.1:"
    assert re.search(link, text)
    assert f"the link from rank {other}" not in text


# ---- only control comes ----


def use_control(rank: int, world: int) -> Seen:
    """Rank 1 hears of rank 0 all but data, in calls of 14 packets."""

    def small() -> None:
        dist.all_reduce(torch.ones(5_000))

    init(TIMEOUT)
    kept, seen = Kept(), Seen()
    logging.getLogger("lossycoll").addHandler(kept)
    logging.getLogger("lossycoll").setLevel(logging.INFO)
    small()
    dist.barrier()
    if rank == 1:
        seen.filtered = drop_data()
    for _ in range(10):
        small()
    if rank == 1:
        await_figures(True)
    seen.silence = [peer.silence for peer in lossycoll.stats().peers]
    with lossycoll.reliable():
        seen.caught = catch(small)
    seen.lines = kept.lines
    return seen


def test_a_link_over_which_only_control_comes_is_said_whatever_the_size_of_calls() -> None:
    found = good(run_ranks(use_control, 2, {**ENV, "LOSSYCOLL_MTU": "1500"}, 60))
    assert found[1].filtered
    assert (found[0].silence, found[1].silence) == ([0, 0], [3, 0])
    words = "only control comes from rank 0 (127.0.0.1:"
    (warned,) = (line for level, line in found[1].lines if level == "WARNING" and words in line)
    caught = found[1].caught
    assert caught is not None
    assert (caught.kind, caught.peer) == ("LinkError", 0)
    assert "delivers no data" in caught.text
    for text in (warned, caught.text):
        assert "drop packets by what they hold" in text
        assert "LOSSYCOLL_MTU" not in text
    assert not any("WARNING" in level for level, _ in found[0].lines)


# ---- methods that need the link ----


Step = Callable[[], None]


def backward(model: nn.Module) -> None:
    model(torch.ones(4, next(model.parameters()).shape[1])).sum().backward()


def with_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        backward(model)
        optimizer.step()

    return step


def bound(model: nn.Module, group: Any) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lossycoll.DriftBound(model, optimizer, period=1000, group=group)
    return with_optimizer(model, optimizer)


def in_shares(model: nn.Module, group: Any) -> Step:
    return with_optimizer(model, sharded(model.parameters(), torch.optim.SGD, group, lr=0.1))


def dropping(model: nn.Module, group: Any) -> Step:
    drop = lossycoll.DropCompute(model, 2, threshold=60.0, group=group)

    def step() -> None:
        model.zero_grad()
        for _ in drop([1, 2]):
            backward(model)

    return step


METHODS: dict[str, Callable[[nn.Module, Any], Step]] = {
    "drift": bound,
    "sharded": in_shares,
    "dropcompute": dropping,
}


def train(rank: int, world: int) -> dict[str, Caught]:
    """Each method trains in a thread and a group of its own."""
    init(TIMEOUT)
    groups = {name: dist.new_group() for name in METHODS}
    models = {name: network() for name in METHODS}
    step = {name: METHODS[name](models[name], groups[name]) for name in METHODS}
    store = dist.distributed_c10d._get_default_store()
    ports = [port_of(peer.address) for peer in lossycoll.stats().peers]
    ended: dict[str, Caught] = {}

    def steps(name: str) -> None:
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            step[name]()

    def run(name: str) -> None:
        ended[name] = catch(lambda: steps(name))

    for name in METHODS:
        for _ in range(3):
            step[name]()
    store.set(f"warm{rank}", "1")
    store.wait([f"warm{one}" for one in range(world)])
    begin = time.monotonic()
    if rank == 1:
        assert drop_from([ports[0]])
    threads = [threading.Thread(target=run, args=(name,)) for name in METHODS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for caught in ended.values():
        caught.when -= begin
    store.set(f"end{rank}", "1")
    store.wait([f"end{one}" for one in range(world)])
    return ended


@pytest.mark.long
def test_methods_that_need_a_dead_link_end_in_bounded_time() -> None:
    found = good(run_ranks(train, 2, ENV, 60))
    for name in METHODS:
        for ended in found:
            assert ended[name].kind in ("LinkError", "AbortedError"), ended[name]
            assert ended[name].when < 2 * LIVENESS + 2 * DEADLINE + SLACK
        assert "LinkError" in [ended[name].kind for ended in found]
