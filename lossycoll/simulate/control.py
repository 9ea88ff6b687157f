"""The control plane of a large world on a virtual clock: its start, deaths, heartbeats and needs.

State machines are those of a job (:mod:`.planes`); sockets and processors are costs per message.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lossycoll.errors import OptionError
from lossycoll.runtime.world.rank_states import LOST_STATES

from .planes import Costs, Node, VirtualNetwork

COSTS: Final = Costs(receive=31e-6, send=31e-6, connect=350e-6)
"""As measured on one core (docs/simulate-accuracy.md)."""
DESCRIPTORS: Final = 17
"""That a coordinator has besides one for each connection."""
CONNECTION_BYTES: Final = 35_000
"""Memory of a connection."""


@dataclass(frozen=True)
class Told:
    """What the others had of a death."""

    median: float  # seconds until half of them knew
    last: float  # until all did
    busy: float  # processor seconds of the coordinator, or of the one that took its place


@dataclass(frozen=True)
class Control:
    """What a coordinator of so many ranks does."""

    ranks: int
    liveness: float
    ready: float  # seconds from the first connection until all ranks know that all are here
    ready_busy: float  # its processor seconds in that time
    ended: Told  # death of a process
    silent: Told  # of a host
    coordinator: Told  # of the coordinator's process
    followed: float  # seconds from that death until all ranks are connected with the next one
    messages: float  # in and out, in a second in which nothing happens
    bytes: float  # of these
    busy: float  # share of a processor that these take
    descriptors: int  # for connections
    memory: int  # bytes, for connections


def simulate_control(
    ranks: int,
    *,
    liveness: float = 10.0,
    delay: float = 0.001,
    seed: int = 0,
    costs: Costs = COSTS,
) -> Control:
    """Start a world of ``ranks`` processes, watch it, and kill three of them.

    ``delay``: longest one-way delay of a message, seconds. All ranks begin at once; the rendezvous
    before that isn't part of it. OptionError: fewer than 4 ranks, or more than a coordinator gets
    through within ``liveness``.
    """
    if ranks < 4:
        raise OptionError(f"ranks={ranks}: use at least 4, of which three die")
    net = VirtualNetwork(ranks, liveness, seed=seed, delay=delay, costs=costs)
    first, began, here = net.nodes[0], net.now, list(net.nodes)
    until(net, lambda: all(node.protocol.ready for node in reversed(here)))
    ready, ready_busy = max(node.ready_at for node in here) - began, first.busy
    net.run(liveness / 2)
    before = first.messages, first.bytes, first.busy
    net.run(liveness)
    after = first.messages, first.bytes, first.busy
    each = [(now - then) / liveness for now, then in zip(after, before, strict=True)]
    last = here.pop()
    ended = death(net, here, last.rank, last.kill)
    net.run(liveness / 4)
    last = here.pop()
    silent = death(net, here, last.rank, lambda: net.cut([last.rank]))
    net.run(liveness / 4)
    here.pop(0)
    died = net.now
    coordinator = death(net, here, 0, first.kill)
    until(net, lambda: not any(node.protocol.seeks_coordinator for node in reversed(here)))
    return Control(
        ranks=ranks,
        liveness=liveness,
        ready=ready,
        ready_busy=ready_busy,
        ended=ended,
        silent=silent,
        coordinator=coordinator,
        followed=net.now - died,
        messages=each[0],
        bytes=each[1],
        busy=each[2],
        descriptors=DESCRIPTORS + ranks - 1,
        memory=CONNECTION_BYTES * (ranks - 1),
    )


def until(net: VirtualNetwork, happened: Callable[[], bool]) -> None:
    most = 3 * net.liveness
    end = net.now + most
    while not happened():
        if net.now > end:
            raise OptionError(
                f"{net.world} ranks keep the coordinator busy for more than {most:g} s, and ask "
                f"meanwhile whether it lives: use a liveness of more than {net.liveness:g} s"
            )
        net.run(0.02)


def death(net: VirtualNetwork, left: Sequence[Node], rank: int, kill: Callable[[], None]) -> Told:
    """When each of those that are left knows of a rank's death."""
    told: dict[int, float] = {}

    def noted_by(node: Node) -> Callable[[int, int, float], None]:
        def note(of: int, state: int, heard: float) -> None:
            if of == rank and state in LOST_STATES:
                told.setdefault(node.rank, net.now)

        return note

    for node in left:
        node.protocol.note = noted_by(node)
    began, busy = net.now, left[0].busy
    kill()
    until(net, lambda: len(told) == len(left))
    seconds = [at - began for at in told.values()]
    return Told(statistics.median(seconds), max(seconds), left[0].busy - busy)
