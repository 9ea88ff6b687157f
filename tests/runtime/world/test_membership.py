"""Many groups on one world: who hears what, whatever their members, lifetimes and order."""

from __future__ import annotations

import pytest

from lossycoll.runtime.world.membership import Membership
from lossycoll.runtime.world.messages import Defined
from lossycoll.runtime.world.rank_states import RankState
from tests.support.planes import LIVENESS, Notes, planes
from tests.support.virtual_planes import VirtualNetwork, ready
from tests.support.waiting import until


def join(
    net: VirtualNetwork, group: int, members: list[int], *, outlive: bool = False
) -> dict[int, Notes]:
    """A group of some ranks of the world, in their order; the notes by rank of the world."""
    return {rank: net.nodes[rank].join(group, members, outlive=outlive) for rank in members}


def define(
    net: VirtualNetwork, number: int, members: list[int], speakers: list[int], **options: object
) -> dict[int, Notes]:
    """A group as some of its members define it; the notes by rank of the world."""
    return {
        rank: net.nodes[rank].join(
            number,
            members,
            definition=Defined(members.index(rank), tuple(10 * one for one in members), options),
        )
        for rank in speakers
    }


def group(net: VirtualNetwork, rank: int, number: int) -> Membership:
    return net.nodes[rank].groups[number][0]


def test_what_is_said_in_a_group_is_heard_by_its_members_alone_and_by_their_ranks_in_it() -> None:
    net = ready(6, 10.0)
    odd, even = join(net, 1, [5, 3, 1]), join(net, 2, [0, 2, 4])
    group(net, 3, 1).abort("out of memory", "EngineError")
    group(net, 4, 2).leave(9)
    net.run(0.1)
    assert odd[5].log == odd[1].log == [("abort", 1, "out of memory", "EngineError")]
    assert even[0].log == even[2].log == [("bye", 2, 9)]
    assert odd[3].log == even[4].log == []
    assert all(node.protocol.foreign == 0 for node in net.nodes)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_is_heard_by_every_group_that_has_the_dead_and_by_no_other(victim: int) -> None:
    net = ready(5, 10.0)
    groups = {
        1: join(net, 1, [0, 1, 2, 3, 4]),
        2: join(net, 2, [2, 0]),
        3: join(net, 3, [4, 2, 1], outlive=True),
        4: join(net, 4, [3, 1]),
    }
    net.nodes[victim].kill()
    net.run(0.3)
    for rank in range(5):
        if rank != victim:
            assert groups[1][rank].log == [("dead", victim)]
    assert groups[2][2 - victim].log == [("dead", 0 if victim == 2 else 1)]
    assert groups[4][3].log == groups[4][1].log == []
    if victim == 2:
        # World ranks 4 and 1 are ranks 0 and 2 of the group, and go on as those.
        for rank in (4, 1):
            assert groups[3][rank].log[0] == ("lost", 1)
            assert groups[3][rank].log[-1] == ("views", [(0, (0, 1, 2)), (12, (0, 2))], True)
    else:
        assert not any(note.log for note in groups[3].values())
    # What the coordinator's end took along doesn't matter to the groups that live on.
    group(net, 1, 4).abort("late", "EngineError")
    net.run(0.3)
    assert groups[4][3].log == [("abort", 1, "late", "EngineError")]


def test_groups_agree_apart_from_one_another_also_where_the_coordinator_is_in_none() -> None:
    net = ready(7, 10.0)
    first, second = join(net, 1, [1, 2, 3, 4], outlive=True), join(net, 2, [6, 4, 2], outlive=True)
    third = join(net, 3, [5, 6], outlive=True)
    net.nodes[4].kill()
    net.run(0.3)
    for rank, place in ((1, 0), (2, 1), (3, 2)):
        assert first[rank].log[-1] == ("views", [(0, (0, 1, 2, 3)), (12, (0, 1, 2))], True), place
    for rank in (6, 2):
        assert second[rank].log[-1] == ("views", [(0, (0, 1, 2)), (12, (0, 2))], True)
    assert not any(note.log for note in third.values())


def test_what_comes_before_the_group_is_open_here_is_heard_when_it_is() -> None:
    net = ready(4, 10.0)
    members = [0, 1, 2, 3]
    for rank in (0, 1):
        net.nodes[rank].join(1, members)
    group(net, 1, 1).leave(3)
    net.run(0.1)
    net.nodes[1].protocol.say_goodbye()
    net.run(0.1)
    net.nodes[1].kill()
    net.nodes[0].kill()
    net.run(0.3)
    late = [net.nodes[rank].join(1, members) for rank in (2, 3)]
    net.run(0.1)
    for note in late:
        assert sorted(note.log) == [("bye", 1, 3), ("dead", 0)]


def test_a_group_that_is_over_here_hears_nothing_more() -> None:
    net = ready(3, 10.0)
    notes = join(net, 1, [0, 1, 2])
    group(net, 1, 1).close()
    group(net, 2, 1).abort("late", "EngineError")
    net.run(0.1)
    assert notes[0].log == [("abort", 2, "late", "EngineError")]
    assert notes[1].log == []
    assert net.nodes[1].protocol.foreign == 0


def test_ranks_that_define_a_group_differently_hear_how_once_one_waits() -> None:
    net = ready(4, 10.0)
    notes = define(net, 1, [0, 1, 2], [0, 2], repair=0, wire="same")
    notes |= define(net, 1, [0, 1, 2], [1], repair=2, wire="same")
    group(net, 0, 1).waiting(0, "barrier")
    net.run(0.1)
    text = "option repair is 2 on rank 1 but 0 on rank 0; set LOSSYCOLL_REPAIR or pg_options alike"
    for rank in (0, 1):
        ((kind, how),) = notes[rank].log
        assert kind == "differs"
        assert text in how
    assert notes[2].log == [], "it agrees with whoever asked"


def test_ranks_that_list_other_members_hear_it_though_one_is_no_member_of_the_others_group() -> (
    None
):
    net = ready(4, 10.0)
    notes = define(net, 1, [0, 2], [0]) | define(net, 1, [1, 2], [1, 2])
    group(net, 1, 1).waiting(0, "barrier")
    net.run(0.1)
    assert not any(note.log for note in notes.values())
    group(net, 0, 1).waiting(0, "barrier")
    net.run(0.1)
    for rank in (0, 2):
        ((kind, how),) = notes[rank].log
        assert kind == "differs"
        assert "of ranks 10, 20 on rank 20 but of ranks 0, 20 on rank 0" in how
    assert notes[1].log == []
    assert all(node.protocol.foreign == 0 for node in net.nodes)
    group(net, 0, 1).leave(-1)
    net.run(0.1)
    assert net.nodes[2].protocol.foreign == 1, (
        "what else a stranger says is no message of the group"
    )


def test_a_definition_that_can_not_be_is_malformed() -> None:
    net = ready(2, 10.0)
    notes = define(net, 1, [0, 1], [0, 1])
    for rank in (-1, 2, 7):
        net.nodes[0].protocol.send(1, Defined(rank, (0, 10), {"repair": 1}), [1])
    net.run(0.1)
    assert notes[1].log == []
    assert net.nodes[1].protocol.foreign == 3


def test_a_rank_that_was_given_up_hears_it_in_groups_that_it_opens_later() -> None:
    net = ready(3, 10.0)
    net.nodes[1].states.move(1, RankState.LOST)
    late = net.nodes[1].join(1, [0, 1, 2])
    assert late.log == [("dead", 1)]


def test_a_rank_that_left_one_group_is_watched_for_the_others() -> None:
    net = ready(3, 10.0)
    first, second = join(net, 1, [0, 1, 2]), join(net, 2, [0, 1, 2])
    group(net, 2, 1).leave(4)
    net.run(0.1)
    group(net, 2, 1).close()
    net.nodes[2].kill()
    net.run(0.1)
    for rank in (0, 1):
        assert first[rank].log == [("bye", 2, 4)], "it had left, and is no loss"
        assert second[rank].log == [("dead", 2)]


def test_ranks_that_leave_one_after_another_are_nowhere_dead() -> None:
    net = ready(5, LIVENESS)
    notes = [node.join(7, range(5)) for node in net.nodes]
    for rank in range(4):
        net.nodes[rank].groups[7][0].leave(rank)
        net.run(0.1)
        net.nodes[rank].protocol.say_goodbye()
        net.run(0.1)
        net.nodes[rank].kill()
    net.run(2 * LIVENESS)
    for number, note in enumerate(notes):
        assert note.log == [("bye", rank, rank) for rank in range(number)]


def test_who_does_not_belong_to_a_group_is_not_believed_in_it() -> None:
    net = ready(3, 10.0)
    notes = join(net, 1, [0, 1])
    net.nodes[2].join(1, [2, 1])  # it means another group by that number
    group(net, 2, 1).abort("not yours", "EngineError")
    net.run(0.1)
    assert not notes[1].log
    assert net.nodes[1].protocol.foreign == 1


def test_two_hundred_groups_cost_no_message_and_each_hears_of_a_death() -> None:
    net = ready(4, 10.0)
    sent = 0
    for node in net.nodes:
        send = node.send

        def counted(rank: int, body: bytes, send: object = send) -> bool:
            nonlocal sent
            sent += b"addressed" in body
            return send(rank, body)  # type: ignore[operator,no-any-return]

        node.send = counted  # type: ignore[method-assign]
    groups = [join(net, number, [0, 1, 2, 3]) for number in range(200)]
    net.run(20.0)
    assert sent == 0
    net.nodes[3].kill()
    net.run(0.1)
    assert all(notes[rank].log == [("dead", 3)] for notes in groups for rank in (0, 1, 2))


# ---- over real sockets ----


def test_the_plane_outlives_any_one_group_on_every_rank() -> None:
    """The group of all ends, on one rank before the other, while smaller groups live on."""
    with planes(3, LIVENESS) as s:
        pair, other = s.join(1, [1, 2]), s.join(2, [0, 2])
        s.leave(0, 5)
        s.leave(2, 5)
        until(lambda: {*s.notes[1].log} == {("bye", 0, 5), ("bye", 2, 5)})
        s.leave(1, 5)
        assert all(plane.is_sound for plane in s.planes)
        pair[1][0].abort("here", "EngineError")
        other[0][0].leave(7)
        until(lambda: pair[2][1].log == [("abort", 0, "here", "EngineError")])
        until(lambda: other[2][1].log == [("bye", 0, 7)])
        other[0][0].close()
        assert not s.planes[0].is_sound, "it has left with its last group"
        until(lambda: not s.planes[2].is_here(0))
        more = s.join(3, [2, 1])  # the coordinator has gone, and the rest go on
        s.die(1)
        until(lambda: more[2][1].log == [("dead", 1)])


def test_groups_opened_and_closed_in_another_order_on_each_rank() -> None:
    with planes(3) as s:
        numbers = list(range(100, 140))
        made: list[dict[int, tuple[Membership, Notes]]] = []
        for rank in range(3):
            order = numbers[rank * 13 :] + numbers[: rank * 13]
            mine = {}
            for number in order:
                membership, notes = Membership(s.planes[rank], number, [0, 1, 2]), Notes(rank)
                membership.open(notes)
                membership.leave(number)
                mine[number] = membership, notes
            made.append(mine)
        for rank, mine in enumerate(made):
            for number, (_, notes) in mine.items():
                wanted = {("bye", other, number) for other in range(3) if other != rank}
                until(lambda: {*notes.log} == wanted, seconds=20)  # noqa: B023
        for rank, mine in enumerate(made):
            for number in reversed(numbers[rank * 7 :] + numbers[: rank * 7]):
                mine[number][0].close()
        assert all(plane.protocol.foreign == 0 for plane in s.planes)
