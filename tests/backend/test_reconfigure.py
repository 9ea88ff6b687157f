"""Members that change: torch's contract of 14 situations, and what goes wrong in each.

Three processes live through one situation after another, each with a group and keys of its own.
"""

from __future__ import annotations

import functools
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, PrefixStore

import lossycoll
from lossycoll.backend.devices import HAS_BACKENDS
from lossycoll.backend.reconfiguration import parsed
from tests.support.harness import Ranks, await_ranks, init, kill_self, note, run_good
from tests.support.members import SECONDS, Member, job_store
from tests.support.waiting import until

WORLD = 3
ALL = 6.0
"""1 + 2 + 3."""


def all_together(member: Member, uuid: int = 1) -> list[str]:
    handles = member.handles(f"all/{uuid}")
    member.meet(uuid, handles)
    return handles


# ---- torch's situations ----


def basic(member: Member) -> Any:
    all_together(member)
    return member.place == (member.first_rank, WORLD)


def then_all_reduce(member: Member) -> Any:
    all_together(member)
    return member.total() == ALL


def then_send_and_receive(member: Member) -> Any:
    all_together(member)
    rank, group = member.group.rank(), member.group
    sent, came = torch.full((4,), rank + 1.0), torch.zeros(4)
    works = [group.send([sent], (rank + 1) % WORLD), group.recv([came], (rank - 1) % WORLD)]
    for work in works:
        work.wait()
    return float(came[0]) == (rank - 1) % WORLD + 1


def without_the_last(member: Member) -> Any:
    handles = all_together(member)
    if member.first_rank == WORLD - 1:
        return True
    member.meet(2, handles[:-1])
    tensor = torch.full((4,), 42.0 if member.group.rank() == 0 else 0.0)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    member.group.broadcast([tensor], options).wait()
    return member.place == (member.first_rank, 2) and member.total() == 3 and float(tensor[0]) == 42


def without_the_middle(member: Member) -> Any:
    handles = all_together(member)
    if member.first_rank == 1:
        return True
    member.meet(2, [handles[0], handles[2]])
    return member.place == (member.first_rank // 2, 2) and member.total() == 3


def down_and_up(member: Member) -> Any:
    own = [member.group.get_reconfigure_handle()]
    member.meet(10 + member.first_rank, own)
    alone = member.place == (0, 1) and member.total() == 1
    all_together(member)
    together = member.place == (member.first_rank, WORLD)
    member.meet(20 + member.first_rank, own)
    return alone and together and member.place == (0, 1)


def single_to_all(member: Member) -> Any:
    member.meet(10 + member.first_rank, [member.group.get_reconfigure_handle()])
    all_together(member)
    return member.total() == ALL


def identity(member: Member) -> Any:
    assert all_together(member) == all_together(member, 2)
    return member.total() == ALL


def late_join(member: Member) -> Any:
    handles = member.handles("early")
    if member.first_rank < 1:
        member.meet(7, handles[:1])
    all_together(member)
    return member.total() == ALL


def merge_and_split(member: Member) -> Any:
    handles, rank = member.handles("early"), member.first_rank
    member.meet(7 if rank < 1 else 8, handles[:1] if rank < 1 else handles[1:])
    apart = member.total() == (1 if rank < 1 else 3)
    all_together(member)
    return apart and member.total() == ALL


def after_abort(member: Member) -> Any:
    all_together(member)
    member.group.abort()
    with pytest.raises(lossycoll.AbortedError):
        member.total()
    is_error = member.group.get_error() != ErrorType.SUCCESS
    all_together(member, 2)
    return not is_error and member.total() == ALL


def after_timeout(member: Member) -> Any:
    all_together(member)
    found = None
    called = threading.Event()
    member.group.register_abort_hook(0, called.set)
    if member.first_rank:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=0.3)
        with pytest.raises(lossycoll.OperationTimeout):
            member.group.allreduce([torch.ones(4)], options).wait()
        found = member.group.get_error()
        assert called.is_set()
    member.await_all("over")
    all_together(member, 2)
    is_known = found in (None, ErrorType.TIMEOUT)
    return is_known and member.total() == ALL


def reused_uuid(member: Member) -> Any:
    own = [member.group.get_reconfigure_handle()]
    member.meet(10 + member.first_rank, own)
    with pytest.raises(RuntimeError, match="already used"):
        member.meet(10 + member.first_rank, own)
    return member.total() == 1


def refused_without_the_flag(member: Member) -> Any:
    """torch's own refuses groups of several backends; ours those that were not made for it."""
    member.group._reconfiguration = None
    assert not member.group.supports_reconfigure
    for call in (member.group.get_reconfigure_handle, lambda: member.meet(1, ["x"])):
        with pytest.raises(lossycoll.UnsupportedError, match="enable_reconfigure=True"):
            call()
    return True


# ---- others ----


def before_the_first(member: Member) -> Any:
    for call in (
        member.total,
        member.group.barrier,
        lambda: member.group.send([torch.ones(1)], (member.first_rank + 1) % WORLD),
        member.group.monitored_barrier,
    ):
        with pytest.raises(lossycoll.ClosedError, match="has no members yet"):
            call()
    all_together(member)
    return member.total() == ALL


def split_brain(member: Member) -> Any:
    """Both parts take the same number, each for itself."""
    handles, rank = member.handles("early"), member.first_rank
    member.meet(7, handles[:1] if rank < 1 else handles[1:])
    return member.total() == (1 if rank < 1 else 3)


def join_and_leave(member: Member) -> Any:
    handles = member.handles("early")
    if member.first_rank < 2:
        member.meet(7, handles[:2])
    if member.first_rank == 0:
        return member.total is not None
    member.meet(8, [handles[2], handles[1]])
    return member.place == (2 - member.first_rank, 2) and member.total() == 3


def as_a_set(member: Member) -> Any:
    member.meet(7, set(member.handles("early")))
    return member.total() == ALL


def in_flight(member: Member) -> Any:
    """Rank 0 never takes part in what the others have begun."""
    all_together(member)
    work, arrived = None, torch.zeros(4)
    if member.first_rank:
        work = member.group.allreduce([torch.ones(4)])
        receive = member.group.recv([arrived], 0)
    all_together(member, 2)
    if work is not None:
        for each in (work, receive):
            with pytest.raises(lossycoll.LossyError):
                each.wait()
        with pytest.raises(lossycoll.AbortedError, match=r"in flight|ended the group"):
            work.wait()
    return member.total() == ALL


def twice_at_once(member: Member) -> Any:
    """Two threads of each process: one after the other, and none twice the same number."""
    handles, found = member.handles("early"), []

    def meet() -> None:
        try:
            member.meet(7, handles)
        except lossycoll.OptionError as error:
            found.append("already used" in str(error))

    threads = [threading.Thread(target=meet) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found == [True] and member.total() == ALL


def one_goes_twice(member: Member) -> Any:
    """Rank 0 is in the next group before the others have left this one: they hear of it."""
    handles, rank = all_together(member), member.first_rank
    if rank == 0:
        member.meet(10, handles[:1])
        assert member.total() == 1
    else:
        with pytest.raises(lossycoll.LossyError, match="rank 0"):
            member.total()
    all_together(member, 2)
    return member.total() == ALL


def twenty_groups(member: Member) -> Any:
    """Of one process, all with the same members, some changed again; each rank uses them in
    another order, as none waits for another group."""
    rank = member.first_rank
    many = [Member(PrefixStore(f"{n}", member.store), rank, WORLD) for n in range(20)]
    listed = [one.handles("many") for one in many]
    for one, handles in zip(many, listed, strict=True):
        one.meet(1, handles)
    for one, handles in zip(many[::5], listed[::5], strict=True):
        one.meet(2, handles[::-1])
    works = [one.group.barrier() for one in many[7 * rank :] + many[: 7 * rank]]
    for work in works:
        work.wait()
    assert [one.total() for one in many] == [ALL] * len(many)
    until(lambda: sum(each.name == "lossycoll-control" for each in threading.enumerate()) == 1)
    for one in many:
        one.group.shutdown()
    return True


def another_backends_timeout(member: Member) -> Any:
    """That of the calls is the group's, however long the members had to meet."""
    store = PrefixStore("other", member.store)
    other = Member(store, member.first_rank, WORLD, configured="cpu:gloo,cuda:lossy")

    def timeout() -> float:
        gloo = other.group._get_backend(torch.device("cpu"))
        assert type(gloo).__name__ == "ProcessGroupGloo"
        return float(gloo.options._timeout.total_seconds())

    handles, found = other.handles("other"), []
    other.meet(1, handles, SECONDS + 1.0)
    assert other.total() == ALL
    found.append(timeout())
    other.group.set_timeout(timedelta(seconds=77))
    found.append(timeout())
    other.meet(2, handles, SECONDS + 2.0)
    assert other.total() == ALL
    found.append(timeout())
    other.group.shutdown()
    return found == [SECONDS, 77, 77]


def other_lists(member: Member) -> Any:
    """The ranks hear who was given another list, when nobody has come in time."""
    handles, rank = member.handles("early"), member.first_rank
    listed = handles if rank < 2 else [handles[2], handles[0], handles[1]]
    with pytest.raises(lossycoll.RendezvousError) as caught:
        member.meet(7, listed, 1.0)
    with pytest.raises(lossycoll.ClosedError, match="reconfiguration 7 failed"):
        member.total()
    others = "ranks [2] were" if rank < 2 else "ranks [1, 2] were"
    assert f"{others} given other handles" in str(caught.value)
    all_together(member, 8)
    return member.total() == ALL


def bad_handles(member: Member) -> Any:
    handles, own = member.handles("early"), member.group.get_reconfigure_handle()
    found = parsed(own)
    assert found is not None
    others = str(found._replace(job="0" * 16, incarnation="1" * 16, process="there/1"))
    for listed, text in (
        ([], "got 0 handles"),
        (["gloo:0:1:host"], "no group of backend 'lossy' gave"),
        ([own + "\n"], "no group of backend 'lossy' gave"),
        ([own, others], "is of there/1, which uses another store"),
        ([own, own], "handles 0 and 1 are the same process's"),
        ([one for one in handles if one != own], "is not among the 2 handles"),
    ):
        with pytest.raises(lossycoll.OptionError, match=text):
            member.meet(7, listed)
    all_together(member, 7)  # nothing of it counted
    return member.total() == ALL


def options_that_differ_later(member: Member) -> Any:
    """The first group had the same everywhere; they are read again for each group."""
    handles = all_together(member)
    if member.first_rank == 1:
        os.environ["LOSSYCOLL_REPAIR"] = "1"
    with pytest.raises(lossycoll.LossyError, match="repair"):
        member.meet(2, handles)
    with pytest.raises(lossycoll.ClosedError, match="reconfiguration 2 failed"):
        member.total()
    os.environ.pop("LOSSYCOLL_REPAIR", None)
    all_together(member, 3)
    return member.total() == ALL


SITUATIONS: tuple[Callable[[Member], Any], ...] = (
    basic,
    then_all_reduce,
    then_send_and_receive,
    without_the_last,
    without_the_middle,
    down_and_up,
    single_to_all,
    identity,
    late_join,
    merge_and_split,
    after_abort,
    after_timeout,
    reused_uuid,
    refused_without_the_flag,
    before_the_first,
    split_brain,
    join_and_leave,
    as_a_set,
    in_flight,
    twice_at_once,
    one_goes_twice,
    twenty_groups,
    another_backends_timeout,
    other_lists,
    bad_handles,
    options_that_differ_later,
)


def rank_situations(rank: int, world: int) -> dict[str, Any]:
    store, found = job_store(), {}
    for situation in SITUATIONS:
        name = situation.__name__
        member = Member(PrefixStore(name, store), rank, world)
        found[name] = situation(member)
        member.await_all("end")
        member.group.shutdown()
    return found


@functools.cache
def lived_through() -> list[dict[str, Any]]:
    return run_good(rank_situations, WORLD, {"LOSSYCOLL_LOG": "off"}, timeout=300)


@pytest.mark.parametrize("name", [each.__name__ for each in SITUATIONS])
def test_situation(name: str) -> None:
    assert [found[name] for found in lived_through()] == [True] * WORLD


def add_up_for_ever(member: Member) -> None:
    while True:
        member.total()


def rank_survives(rank: int, world: int) -> Any:
    """Rank 1 is killed while all compute together; a process that was never in it takes its place,
    and rank 0 leaves at the same time."""
    member = Member(job_store(), rank, world)
    handles = member.handles("early")
    if rank == 3:
        member.store.wait(["killed"])
        member.meet(8, [handles[2], handles[3]])
        return member.place, member.total()
    member.meet(7, handles[:3])
    total = member.total()
    assert total == ALL
    member.store.set(f"met/{rank}", "")
    if rank == 1:
        member.store.wait([f"met/{each}" for each in range(3)])
        kill_self()
    with pytest.raises(lossycoll.PeerLostError, match="rank 1"):
        add_up_for_ever(member)
    member.store.set("killed", "")
    if rank == 0:
        return None
    begin = time.monotonic()
    member.meet(8, [handles[2], handles[3]])
    note(f"met again after {time.monotonic() - begin:.3f} s")
    return member.place, member.total()


def test_a_killed_member_is_replaced() -> None:
    with Ranks(rank_survives, 4) as ranks:
        outcomes = ranks.collect(60)
    assert outcomes[1].code == -signal.SIGKILL
    assert [outcomes[rank].value for rank in (0, 2, 3)] == [None, ((0, 2), 3.0), ((1, 2), 3.0)], (
        outcomes
    )


def rank_imports(rank: int, world: int) -> list[str]:
    member = Member(job_store(), rank, world)
    handles = member.handles("early")
    before = set(sys.modules)
    member.meet(7, handles)
    assert member.total() == 3
    return sorted(set(sys.modules) - before)


@pytest.mark.long
def test_nothing_is_imported_while_ranks_wait_for_each_other() -> None:
    """The first meeting of 8 ranks on 2 cores took twice as long by that."""
    for late in run_good(rank_imports, 2, fresh=True):
        assert [name for name in late if name.partition(".")[0] in ("zmq", "lossycoll")] == []


def rank_differs(rank: int, world: int) -> str:
    member = Member(job_store(), rank, world, {"repair": rank})
    handles = member.handles("early")
    try:
        member.meet(7, handles)
    except lossycoll.LossyError as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_options_that_differ_are_named_on_all_ranks() -> None:
    for text in run_good(rank_differs, 2):
        assert "repair" in text, text


def rank_by_torch(rank: int, world: int) -> Any:
    init(enable_reconfigure=True)
    store = dist.distributed_c10d._get_default_store()
    backend = dist.get_backend_impl()
    assert dist._supports_reconfigure()
    assert backend.supports_reconfigure
    store.set(f"handle/{rank}", dist._get_reconfigure_handle())
    await_ranks("handle", range(world))
    handles = [store.get(f"handle/{each}").decode() for each in range(world)]
    dist._reconfigure(7, handles[::-1]).wait()
    tensor = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    backend.allreduce([tensor], dist.AllreduceOptions()).wait()
    found = dist.get_rank(), dist.get_world_size(), backend.rank(), float(tensor[0])
    dist.destroy_process_group()
    return found


@pytest.mark.skipif(not HAS_BACKENDS, reason="torch 2.13 can't ask for it")
def test_by_torch_distributed() -> None:
    assert run_good(rank_by_torch, 2) == [(1, 2, 1, 6.0), (0, 2, 0, 6.0)]


def rank_names(rank: int, world: int) -> Any:
    """Rank 0 has made two more groups before rank 1 comes."""
    init(enable_reconfigure=True)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"handle/{rank}", dist._get_reconfigure_handle())
    await_ranks("handle", range(world))
    if rank == 0:
        dist._reconfigure(1, [dist._get_reconfigure_handle()]).wait()
        for _ in range(2):
            dist.new_group([0])
    handles = [store.get(f"handle/{each}").decode() for each in range(world)]
    dist._reconfigure(2, handles).wait()
    name = dist.new_group().group_name
    store.set(f"named/{rank}", "")
    await_ranks("named", range(world))
    dist.destroy_process_group()
    return name


@pytest.mark.skipif(not HAS_BACKENDS, reason="torch 2.13 can't ask for it")
def test_torch_names_a_newcomers_groups_otherwise() -> None:
    """Why ElasticWorld makes the default group again: docs/rejoin.md. If this fails, torch has
    mended it."""
    survivors, newcomers = run_good(rank_names, 2)
    assert survivors != newcomers


@pytest.mark.parametrize(
    "text", ["", "lossy", "lossy:1:2:3", "lossy:" + "0" * 16 + ":" + "g" * 16 + ":h/1", None, 7]
)
def test_what_is_no_handle(text: object) -> None:
    assert parsed(text) is None


def test_a_handle_reads_as_it_was_written() -> None:
    seed = 7
    text = f"lossy:{seed:016x}:{seed:016x}:host:with:colons/{os.getpid()}"
    assert str(parsed(text)) == text
    assert secrets.compare_digest(str(parsed(text)), text)
