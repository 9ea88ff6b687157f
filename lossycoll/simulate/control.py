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
MOST_LIVENESS: Final = 3.0
"""Times which anything may take."""
STEP: Final = 0.02
"""Seconds of virtual time between two looks whether something has happened."""


@dataclass(frozen=True)
class Told:
    """What the others had of a death.

    median, last: Seconds until half of them knew, and until all did.
    busy: Processor seconds that it took the coordinator, or the one that took its place.
    """

    median: float
    last: float
    busy: float


@dataclass(frozen=True)
class Control:
    """What a coordinator of so many ranks does.

    ready: Seconds from the first connection until all ranks know that all are here.
    ready_busy: Processor seconds of the coordinator in that time.
    ended, silent, coordinator: Death of a process, of a host, and of the coordinator's process.
    followed: Seconds from the coordinator's death until all ranks are connected with the next one.
    messages, bytes: Of the coordinator in a second in which nothing happens, in and out.
    busy: Share of a processor that these take.
    descriptors, memory: Of the coordinator, for connections.
    """

    ranks: int
    liveness: float
    ready: float
    ready_busy: float
    ended: Told
    silent: Told
    coordinator: Told
    followed: float
    messages: float
    bytes: float
    busy: float
    descriptors: int
    memory: int


def simulate_control(
    ranks: int,
    *,
    liveness: float = 10.0,
    delay: float = 0.001,
    seed: int = 0,
    costs: Costs = COSTS,
) -> Control:
    """Start a world of ``ranks`` processes, watch it, and kill three of them.

    ``liveness``: as the option. ``delay``: longest one-way delay of a message, seconds. All ranks
    begin at once; the rendezvous before that isn't part of it. OptionError: fewer than 4 ranks, or
    more than a coordinator gets through within ``liveness``.
    """
    if ranks < 4:
        raise OptionError(f"ranks={ranks}: use at least 4, of which three die")
    net = VirtualNetwork(ranks, liveness, seed=seed, delay=delay, costs=costs)
    first, began, here = net.nodes[0], net.now, list(net.nodes)
    until(net, lambda: all(node.protocol.ready for node in reversed(here)))
    ready, ready_busy = max(node.ready_at for node in here) - began, first.busy
    net.run(liveness / 2)
    messages, moved, busy = idle(net, first, liveness)
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
        messages=messages,
        bytes=moved,
        busy=busy,
        descriptors=DESCRIPTORS + ranks - 1,
        memory=CONNECTION_BYTES * (ranks - 1),
    )


def until(net: VirtualNetwork, happened: Callable[[], bool]) -> None:
    most = MOST_LIVENESS * net.liveness
    end = net.now + most
    while not happened():
        if net.now > end:
            raise OptionError(
                f"{net.world} ranks keep the coordinator busy for more than {most:g} s, and ask "
                f"meanwhile whether it lives: use a liveness of more than {net.liveness:g} s"
            )
        net.run(STEP)


def idle(net: VirtualNetwork, node: Node, seconds: float) -> tuple[float, float, float]:
    """Messages, bytes and processor seconds of a node, in a second without news."""
    messages, moved, busy = node.messages, node.bytes, node.busy
    net.run(seconds)
    return (
        (node.messages - messages) / seconds,
        (node.bytes - moved) / seconds,
        (node.busy - busy) / seconds,
    )


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
