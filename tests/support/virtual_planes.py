"""Control planes without sockets, threads or sleeps: many ranks on one virtual clock.

The network has what TCP has: connections that keep the order, that break when a process ends, and
that hold back what was sent while they are cut; and hosts that refuse where nobody listens.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from lossycoll.runtime.engine.rank_states import RankStates
from lossycoll.runtime.world.connections import (
    Alive,
    Broken,
    Connected,
    Event,
    Received,
    Refused,
)
from lossycoll.runtime.world.definition import Definition
from lossycoll.runtime.world.membership import Membership
from lossycoll.runtime.world.messages import unpack
from lossycoll.runtime.world.world_protocol import WorldProtocol

from .planes import Notes


class VirtualNetwork:
    """``world`` ranks of one world; ``delay`` in seconds, of each message, from ``seed``."""

    def __init__(self, world: int, liveness: float, *, seed: int = 0, delay: float = 0.002) -> None:
        self.now = 1000.0
        self.world = world
        self.liveness = liveness
        self.random = random.Random(seed)
        self._delay = delay
        self._order = count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self.cuts: set[tuple[int, int]] = set()
        self.nodes = [Node(self, rank) for rank in range(world)]
        for node in self.nodes:
            node.protocol.begin()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), what))

    def later(self) -> float:
        """When something that is sent now arrives."""
        return self.now + self._delay * self.random.uniform(0.1, 1.0)

    def is_cut(self, a: int, b: int) -> bool:
        return (a, b) in self.cuts or (b, a) in self.cuts

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        end = self.now + seconds
        while True:
            due = [node.wakes_at for node in self.nodes if node.is_running]
            following = min([*due, self._queue[0][0] if self._queue else end, end])
            self.now = max(self.now, following)
            if following >= end:
                return
            while self._queue and self._queue[0][0] <= self.now:
                heapq.heappop(self._queue)[2]()
            for node in self.nodes:
                if node.is_running and (node.inbox or node.wakes_at <= self.now):
                    node.turn()

    def cut(self, some: Sequence[int]) -> None:
        """Nothing passes between ``some`` and the others."""
        rest = [rank for rank in range(self.world) if rank not in some]
        self.cuts |= {(a, b) for a in some for b in rest}

    def heal(self) -> None:
        """What was under way goes on."""
        self.cuts.clear()
        for node in self.nodes:
            for pipe in list(node.sockets.members.values()):
                pipe.flush()


class Node:
    """One process: its protocol, its memberships, and whether it runs."""

    def __init__(self, net: VirtualNetwork, rank: int) -> None:
        self.net = net
        self.rank = rank
        self.liveness = net.liveness
        self.killed = self.stopped = False
        self.inbox: list[Event] = []
        self.asked_by: list[int] = []
        self.sockets = VirtualSockets(self)
        self.protocol = WorldProtocol(
            rank,
            net.world,
            net.liveness,
            sockets=self.sockets,  # type: ignore[arg-type]
            clock=lambda: net.now,
        )
        self.groups: dict[int, tuple[Membership, Notes]] = {}

    @property
    def is_running(self) -> bool:
        return not (self.killed or self.stopped)

    @property
    def wakes_at(self) -> float:
        return self.net.now if self.inbox else max(self.net.now, self.protocol.due)

    def turn(self) -> None:
        events, self.inbox = self.inbox, []
        for asker in self.asked_by:
            if not self.sockets.states.is_lost(asker):
                events.append(Alive(asker))
                self.net.nodes[asker].hear_later(self.rank, Alive(self.rank))
        self.asked_by = []
        self.protocol.step(events)

    def hear_later(self, sender: int, event: Event) -> None:
        """``event`` comes from ``sender``'s host, unless the network is cut then."""

        def arrive() -> None:
            if not self.net.is_cut(sender, self.rank) and not self.killed:
                self.inbox.append(event)

        self.net.at(self.net.later(), arrive)

    def join(
        self,
        group: int,
        members: Sequence[int],
        *,
        outlive: bool = False,
        definition: Definition | None = None,
    ) -> Notes:
        made = Membership(self, group, members, outlive=outlive, definition=definition)
        notes = Notes(list(members).index(self.rank), self.net.liveness)
        made.open(notes)
        self.groups[group] = made, notes
        return notes

    def kill(self) -> None:
        """The process ends: the others' connections break, and its host refuses new ones."""
        self.killed = True
        for rank, pipe in list(self.sockets.members.items()):
            pipe.close()
            if not self.net.is_cut(rank, self.rank):
                self.net.nodes[rank].sockets.lose(self.rank)

    # What a membership wants of its plane.

    def hold(self) -> bool:
        return True

    def release(self) -> None:
        pass

    def post(self, task: Callable[[], None]) -> None:
        task()

    def call(self, task: Callable[[], None]) -> None:
        task()


class Pipe:
    """One direction of a connection: keeps the order, and holds back what is sent while cut."""

    def __init__(self, source: Node, target: Node) -> None:
        self.source, self.target = source, target
        self._held: list[bytes] = []
        self._last = 0.0
        self._open = True

    def send(self, body: bytes) -> None:
        if self._held or self.source.net.is_cut(self.source.rank, self.target.rank):
            self._held.append(body)  # in order, behind what has to be sent again
            return
        net = self.source.net
        self._last = max(self._last, net.later())
        net.at(self._last, lambda: self._arrive(body))

    def _arrive(self, body: bytes) -> None:
        if self._held or self.source.net.is_cut(self.source.rank, self.target.rank):
            self._held.append(body)
        elif self._open and not self.target.killed:
            message: Any = unpack(body, self.source.net.world)
            self.target.inbox.append(Received(self.source.rank, message))

    def flush(self) -> None:
        held, self._held = self._held, []
        for body in held:
            self.send(body)

    def close(self) -> None:
        self._open = False


class VirtualSockets:
    """What :class:`Connections` does, between nodes of a network."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.foreign = 0
        self.states = RankStates(0)
        self.members: dict[int, Pipe] = {}
        self._coordinator: int | None = None

    def follow(self, coordinator: int | None, now: float) -> None:
        if self._coordinator is not None and self._coordinator in self.members:
            self.members.pop(self._coordinator).close()
            self._node.net.nodes[self._coordinator].sockets.lose(self._node.rank)
        self._coordinator = coordinator
        self.tick(now, 0.0)

    def tick(self, now: float, patience: float) -> None:
        coordinator, node, net = self._coordinator, self._node, self._node.net
        if coordinator is None or coordinator in self.members:
            return
        peer = net.nodes[coordinator]

        def connect() -> None:
            if (
                net.is_cut(node.rank, coordinator)
                or node.killed
                or self._coordinator != coordinator
                or coordinator in self.members
            ):
                return
            if peer.killed:
                node.inbox.append(Refused(coordinator))
                return
            if peer.stopped:  # its host takes the connection, but it says nothing yet
                net.at(net.later() + 0.01, connect)
                return
            self.members[coordinator] = Pipe(node, peer)
            peer.sockets.members[node.rank] = Pipe(peer, node)
            node.inbox.append(Connected(coordinator))
            peer.inbox.append(Connected(node.rank))

        net.at(net.later(), connect)

    def ask(self, ranks: Sequence[int], patience: float, now: float) -> None:
        node, net = self._node, self._node.net
        for rank in ranks:
            peer = net.nodes[rank]

            def question(peer: Node = peer) -> None:
                if net.is_cut(node.rank, peer.rank):
                    return
                if peer.killed:
                    node.hear_later(peer.rank, Refused(peer.rank))
                else:
                    peer.asked_by.append(node.rank)
                    peer.inbox.append(Alive(-1))  # wakes it

            net.at(net.later(), question)

    def send(self, rank: int, body: bytes) -> bool:
        pipe = self.members.get(rank)
        if pipe is None:
            return False
        pipe.send(body)
        return True

    def hang_up(self, rank: int) -> None:
        if rank in self.members:
            self.members.pop(rank).close()

    def lose(self, rank: int) -> None:
        """The other end has closed the connection."""
        net = self._node.net
        pipe = self.members.get(rank)

        def notice() -> None:
            if pipe is not None and self.members.get(rank) is pipe and not self._node.killed:
                self.members.pop(rank).close()
                self._node.inbox.append(Broken(rank))

        net.at(net.later() + 0.002, notice)


def ready(world: int, liveness: float, **rest: Any) -> VirtualNetwork:
    """A world whose ranks have met."""
    net = VirtualNetwork(world, liveness, **rest)
    net.run(1.0)
    assert all(node.protocol.ready for node in net.nodes)
    return net
