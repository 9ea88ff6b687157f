"""Links between ranks that are alive, over which nothing comes."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import lossycoll
from lossycoll.plan import copies
from lossycoll.runtime.engine.failures import Code, Where, error_of
from tests.support.failure_cases import CALM, Caught, catch, good
from tests.support.harness import init, run_ranks
from tests.support.network import Network
from tests.support.sharded_cases import network, sharded

PATIENCE = 8.0
"""Seconds: twice the job's liveness."""
TIMEOUT = 120.0
PATTERN = (
    r"the link from rank (\d) \(127.0.0.1:\d+\) to rank (\d) \(127.0.0.1:\d+\) delivers no data: "
    r"of (\d+) packets that were sent over it none has come for (\S+) s.*"
    r"repair the link"
)

# ---- data doesn't come ----


def shard(model: nn.Module, group: Any) -> Any:
    return sharded(model.parameters(), torch.optim.SGD, group, lr=0.1)


def bound(model: nn.Module, group: Any) -> Any:
    return lossycoll.DriftBound(
        model, torch.optim.SGD(model.parameters(), lr=0.1), period=2, group=group
    )


CASES: tuple[tuple[str, Callable[[nn.Module, Any], Any]], ...] = (
    ("link=0-1:1", shard),
    ("loss=1", bound),
)


def make(rank: int, world: int) -> list[tuple[Caught, float, int]]:
    """What each case's constructor said, in how many seconds, and how much was injected.

    Each has a thread and a group of its own, so that all lose their patience at once. A rank that
    has its own results by then, and owes little, hears of the link in its group's next call.
    """
    import torch.distributed as dist

    init(TIMEOUT)
    groups = [
        dist.new_group(pg_options=lossycoll.Options(inject=inject, deadline_max=1.0))
        for inject, _ in CASES
    ]
    models = [network() for _ in CASES]
    dist.barrier()
    ended: dict[int, Caught] = {}

    def run(number: int) -> None:
        def use() -> None:
            CASES[number][1](models[number], groups[number])
            dist.barrier(group=groups[number])

        ended[number] = catch(use)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(CASES))]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()  # the ranks to which it was reported must not leave before it is counted
    out = [
        (ended[number], ended[number].when - begin, lossycoll.stats(group).packets_injected)
        for number, group in enumerate(groups)
    ]
    # What loses much is no dead link.
    options = lossycoll.Options(inject="loss=0.6,burst=8", deadline_max=1.0)
    group = dist.new_group(pg_options=options)
    for make_one in (shard, bound):
        make_one(network(), group)
    assert lossycoll.stats(group).packets_injected > 0 or rank == 0
    return out


def test_a_link_that_delivers_nothing_is_named_long_before_the_timeout() -> None:
    env = {**CALM, "LOSSYCOLL_LIVENESS": str(PATIENCE / 2)}
    found = good(run_ranks(make, 3, env))
    for number, (inject, _) in enumerate(CASES):
        dead = re.search(r"link=(\d)-(\d)", inject)
        for rank, cases in enumerate(found):
            caught, seconds, _ = cases[number]
            text = caught.text
            assert caught.kind == "LinkError", caught
            named = re.search(PATTERN, text)
            assert named, text
            assert text.startswith(f"rank {rank}/3: ")
            if dead:
                assert named.group(1, 2) == dead.group(1, 2), (inject, text)
            assert int(named[3]) >= 256
            assert float(named[4]) >= PATIENCE
            assert PATIENCE <= seconds < TIMEOUT / 3
        assert sum(cases[number][2] for cases in found) >= 256


# ---- nothing comes at all ----


class Apart(Network):
    """Rank 0 is known by another port: what is sent to it gets lost, and what it sends is foreign.

    A firewall between it and the others has the same effect.
    """

    def introduce(self, ports: list[int]) -> list[tuple[str, int]]:
        self.hole = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.hole.bind(("127.0.0.1", 0))
        return [("127.0.0.1", self.hole.getsockname()[1]), *super().introduce(ports)[1:]]


def test_a_link_that_is_silent_is_an_error_of_reliable_calls() -> None:
    count = 500
    plans = [copies.all_gather(3, rank, count, 256) for rank in range(3)]
    given = [np.full(count, rank, np.uint8) for rank in range(3)]
    held = [np.zeros(3 * count, np.uint8) for _ in range(3)]
    with Apart(3, 256, deadline_min=0.2, deadline_max=1.0, liveness=0.5) as apart:
        ended = apart.run(plans, given, held, "bytes", reliable=True, timeout=TIMEOUT)
        foreign = [engine.stats().foreign for engine in apart.engines]
    apart.hole.close()
    assert foreign[0] == 0
    assert min(foreign[1:]) > 0
    for rank, end in enumerate(ended):
        assert end.code == Code.LINK, end.failure
        assert end.failure.peer in ({1, 2} if rank == 0 else {0})
        text = str(error_of(end.failure, Where(rank, 3)))
        assert f"the link from rank {end.failure.peer} to rank {rank} is silent: no packet" in text
        assert end.report.elapsed < TIMEOUT / 10


def test_a_rank_that_is_late_is_no_dead_link() -> None:
    plans = [copies.all_gather(2, rank, 500, 256) for rank in range(2)]
    given = [np.full(500, rank + 1, np.uint8) for rank in range(2)]
    held = [np.zeros(1000, np.uint8) for _ in range(2)]
    with Network(2, 256, deadline_min=0.2, deadline_max=0.5, liveness=0.5) as late:
        tickets = []
        for rank in range(2):
            buffers = (given[rank], held[rank])
            tickets.append(late.submit(rank, plans[rank], buffers, "bytes", reliable=True))
            time.sleep(3.0 * (rank == 0))
        for rank in range(2):
            assert late.end(rank, tickets[rank]).code == Code.OK
            assert (held[rank] == np.repeat([1, 2], 500)).all()
