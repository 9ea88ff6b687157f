"""Groups on one control plane: what a process holds for them, how long, and what they may ask."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.backend.builder import WORLDS, World, Worlds, with_liveness_of
from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from tests.support.failure_cases import CALM, QUIET, SLACK, catch
from tests.support.harness import Ranks, init, note, run_good
from tests.support.waiting import until

MORE = 6


def control_threads() -> int:
    return sum(thread.name == "lossycoll-control" for thread in threading.enumerate())


def planes() -> set[int]:
    """The control planes of this process's groups."""
    return {id(world.plane) for world in WORLDS._worlds if world.plane.is_sound}


def rank_makes_many(rank: int, world: int) -> dict[str, Any]:
    init()
    out: dict[str, Any] = {"one": (control_threads(), len(planes()))}
    groups = [dist.new_group(ranks=list(range(n % world + 1))) for n in range(1, MORE)]
    mine = [group for group in groups if group != dist.GroupMember.NON_GROUP_MEMBER]
    out["many"] = (control_threads(), len(planes()))
    for group in mine:
        t = torch.ones(10)
        dist.all_reduce(t, group=group)
        assert (t == dist.get_world_size(group)).all()
    dist.barrier()
    # In another order on each rank: odd ones begin at the other end.
    for group in mine if rank % 2 else reversed(mine):
        dist.destroy_process_group(group)
    out["destroyed"] = (control_threads(), len(planes()))
    again = dist.new_group()
    dist.barrier(group=again)
    out["again"] = (control_threads(), len(planes()))
    dist.destroy_process_group()
    out["over"] = (control_threads(), len(planes()))
    return out


def test_a_process_has_one_control_plane_however_many_groups_it_has() -> None:
    for found in run_good(rank_makes_many, 3, CALM):
        assert found == {
            **dict.fromkeys(("one", "many", "destroyed", "again"), (1, 1)),
            "over": (0, 0),
        }


def rank_without_a_world(rank: int, world: int) -> dict[str, Any]:
    """torch's world is gloo's: the first lossy group makes a world, which others may share."""
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1], backend="lossy")
    out = {"pair": len(planes())}
    everyone = dist.new_group(backend="lossy")  # rank 2 has met nobody yet
    out["everyone"] = len(planes())
    other = dist.new_group([1, 2], backend="lossy")
    out["other"] = len(planes())
    if rank < 2:
        dist.destroy_process_group(pair)
    out["without pair"] = len(planes())
    dist.destroy_process_group(everyone)
    out["without everyone"] = len(planes())
    if rank:
        dist.barrier(group=other)
        dist.destroy_process_group(other)
    out["without any"] = len(planes())
    dist.barrier()
    return out


def test_ranks_that_have_not_met_make_a_world_of_their_own() -> None:
    first, second, third = run_good(rank_without_a_world, 3, CALM)
    assert first == {
        **{"pair": 1, "everyone": 2, "other": 2, "without pair": 1},
        **{"without everyone": 0, "without any": 0},
    }
    assert second == {**first, "without everyone": 1}
    assert third == {**second, "pair": 0, "everyone": 1, "other": 1}


def rank_outlives(rank: int, world: int) -> Any:
    """The group of all ends, on rank 0 first; a smaller one lives on, and is watched."""
    dist.init_process_group("gloo")
    everyone = dist.new_group(backend="lossy")
    pair = dist.new_group([1, 2], backend="lossy")
    if rank == 0:
        dist.destroy_process_group(everyone)
        return len(planes())
    dist.destroy_process_group(everyone)
    (plane,) = (world.plane for world in WORLDS._worlds)
    until(lambda: not plane.is_here(0), "the end of rank 0's last group")
    note("ready")
    return catch(lambda: [dist.all_reduce(torch.ones(60_000), group=pair) for _ in range(10**9)])


def test_a_smaller_group_is_watched_after_the_group_of_all_has_ended() -> None:
    patient = {**QUIET, "LOSSYCOLL_LIVENESS": "60"}
    with Ranks(rank_outlives, 3, patient) as ranks:
        for number in (1, 2):
            ranks.wait_for(number, "ready")
        since = ranks.signal(2, signal.SIGKILL)
        left, survivor = ranks.collect(120, but=[2])
    assert left.value == 0, str(left)
    assert survivor.value.kind == "PeerLostError", str(survivor)
    assert "lost rank 1 (127.0.0.1:" in survivor.value.text, "its number in the pair"
    assert "its process has ended" in survivor.value.text
    assert survivor.value.when - since < 10 + SLACK, "long before the liveness"


def rank_with_child(rank: int, world: int) -> Any:
    init()
    dist.barrier()
    if rank == 1:
        child = os.fork()
        if not child:
            time.sleep(600)
            os._exit(0)
        note(f"child {child}.")
        note("ready")
        time.sleep(600)
    note("ready")
    return catch(lambda: dist.all_reduce(torch.ones(60_000)))


def test_a_killed_rank_is_noticed_at_once_though_its_forked_child_lives() -> None:
    """The child has copies of its sockets, which would keep the connections and the port alive."""
    patient = {**QUIET, "LOSSYCOLL_LIVENESS": "60"}
    with Ranks(rank_with_child, 2, patient) as ranks:
        for number in range(2):
            ranks.wait_for(number, "ready")
        child = int(ranks.output(1).split("child ")[1].split(".")[0])
        try:
            since = ranks.signal(1, signal.SIGKILL)
            survivor = ranks.collect(60, but=[1])[0]
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)
    assert survivor.value.kind == "PeerLostError", str(survivor)
    assert survivor.value.when - since < 30


def rank_asks(rank: int, world: int) -> list[Any]:
    init(pg_options={"liveness": 25.0})
    out = []
    for asked in ({"liveness": 25.0}, None, {"liveness": 12.0 if rank == 1 else 25.0}):
        caught = catch(lambda asked=asked: dist.barrier(dist.new_group(pg_options=asked)))  # type: ignore[misc]
        out.append((caught.kind, caught.text))
    group = dist.new_group(pg_options=lossycoll.Options(repair=1))
    dist.barrier(group=group)
    out.append(group._health.liveness)
    dist.destroy_process_group()
    return out


def test_a_group_that_asks_for_another_liveness_is_refused_by_name() -> None:
    for rank, found in enumerate(run_good(rank_asks, 3, {**CALM, "LOSSYCOLL_LIVENESS": "30"})):
        same, silent, (kind, text), liveness = found
        assert same == silent == ("", "")
        assert kind == ("OptionError" if rank == 1 else "RendezvousError")
        assert "option liveness is 12, but it is the process's, which was made with 25" in text
        assert liveness == 25.0


class Plane:
    """As much of a control plane as a world looks at."""

    def __init__(self, liveness: float = 25.0) -> None:
        self.liveness = liveness
        self.is_sound = True
        self.gone: set[int] = set()
        self.holders = 0

    def is_here(self, rank: int) -> bool:
        return rank not in self.gone

    def hold(self) -> bool:
        self.holders += self.is_sound
        return self.is_sound

    def release(self) -> None:
        self.holders -= 1


class Host:
    """As much of a host as a world looks at."""

    def __init__(self) -> None:
        self.is_open = True
        self.holders = 0

    def hold(self) -> bool:
        self.holders += self.is_open
        return self.is_open

    def release(self) -> None:
        self.holders -= 1


def world(plane: Plane, *global_ranks: int) -> World:
    return World("s", 0, global_ranks, plane, Host(), None)  # type: ignore[arg-type]


def test_only_worlds_that_hold_all_members_are_offered_and_held() -> None:
    worlds, small, large = Worlds(), Plane(), Plane()
    worlds.add(world(small, 2, 4))
    worlds.add(world(large, 0, 2, 4, 6))
    with worlds.holding([4, 2]) as found:
        assert [one.plane for one in found] == [small, large]
        assert small.holders == large.holders == 1
        assert [one.host.holders for one in found] == [1, 1]  # type: ignore[attr-defined]
    assert small.holders == large.holders == 0
    assert [one.host.holders for one in found] == [0, 0]  # type: ignore[attr-defined]
    large.gone.add(3)  # global rank 6
    with worlds.holding([0, 6]) as found:
        assert not found
    with worlds.holding([0, 4]) as found:
        assert [one.plane for one in found] == [large]
    large.is_sound = False
    with worlds.holding([0, 4]) as found:
        assert not found
    worlds.add(world(Plane(), 1, 3))
    assert len(worlds._worlds) == 2, "what is over is forgotten"


def test_liveness_is_the_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOSSYCOLL_LIVENESS", "5")
    first = [world(Plane(25.0), 0, 1)]

    def found(pg_options: object, worlds: Sequence[World] = first) -> Options:
        return with_liveness_of(Options.resolve(pg_options), pg_options, worlds)

    assert found(None, []).liveness == 5.0
    assert found(None).liveness == 25.0
    assert found({"repair": 1}).repair == 1
    assert found({"liveness": 25.0}).liveness == 25.0
    # Also where it is the environment's, or, below, the default.
    for asked in ({"liveness": 7.0}, {"liveness": 5.0}, Options(liveness=5.0)):
        with pytest.raises(OptionError, match=r"liveness is [57], but it is the process's"):
            found(asked)
    monkeypatch.delenv("LOSSYCOLL_LIVENESS")
    assert found(Options(repair=1)).liveness == 25.0
    for asked in ({"liveness": 10.0}, Options(liveness=10.0)):
        with pytest.raises(OptionError, match="liveness is 10, but it is the process's"):
            found(asked)
