"""A world in which anything happens to ranks, in the order that hypothesis finds hardest.

The network is virtual. What fails is shrunk to the fewest steps.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.support.planes import Notes
from tests.support.virtual_planes import VirtualNetwork, ready

LIVENESS = 10.0
GROUP = 7
SHORT = st.sampled_from([0.0, 0.001, 0.01, 0.1, 1.0, 3.0])
"""Seconds between what happens, from one message's time on."""
DRAWS = st.randoms(use_true_random=False)


class Worlds(RuleBasedStateMachine):
    """Ranks are killed, sleep, are cut off and leave; none for as long as its peers wait.

    Those that are left say the same of all: who was lost, who left and when, and in which views the
    job continues.
    """

    net: VirtualNetwork
    notes: list[Notes]

    @initialize(
        world=st.integers(2, 7),
        outlive=st.booleans(),
        seed=st.integers(0, 1000),
        delay=st.sampled_from([0.002, 0.01, 0.04]),
    )
    def begin(self, world: int, outlive: bool, seed: int, delay: float) -> None:
        self.outlive = outlive
        self.net = ready(world, LIVENESS, seed=seed, delay=delay)
        self.notes = [node.join(GROUP, range(world), outlive=outlive) for node in self.net.nodes]
        self.killed: set[int] = set()
        self.left: dict[int, int] = {}
        self.missed: set[int] = set()

    @property
    def here(self) -> list[int]:
        return [r for r in range(self.net.world) if r not in self.killed and r not in self.left]

    def has_several(self) -> bool:
        return len(self.here) > 1

    def has_left(self) -> bool:
        return bool(self.left)

    @precondition(has_several)
    @rule(draw=DRAWS, waits=st.lists(SHORT, min_size=1, max_size=3))
    def kill(self, draw: Random, waits: list[float]) -> None:
        """Some end, at once or while the others agree on who is left."""
        for wait in waits[: len(self.here) - 1]:
            self._end(_one(draw, self.here))
            self.net.run(wait)

    def _end(self, rank: int) -> None:
        self.killed.add(rank)
        self.net.nodes[rank].kill()

    @rule(draw=DRAWS, share=st.floats(0.0, 0.3), dies=st.booleans(), then=SHORT)
    def sleep(self, draw: Random, share: float, dies: bool, then: float) -> None:
        """One is stopped for a while; another may die when it wakes."""
        sleeper = self.net.nodes[_one(draw, self.here)]
        sleeper.stopped = True
        self.net.run(share * LIVENESS)
        sleeper.stopped = False
        self._after_silence(draw, sleeper.rank, dies, then)

    @rule(draw=DRAWS, share=st.floats(0.0, 0.2), dies=st.booleans(), then=SHORT)
    def cut(self, draw: Random, share: float, dies: bool, then: float) -> None:
        """One is cut off for a while; another may die as the network heals."""
        other = _one(draw, self.here)
        self.net.cut([other])
        self.net.run(share * LIVENESS)
        self.net.heal()
        self._after_silence(draw, other, dies, then)

    def _after_silence(self, draw: Random, rank: int, dies: bool, then: float) -> None:
        others = [one for one in self.here if one != rank]
        if dies and others:
            self._end(_one(draw, others))
            self.net.run(then)
        self.net.run(0.3 * LIVENESS)  # two silences of one rank in a row are one that is too long

    @precondition(has_several)
    @rule(draw=DRAWS, seq=st.integers(0, 100), then=SHORT)
    def leave(self, draw: Random, seq: int, then: float) -> None:
        """One has done its work and ends."""
        rank = _one(draw, self.here)
        self.left[rank] = seq
        node = self.net.nodes[rank]
        node.groups[GROUP][0].leave(seq)
        self.net.run(0.1)
        node.protocol.say_goodbye()
        self.net.run(0.1)
        node.kill()
        self.net.run(then)

    @precondition(has_left)
    @rule(draw=DRAWS, then=SHORT)
    def miss(self, draw: Random, then: float) -> None:
        """A call needs one that has left."""
        gone = _one(draw, sorted(self.left))
        if self.outlive:
            self.missed.add(gone)
            self.net.nodes[_one(draw, self.here)].groups[GROUP][0].missed(gone)
        self.net.run(then)

    def teardown(self) -> None:
        if not hasattr(self, "net"):
            return
        self.net.run(2.5 * LIVENESS)
        byes = [("bye", rank, seq) for rank, seq in self.left.items()]
        views = set()
        for rank in self.here:
            log = self.notes[rank].log
            assert all(bye in log for bye in byes), (rank, log)
            rest = [entry for entry in log if entry[0] != "bye"]
            if not self.outlive:
                assert set(rest) == {("dead", one) for one in self.killed}, (rank, log)
                continue
            assert {kind for kind, *_ in rest} <= {"lost", "views"}, (rank, log)
            lost = {entry[1] for entry in rest if entry[0] == "lost"}
            assert lost - set(self.left) == self.killed, (rank, log)
            views.add(next((tuple(one[1]) for one in reversed(rest) if one[0] == "views"), ()))
        if self.outlive:
            assert len(views) == 1, views
            self._check_views(views.pop())

    def _check_views(self, views: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
        gone = self.killed | self.missed
        assert bool(views) is bool(gone)
        if views:
            last = set(views[-1][1])
            assert set(self.here) <= last
            assert not last & gone
        for first, members in views[1:]:
            assert first >= max(self.notes[rank].next for rank in members)


def _one(draw: Random, some: list[int]) -> int:
    return draw.choice(some)


TestWorlds = Worlds.TestCase
TestWorlds.settings = settings(max_examples=80, stateful_step_count=8)


class MoreWorlds(Worlds):
    pass


TestMoreWorlds = pytest.mark.long(MoreWorlds.TestCase)
TestMoreWorlds.settings = settings(max_examples=2000, stateful_step_count=12)
