"""A barrier whose error names the ranks that are missing: each reports to rank 0, by messages.

It isn't a row of the table of collectives, and doesn't go through ``Dispatcher.run``: there is no
work, and the ranks' timeouts may differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import torch

from lossycoll.errors import LossyError, OperationTimeout
from lossycoll.runtime.core.call import LONGEST, Collective
from lossycoll.runtime.p2p.messages import Messages, Transfer

from .description import CollectiveKind, Description, Loss
from .dispatch import Dispatcher
from .point_to_point import MOST_TAG
from .staging import two_buffers

KIND: Final = CollectiveKind("monitored_barrier", Loss.NEVER, two_buffers)
SLICE_SECONDS: Final = 0.2
"""Period at which a wait looks after the group."""
GRACE_SECONDS: Final = 2.0
"""Time by which other ranks wait longer than rank 0, whose error says who is missing."""


def monitored_barrier(
    dispatcher: Dispatcher, messages: Messages | None, timeout: timedelta, wait_all_ranks: bool
) -> None:
    """Waits for all ranks.

    ``messages``: the group's; None in a group of one rank.
    """
    call, health = dispatcher.named(Description(KIND, [], [])), dispatcher.health
    dispatcher.issue(call)
    try:
        if health.where.rank == 0:
            _gather(dispatcher, call, messages, timeout, wait_all_ranks)
        elif messages is not None:
            _report(dispatcher, call, messages, timeout)
    except LossyError as error:
        dispatcher.fail(call, error)
        raise (health.failure or error).again(call.numbered) from None
    except BaseException as error:
        dispatcher.fail_halfway(call, error)
        raise


def _gather(
    dispatcher: Dispatcher,
    call: Collective,
    messages: Messages | None,
    timeout: timedelta,
    wait_all_ranks: bool,
) -> None:
    """Rank 0: hears from each rank, and then answers all."""
    where, milliseconds = dispatcher.where, round(timeout.total_seconds() * 1e3)
    if not timeout:
        text = (
            f"{where}: {call.numbered}: Rank 0 timed out in monitoredBarrier after 0 ms; "
            f"give it a longer timeout"
        )
        raise OperationTimeout(text, peer=where.rank)
    if messages is None:
        return
    post, came = _poster(messages, call), _waiter(dispatcher, call, timeout.total_seconds())
    reports = {peer: post(messages.receive, peer) for peer in range(1, where.world)}
    missing = []
    for peer, report in reports.items():
        if not came(report):
            missing.append(peer)
            if not wait_all_ranks:
                break
    if missing:
        names = ", ".join(where.peer(rank) for rank in missing)
        ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        text = (
            f"{where}: {call.numbered}: {names} didn't take part within "
            f"{timeout.total_seconds():g} s; stuck, or still computing? "
            f"({ranks} failed to pass monitoredBarrier in {milliseconds} ms)"
        )
        raise OperationTimeout(text, peer=missing[0])
    for peer in reports:
        post(messages.send, peer)


def _report(
    dispatcher: Dispatcher, call: Collective, messages: Messages, timeout: timedelta
) -> None:
    """Another rank: reports to rank 0, and waits for its answer."""
    where, post = dispatcher.where, _poster(messages, call)
    post(messages.send, 0)
    if not _waiter(dispatcher, call, timeout.total_seconds() + GRACE_SECONDS)(
        post(messages.receive, 0)
    ):
        text = (
            f"{where}: {call.numbered}: {where.peer(0)} didn't take part within "
            f"{timeout.total_seconds():g} s, or waits for another rank (Rank {where.rank} "
            f"successfully reached monitoredBarrier; rank 0's error names who is missing)"
        )
        raise OperationTimeout(text, peer=0)


def _poster(
    messages: Messages, call: Collective
) -> Callable[[Callable[..., Transfer], int], Transfer]:
    """Posts a message of one byte by ``send`` or ``receive``, which no call of a user's can meet:
    their tags are smaller."""
    named = Collective(call.name, torch.uint8, 1)
    named.seq = call.seq
    token = torch.zeros(1, dtype=torch.uint8)

    def post(by: Callable[..., Transfer], peer: int) -> Transfer:
        room, tag = token.clone(), MOST_TAG + 1 + call.seq
        # The wait has a limit of its own.
        limit = LONGEST.total_seconds()
        return by(named, room.data_ptr(), 1, peer, tag, keep=room, timeout=limit)

    return post


def _waiter(dispatcher: Dispatcher, call: Collective, seconds: float) -> Callable[[Transfer], bool]:
    """Tells whether a message came, until ``seconds`` from now; raises its error."""
    begin = time.monotonic()
    long_wait = dispatcher.health.long_wait(call, begin)

    def came(transfer: Transfer) -> bool:
        now = time.monotonic()
        while not transfer.poll(min(SLICE_SECONDS, max(0.0, begin + seconds - now))):
            now = time.monotonic()
            if now >= begin + seconds:
                return False
            dispatcher.health.admit(call)
            long_wait.ask_if_due(now)
        if transfer.error is not None:
            raise transfer.error
        return True

    return came
