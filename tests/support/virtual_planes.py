"""Virtual control planes (lossycoll.simulate.control) whose memberships tests look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lossycoll.runtime.world.membership import Membership
from lossycoll.runtime.world.messages import Defined
from lossycoll.simulate import control

from .planes import Notes


class Node(control.Node):
    """One process, with its memberships; it is what a membership wants of its plane."""

    def __init__(self, net: control.VirtualNetwork, rank: int) -> None:
        super().__init__(net, rank)
        self.groups: dict[int, tuple[Membership, Notes]] = {}

    def join(
        self,
        group: int,
        members: Sequence[int],
        *,
        outlive: bool = False,
        definition: Defined | None = None,
    ) -> Notes:
        plane: Any = self
        made = Membership(plane, group, members, outlive=outlive, definition=definition)
        notes = Notes(list(members).index(self.rank), self.net.liveness)
        made.open(notes)
        self.groups[group] = made, notes
        return notes

    def hold(self) -> bool:
        return True

    def release(self) -> None:
        pass

    def post(self, task: Callable[[], None]) -> None:
        task()

    def call(self, task: Callable[[], None]) -> None:
        task()


class VirtualNetwork(control.VirtualNetwork):
    node = Node
    nodes: list[Node]  # type: ignore[assignment]

    def run(self, seconds: float) -> None:
        for node in self.nodes:  # one that was stopped may go on
            self.wake(node)
        super().run(seconds)

    def heal(self) -> None:
        """What was under way goes on."""
        self.cuts.clear()
        for node in self.nodes:
            for pipe in list(node.members.values()):
                held, pipe.held = pipe.held, []
                for body in held:
                    pipe.send(body)


def ready(world: int, liveness: float, **rest: Any) -> VirtualNetwork:
    """A world whose ranks have met."""
    net = VirtualNetwork(world, liveness, **rest)
    net.run(1.0)
    assert all(node.protocol.ready for node in net.nodes)
    return net
