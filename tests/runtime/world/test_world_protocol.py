"""The protocol of a world on a virtual clock: deaths, silences, cuts and sleeps, in any order.

No sockets, threads or sleeps: thousands of seconds pass in one.
"""

from __future__ import annotations

import pytest

from lossycoll.runtime.world import messages
from lossycoll.runtime.world.messages import Dead, State, View, ViewChange, pack
from tests.support.planes import Notes
from tests.support.virtual_planes import VirtualNetwork, ready

LIVENESS = 10.0
GROUP = 7


def group_of_all(net: VirtualNetwork, *, outlive: bool = False) -> list[Notes]:
    return [node.join(GROUP, range(net.world), outlive=outlive) for node in net.nodes]


def views(note: Notes) -> list[tuple[int, tuple[int, ...]]]:
    """The latest that were reported."""
    reported = [entry for entry in note.log if entry[0] == "views"]
    return reported[-1][1] if reported else []


@pytest.mark.parametrize("victim", [0, 1])
def test_silence_is_death_within_the_liveness_and_not_long_before(victim: int) -> None:
    net = ready(3, LIVENESS)
    notes = group_of_all(net)
    net.run(100 * LIVENESS)
    assert not any(note.log for note in notes), "nobody was silent"
    net.nodes[victim].stopped = True
    net.run(0.5 * LIVENESS)
    assert not any(note.log for note in notes), "half of the liveness is no death"
    net.run(0.5 * LIVENESS)
    for node in net.nodes:
        if node.rank != victim:
            assert notes[node.rank].log == [("dead", victim)]
    net.nodes[victim].stopped = False
    net.run(LIVENESS)
    assert notes[victim].log[0][0] == "dead"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_whose_engine_answers_is_no_death_and_one_whose_engine_stops_is(victim: int) -> None:
    net = ready(3, LIVENESS)
    notes = group_of_all(net)
    asked, over = 0, False
    heard = net.now

    def pulse(rank: int) -> float:
        """Of the question before, as the engine's."""
        nonlocal asked, heard
        assert rank == victim, "the others are not late"
        asked += 1
        before, heard = heard, heard if over else net.now
        return before

    for node in net.nodes:
        node.protocol.pulse = pulse
    net.nodes[victim].stopped = True
    net.run(20 * LIVENESS)
    assert not any(note.log for note in notes), "it holds its GIL"
    assert asked > 20
    over = True
    net.run(LIVENESS)
    for node in net.nodes:
        if node.rank != victim:
            assert notes[node.rank].log == [("dead", victim)]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_noticed_at_once(victim: int) -> None:
    net = ready(4, LIVENESS)
    notes = group_of_all(net)
    net.nodes[victim].kill()
    net.run(0.1)
    assert [note.log for note in notes] == [
        [] if rank == victim else [("dead", victim)] for rank in range(4)
    ]


def test_ranks_that_slept_themselves_accuse_nobody() -> None:
    net = ready(3, LIVENESS)
    notes = group_of_all(net)
    net.now += 2 * LIVENESS  # the whole machine was suspended, say
    net.run(2 * LIVENESS)
    assert not any(note.log for note in notes)


@pytest.mark.parametrize("sleeper", [0, 1])
def test_a_rank_that_was_stopped_itself_accuses_nobody(sleeper: int) -> None:
    net = ready(2, LIVENESS)
    notes = group_of_all(net)
    net.nodes[sleeper].stopped = True
    net.run(0.6 * LIVENESS)
    net.nodes[sleeper].stopped = False
    net.run(2 * LIVENESS)
    assert not any(note.log for note in notes)


@pytest.mark.parametrize("some", [(0,), (2,), (0, 1)])
def test_a_cut_of_half_the_liveness_does_no_harm_and_what_was_said_arrives(
    some: tuple[int, ...],
) -> None:
    net = ready(4, LIVENESS)
    notes = group_of_all(net)
    net.cut(some)
    net.nodes[some[0]].groups[GROUP][0].leave(5)
    net.run(0.5 * LIVENESS)
    net.heal()
    net.run(2 * LIVENESS)
    for note in notes:
        assert note.log == ([] if note.rank == some[0] else [("bye", some[0], 5)])


def test_a_connection_on_which_nothing_comes_after_a_cut_is_replaced() -> None:
    """TCP may wait for long before it tries an old connection again."""
    net = ready(3, LIVENESS)
    notes = group_of_all(net)
    net.cut([2])
    net.nodes[2].groups[GROUP][0].abort("out of memory", "EngineError")
    net.run(0.4 * LIVENESS)
    net.cuts.clear()  # but what the old connections hold back stays there
    net.run(0.3 * LIVENESS)
    assert notes[0].log == notes[1].log == [("abort", 2, "out of memory", "EngineError")]


@pytest.mark.parametrize("some", [(0,), (1, 2, 3), (3,)])
def test_the_smaller_part_of_a_broken_network_ends(some: tuple[int, ...]) -> None:
    net = ready(4, LIVENESS)
    notes = group_of_all(net, outlive=True)
    net.cut(some)
    net.run(3 * LIVENESS)
    rest = tuple(rank for rank in range(4) if rank not in some)
    small, large = sorted((some, rest), key=len)
    for rank in small:
        kind, lost, _ = notes[rank].log[-1]
        assert kind == "no quorum"
        assert set(lost) <= set(large)
        assert not views(notes[rank])
    for rank in large:
        assert views(notes[rank])[-1][1] == large


def test_a_half_with_the_lowest_rank_goes_on() -> None:
    net = ready(4, LIVENESS)
    notes = group_of_all(net, outlive=True)
    net.cut((0, 3))
    net.run(3 * LIVENESS)
    assert views(notes[0])[-1][1] == views(notes[3])[-1][1] == (0, 3)
    assert notes[1].log[-1][0] == notes[2].log[-1][0] == "no quorum"


def test_who_slept_while_the_others_went_on_and_ended_does_not_go_on_alone() -> None:
    net = ready(3, LIVENESS)
    notes = group_of_all(net, outlive=True)
    net.nodes[0].stopped = True
    net.run(1.5 * LIVENESS)
    assert views(notes[1]) == views(notes[2]) == [(0, (0, 1, 2)), (12, (1, 2))]
    net.nodes[1].kill()
    net.nodes[2].kill()
    net.run(0.1)
    net.nodes[0].stopped = False
    net.run(3 * LIVENESS)
    assert any(reported[0] in ("no quorum", "dead") for reported in notes[0].log)
    assert not views(notes[0])


def test_who_slept_for_long_but_was_waited_for_may_go_on_alone() -> None:
    net = ready(2, LIVENESS)
    notes = group_of_all(net, outlive=True)
    # Such a sleep and a heartbeat's interval may be more than others wait for; this one does wait.
    net.nodes[1].protocol._detector.silence = 60.0
    net.nodes[0].stopped = True
    net.run(0.65 * LIVENESS)
    net.nodes[0].stopped = False
    net.run(0.001)
    assert net.nodes[0].protocol.in_doubt
    net.run(LIVENESS)
    assert not net.nodes[0].protocol.in_doubt
    net.nodes[1].kill()
    net.run(0.1)
    assert views(notes[0])[-1] == (10, (0,))


def test_what_a_coordinator_reported_only_to_some_before_it_died_is_so() -> None:
    net = ready(4, LIVENESS)
    notes = group_of_all(net, outlive=True)
    net.nodes[0].send(2, pack(Dead(3, LIVENESS, False)))
    net.nodes[0].protocol.groups.close(
        net.nodes[0].groups[GROUP][0]
    )  # it agrees on nothing any more
    net.run(0.1)
    assert notes[2].log[0] == ("lost", 3)
    net.nodes[0].kill()
    net.run(0.5)
    for rank in (1, 2):
        assert views(notes[rank])[-1] == (12, (1, 2))
    assert notes[3].log[-1] == ("dead", 3)


def test_a_coordinator_that_leaves_while_the_others_agree_is_not_waited_for() -> None:
    net = ready(4, LIVENESS)
    notes = group_of_all(net, outlive=True)
    coordinator = net.nodes[0]
    decided = coordinator.groups[GROUP][0]._states
    assert decided is not None
    decided.decide = lambda: None  # type: ignore[method-assign]  # it leaves before it can
    net.nodes[3].kill()
    net.run(0.1)
    assert all(note.log == [("lost", 3)] for note in notes[:3])
    coordinator.groups[GROUP][0].leave(7)
    coordinator.protocol.say_goodbye()
    net.run(0.1)
    coordinator.kill()
    net.run(0.5)
    assert views(notes[1])[-1] == views(notes[2])[-1] == (12, (1, 2))


def test_a_rank_that_left_is_gone_without_when_it_is_missed() -> None:
    for leaver in (0, 2):
        net = ready(4, LIVENESS)
        notes = group_of_all(net, outlive=True)
        net.nodes[leaver].groups[GROUP][0].leave(7)
        net.run(0.1)
        net.nodes[leaver].protocol.say_goodbye()
        net.run(0.1)
        net.nodes[leaver].kill()
        net.run(2 * LIVENESS)
        left = [rank for rank in range(4) if rank != leaver]
        assert all(notes[rank].log == [("bye", leaver, 7)] for rank in left)
        net.nodes[left[-1]].groups[GROUP][0].missed(leaver)  # not all need to miss it
        net.run(0.5)
        for rank in left:
            assert views(notes[rank])[-1][1] == tuple(left)


def test_views_that_cannot_be_and_losses_of_nobody_are_dropped() -> None:
    net = ready(3, LIVENESS)
    notes = group_of_all(net, outlive=True)
    everyone = [0, [0, 1, 2]]
    absurd = [
        ["viewchange", [everyone, [-1, [0, 1]]]],
        ["viewchange", [everyone, [3, [0, 7]]]],
        ["viewchange", [everyone, [5, [0, 1]], [4, [0]]]],
        ["viewchange", [everyone, [5, [0, 1]], [6, [0, 1]]]],
        ["viewchange", [[3, [0, 1, 2]], [4, [0, 1]]]],
        ["viewchange", []],
        ["state", [5], [], 1, [everyone]],
        ["state", [], [], 1.5, [everyone]],
        ["missed", 3],
    ]
    for body in absurd:
        net.nodes[0].send(1, pack_addressed(body))
    net.run(0.1)
    assert net.nodes[1].protocol.foreign == len(absurd)
    assert not any(note.log for note in notes)
    net.nodes[2].kill()
    net.run(0.5)
    assert views(notes[0]) == views(notes[1]) == [(0, (0, 1, 2)), (11, (0, 1))]


def pack_addressed(body: list[object]) -> bytes:
    from lossycoll.runtime.world.messages import Addressed

    return pack(Addressed(0, 2, GROUP, body))


def test_a_view_without_this_rank_ends_it() -> None:
    net = ready(3, LIVENESS)
    notes = group_of_all(net, outlive=True)
    views_without = (View(0, (0, 1, 2)), View(5, (0, 1)))
    net.nodes[0].protocol.send(GROUP, ViewChange(views_without), [2])
    net.run(0.1)
    assert notes[2].log == [("dead", 2)]


def test_a_state_tells_of_losses_that_its_receiver_missed() -> None:
    net = ready(3, LIVENESS)
    notes = group_of_all(net, outlive=True)
    state = State((2,), (2,), 40, (View(0, (0, 1, 2)),))
    net.nodes[1].protocol.send(GROUP, state, [0])
    assert messages.GROUP.plain(state)[1] == [2]
    net.run(0.5)
    assert notes[0].log[0] == notes[1].log[0] == ("lost", 2)
    assert views(notes[0]) == views(notes[1])
