"""The control plane of a large world on a virtual clock: its start, deaths, heartbeats and needs.

State machines are those of a job; sockets and processors are costs per message. The network has
what TCP has: connections that keep the order, that break when a process ends, and that hold back
what was sent while they are cut; and hosts that refuse where nobody listens.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from lossycoll.errors import OptionError
from lossycoll.runtime.world.connections import (
    QUESTION_SECONDS,
    Alive,
    Broken,
    Connected,
    Event,
    Received,
    Refused,
)
from lossycoll.runtime.world.messages import unpack
from lossycoll.runtime.world.rank_states import LOST_STATES, RankStates
from lossycoll.runtime.world.world_protocol import WorldProtocol


@dataclass(frozen=True)
class Costs:
    """Processor seconds of one process: for a message in, one out, and a new connection."""

    receive: float = 0.0
    send: float = 0.0
    connect: float = 0.0


class Asked(Event):
    """It asks for a sign of life."""


class Node:
    """One process: its protocol, whether it runs, and its ends of connections
    (:class:`~lossycoll.runtime.world.connections.Connections`)."""

    def __init__(self, net: VirtualNetwork, rank: int) -> None:
        self.net = net
        self.rank = rank
        self.liveness = net.liveness
        self.killed = self.stopped = False
        self.free_at = net.now  # when its thread is done with what it has
        self.busy = 0.0  # processor seconds so far
        self.messages = self.bytes = 0  # in and out
        self.ready_at = float("inf")  # when it knew that all ranks are here
        self.inbox: list[Event] = []
        self.foreign = 0
        self.states = RankStates(0)
        self.members: dict[int, Pipe] = {}
        self._asked_at: dict[int, float] = {}  # when each rank was asked that hasn't answered
        self._coordinator: int | None = None
        self.protocol = WorldProtocol(
            rank,
            net.world,
            net.liveness,
            sockets=self,  # type: ignore[arg-type]
            clock=lambda: net.now,
            on_met_or_failed=self._met_or_failed,
        )

    def _met_or_failed(self) -> None:
        if self.protocol.ready:
            self.ready_at = min(self.ready_at, self.net.now)

    # ---- its thread ----

    @property
    def wakes_at(self) -> float:
        return max(self.net.now, self.free_at, 0.0 if self.inbox else self.protocol.due)

    def spend(self, seconds: float) -> None:
        self.free_at = max(self.net.now, self.free_at) + seconds
        self.busy += seconds

    def turn(self) -> None:
        events, self.inbox = self.inbox, []
        heard = [event for event in events if not isinstance(event, Asked)]
        for event in events:
            if isinstance(event, Received):
                self.spend(self.net.costs.receive)
            elif isinstance(event, Asked):
                self.spend(self.net.costs.connect)
                if not self.states.is_lost(event.rank):
                    heard.append(Alive(event.rank))
                    self.net.nodes[event.rank]._answered(self.rank, Alive(self.rank))
        self.protocol.step(heard)

    def hear(self, event: Event) -> None:
        self.inbox.append(event)
        self.net.wake(self)

    def _answered(self, asked: int, answer: Event) -> None:
        """The answer comes from the other's host, unless the network is cut then."""
        self._asked_at.pop(asked, None)

        def arrive() -> None:
            if not self.net.is_cut(asked, self.rank) and not self.killed:
                self.hear(answer)

        self.net.at(self.net.later(), arrive)

    def kill(self) -> None:
        """The process ends: the others' connections break, and its host refuses new ones."""
        self.killed = True
        for rank, pipe in list(self.members.items()):
            pipe.open = False
            if not self.net.is_cut(rank, self.rank):
                self.net.nodes[rank]._lose(self.rank)

    # ---- connections ----

    def follow(self, coordinator: int | None, now: float) -> None:
        if self._coordinator is not None and self._coordinator in self.members:
            self.hang_up(self._coordinator)
            self.net.nodes[self._coordinator]._lose(self.rank)
        self._coordinator = coordinator
        self.tick(now, 0.0)

    def tick(self, now: float, patience: float) -> None:
        coordinator, net = self._coordinator, self.net
        if coordinator is None or coordinator in self.members:
            return
        peer = net.nodes[coordinator]

        def connect() -> None:
            followed = self._coordinator == coordinator and coordinator not in self.members
            if net.is_cut(self.rank, coordinator) or self.killed or not followed:
                return
            if peer.killed:
                self.hear(Refused(coordinator))
            elif peer.stopped:  # its host takes the connection, but it says nothing yet
                net.at(net.later() + 0.01, connect)
            else:
                for end, other in ((self, peer), (peer, self)):
                    end.members[other.rank] = Pipe(end, other)
                    end.spend(net.costs.connect)
                    end.hear(Connected(other.rank))

        net.at(net.later(), connect)

    def ask(self, ranks: Sequence[int], patience: float, now: float) -> None:
        for rank in ranks:
            if now - self._asked_at.get(rank, 0.0) < max(patience, QUESTION_SECONDS):
                continue
            self._asked_at[rank] = now
            self.spend(self.net.costs.connect)

            def question(peer: Node = self.net.nodes[rank]) -> None:
                if self.net.is_cut(self.rank, peer.rank):
                    return
                if peer.killed:
                    self._answered(peer.rank, Refused(peer.rank))
                else:
                    peer.hear(Asked(self.rank))

            self.net.at(self.net.later(), question)

    def send(self, rank: int, body: bytes) -> bool:
        pipe = self.members.get(rank)
        if pipe is not None:
            pipe.send(body)
        return pipe is not None

    def hang_up(self, rank: int) -> None:
        if rank in self.members:
            self.members.pop(rank).open = False

    def _lose(self, rank: int) -> None:
        """The other end has closed the connection."""
        pipe = self.members.get(rank)

        def notice() -> None:
            if pipe is not None and self.members.get(rank) is pipe and not self.killed:
                self.hang_up(rank)
                self.hear(Broken(rank))

        self.net.at(self.net.later() + 0.002, notice)


class Pipe:
    """One direction of a connection: keeps the order, and holds back what is sent while cut."""

    def __init__(self, source: Node, target: Node) -> None:
        self.source, self.target = source, target
        self.held: list[bytes] = []
        self.open = True
        self._last = 0.0

    def send(self, body: bytes) -> None:
        source, net = self.source, self.source.net
        if self._holds(body):  # in order, behind what has to be sent again
            return
        source.spend(net.costs.send)
        source.messages += 1
        source.bytes += len(body)
        self._last = max(self._last, net.later() + max(0.0, source.free_at - net.now))
        net.at(self._last, lambda: self._arrive(body))

    def _arrive(self, body: bytes) -> None:
        target = self.target
        if not self._holds(body) and self.open and not target.killed:
            message: Any = unpack(body, target.net.world)
            target.messages += 1
            target.bytes += len(body)
            target.hear(Received(self.source.rank, message))

    def _holds(self, body: bytes) -> bool:
        holds = bool(self.held) or self.source.net.is_cut(self.source.rank, self.target.rank)
        if holds:
            self.held.append(body)
        return holds


class VirtualNetwork:
    """``world`` ranks of one world; ``delay`` in seconds, of each message, from ``seed``."""

    node: type[Node] = Node

    def __init__(
        self,
        world: int,
        liveness: float,
        *,
        seed: int = 0,
        delay: float = 0.002,
        costs: Costs | None = None,
    ) -> None:
        self.now = 1000.0
        self.world = world
        self.liveness = liveness
        self.costs = costs or Costs()
        self.random = random.Random(seed)
        self._delay = delay
        self._order = count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        # When each rank may have something to do; some of them are out of date.
        self._wakes: list[tuple[float, int]] = []
        self.cuts: set[tuple[int, int]] = set()
        self.nodes = [self.node(self, rank) for rank in range(world)]
        for node in self.nodes:
            node.protocol.begin()
            self.wake(node)

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), what))

    def wake(self, node: Node) -> None:
        heapq.heappush(self._wakes, (node.wakes_at, node.rank))

    def later(self) -> float:
        """When something that is sent now arrives."""
        return self.now + self._delay * self.random.uniform(0.1, 1.0)

    def is_cut(self, a: int, b: int) -> bool:
        return bool(self.cuts) and ((a, b) in self.cuts or (b, a) in self.cuts)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            following = min(
                self._queue[0][0] if self._queue else end,
                self._wakes[0][0] if self._wakes else end,
                end,
            )
            self.now = max(self.now, following)
            if following >= end:
                return
            while self._queue and self._queue[0][0] <= self.now:
                heapq.heappop(self._queue)[2]()
            awake = set()
            while self._wakes and self._wakes[0][0] <= self.now:
                awake.add(heapq.heappop(self._wakes)[1])
            for node in (self.nodes[rank] for rank in sorted(awake)):
                runs = not (node.killed or node.stopped)
                if runs and node.wakes_at <= self.now:
                    node.turn()
                    self.wake(node)
                elif runs and node.free_at > self.now:
                    self.wake(node)

    def cut(self, some: Sequence[int]) -> None:
        rest = [rank for rank in range(self.world) if rank not in some]
        self.cuts |= {(a, b) for a in some for b in rest}


# ---- a large job ----

COSTS: Final = Costs(receive=31e-6, send=31e-6, connect=350e-6)
"""As measured on one core (docs/simulate-accuracy.md)."""
DESCRIPTORS: Final = 17
"""That a coordinator has besides one for each connection."""
CONNECTION_BYTES: Final = 35_000


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
