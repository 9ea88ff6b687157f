"""The private gloo mesh: made by the first call that needs it, cut with exactly its own sockets."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from tests.support.failure_cases import CALM, QUIET, catch, holdings
from tests.support.harness import Ranks, init, note, run_good
from tests.support.waiting import until

pytestmark = pytest.mark.in_clear
BY_GLOO = {"bulk_min_bytes": 1 << 30, "lossy_min_bytes": 1 << 30}
"""Options with which gloo serves small reductions."""


def rank_lazy(rank: int, world: int) -> Any:
    import torch
    import torch.distributed as dist

    init(pg_options=BY_GLOO)
    group: Any = dist.group.WORLD
    dist.broadcast(torch.ones(10, dtype=torch.int16), 0)  # by the engine: gloo can't
    before = holdings()
    groups = [dist.new_group(pg_options=BY_GLOO) for _ in range(3)]
    backend = group._get_backend(torch.device("cpu"))
    asked = holdings() - before
    calls: Any = groups[1]
    t = torch.ones(10)
    dist.all_reduce(t, group=calls)
    made = holdings() - before
    with pytest.raises(RuntimeError):
        group._get_backend(torch.device("xpu"))
    dist.barrier()
    dist.destroy_process_group()
    return asked, made, t[0].item(), backend.name(), backend.rank(), backend.supports_splitting


def test_it_is_made_when_a_call_needs_it_and_only_for_that_group() -> None:
    for rank, (asked, made, sum_, name, said, splits) in enumerate(run_good(rank_lazy, 2, CALM)):
        gloo = [thread for thread in asked if "gloo" in thread]
        assert not gloo, f"rank {rank}: {asked}"
        assert any("gloo" in thread for thread in made), f"rank {rank}: {made}"
        assert sum_ == 2.0
        assert (name, said, splits) == ("lossy", rank, False)


def rank_disturbed(rank: int, world: int) -> Any:
    """Other sockets of the process connect and listen while the mesh is made."""
    import torch
    import torch.distributed as dist

    from lossycoll.backend import gloo_mesh

    init(pg_options=BY_GLOO)
    over = threading.Event()
    mine: list[tuple[socket.socket, socket.socket, socket.socket]] = []

    def disturb() -> None:
        while not over.is_set() and len(mine) < 200:
            listener = socket.create_server(("127.0.0.1", 0))
            near = socket.create_connection(listener.getsockname())
            mine.append((listener, near, listener.accept()[0]))
            time.sleep(0.01)

    make_devices = gloo_mesh._devices

    def make_devices_disturbed(address: str) -> Any:
        before = len(mine)
        made = make_devices(address)
        until(lambda: len(mine) > before, "one more connection")
        return made

    gloo_mesh._devices = make_devices_disturbed
    thread = threading.Thread(target=disturb)
    thread.start()
    t = torch.ones(10)
    dist.all_reduce(t)
    over.set()
    thread.join()
    # Rank 1's abort ends a call in which the others wait in gloo.
    group: Any = dist.group.WORLD
    caught = None
    store = dist.distributed_c10d._get_default_store()
    begin = time.monotonic()
    if rank == 1:
        store.wait(["0 is in gloo", "2 is in gloo"])
        group.abort()
    else:
        work = dist.all_reduce(t, async_op=True)
        store.set(f"{rank} is in gloo", "")
        caught = catch(work.wait)
    seconds = time.monotonic() - begin
    for _, near, far in mine:
        near.sendall(b"x")
        assert far.recv(1) == b"x"
    return t[0].item(), caught, seconds, len(mine)


def test_its_own_sockets_are_cut_and_no_others() -> None:
    ranks = run_good(rank_disturbed, 3, CALM)
    for rank, (_, caught, seconds, disturbed) in enumerate(ranks):
        assert disturbed > 0, "nothing was disturbed"
        if rank != 1:
            assert caught.kind == "AbortedError", f"rank {rank}: {caught}"
            assert seconds < 15, f"rank {rank} waited for the timeout"


def rank_alone(rank: int, world: int) -> Any:
    import torch
    import torch.distributed as dist

    from lossycoll.backend.gloo_mesh import GlooMesh

    init(pg_options=BY_GLOO, timeout=30)
    group: Any = dist.group.WORLD
    dist.barrier(dist.new_group())
    if rank == 2:
        note("ready")
        time.sleep(600)
    exchanged = GlooMesh._exchanged

    def noted(mesh: GlooMesh, mine: Any) -> Any:
        note("at the mesh")
        return exchanged(mesh, mine)

    GlooMesh._exchanged = noted  # type: ignore[method-assign]
    begin = time.monotonic()
    caught = catch(lambda: dist.all_reduce(torch.ones(10)))
    assert group is not None
    return caught, time.monotonic() - begin


def test_a_rank_that_is_killed_before_it_came_to_the_mesh_is_named() -> None:
    import signal

    with Ranks(rank_alone, 3, QUIET) as ranks:
        for number, said in enumerate(("at the mesh", "at the mesh", "ready")):
            ranks.wait_for(number, said)
        ranks.signal(2, signal.SIGKILL)
        survivors = ranks.collect(60, but=[2])
    for outcome in survivors:
        assert outcome.value is not None, str(outcome)
        caught, seconds = outcome.value
        assert (caught.kind, caught.peer) == ("PeerLostError", 2), str(caught)
        assert seconds < 20, "it waited for the timeout"


def rank_late(rank: int, world: int) -> Any:
    import torch.distributed as dist

    init()
    group: Any = dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        caught = catch(lambda: group.monitored_barrier(timedelta(seconds=1), wait_all_ranks=True))
        store.set("rank 0 has its error", "")
    else:
        store.wait(["rank 0 has its error"], timedelta(seconds=60))
        caught = catch(dist.barrier)
    return caught


def test_a_monitored_barrier_names_those_that_never_came_to_the_mesh() -> None:
    first, *others = run_good(rank_late, 3, CALM)
    assert first.kind == "OperationTimeout", str(first)
    for part in ("rank 1 (127.0.0.1", "rank 2 (127.0.0.1", "didn't take part within 1 s"):
        assert part in first.text, first.text
    for other in others:
        assert "didn't take part within 1 s" in other.text, str(other)


def rank_apart(rank: int, world: int) -> Any:
    """One rank's call is served by gloo, the other's by the engine."""
    import torch
    import torch.distributed as dist

    init(pg_options=BY_GLOO)
    if rank == 0:
        return catch(lambda: dist.all_reduce(torch.ones(10)))
    return catch(lambda: dist.broadcast(torch.ones(10, dtype=torch.int16), 1))


def test_ranks_that_mean_different_calls_learn_it_before_there_is_a_mesh() -> None:
    found = run_good(rank_apart, 2, CALM)
    assert found[0].kind == "MismatchError", [str(one) for one in found]
    for part in ("all_reduce", "broadcast"):
        assert part in found[0].text


def test_a_mesh_that_others_never_come_to_is_closed_with_its_thread() -> None:
    from torch._C import _distributed_c10d as c10d

    from lossycoll.backend.gloo_mesh import GlooMesh

    class GivenUp(Exception):
        pass

    def still() -> None:
        raise GivenUp

    store = c10d.HashStore()
    mesh = GlooMesh(store, 0, 2, timeout=timedelta(seconds=60), address="127.0.0.1")
    with pytest.raises(GivenUp):
        mesh.group(still)
    until(lambda: store.check(["listens/0"]), "the mesh's own address")
    made_by = [one for one in threading.enumerate() if one.name == "lossycoll-gloo"]
    assert made_by, "nothing is being made"
    mesh.close()
    assert not any(one.is_alive() for one in made_by)
