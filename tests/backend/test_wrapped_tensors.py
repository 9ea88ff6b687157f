"""Tensors that stand for others: what a functional collective returns is waited for, as gloo has
it; all else that has no memory of its own is refused before the call has a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor

import lossycoll
from tests.support.harness import EXACT, init, run_good

ELEMENTS = 9_000


class Wrapping(torch.Tensor):
    """As libraries make them: it has a shape, and the elements are another tensor's."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapping:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), storage_offset=4, dtype=held.dtype
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def rank_results(rank: int, world: int) -> dict[str, list[list[float]]]:
    """By call: what lossy and gloo make of results that nobody has waited for."""
    init()
    peer, gloo = 1 - rank, dist.new_group(backend="gloo")
    found: dict[str, list[list[float]]] = {}

    def pending(n: int = ELEMENTS) -> Tensor:
        result = fc.all_reduce(torch.arange(n) * (rank + 1.0), "sum", dist.group.WORLD)
        assert type(result) is fc.AsyncCollectiveTensor
        return result

    def own(n: int = ELEMENTS) -> Tensor:
        """Another one on each rank."""
        result = pending(world * n)
        return result[rank * n : (rank + 1) * n]

    def all_reduced(group: Any, *, wait: bool) -> list[Tensor]:
        given = own()
        work = dist.all_reduce(given, group=group, async_op=wait)
        if wait:
            work.wait()
        return [given]

    def filled(call: Callable[..., Any], *given: Any, **named: Any) -> list[Tensor]:
        call(*given, **named)
        lists = [each if isinstance(each, list) else [each] for each in given if each is not None]
        return [one for each in lists for one in each]

    def swapped(group: Any) -> list[Tensor]:
        sent, came = own(), pending()
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, peer, group),
                dist.P2POp(dist.irecv, came, peer, group),
            ]
        ):
            work.wait()
        return [came]

    def relayed(group: Any) -> list[Tensor]:
        given = own()
        if rank:
            dist.send(given, peer, group)
        else:
            dist.recv(given, peer, group)
        return [given]

    def one_work(group: Any) -> list[Tensor]:
        given = [own(), own(5)]
        with dist._coalescing_manager(group, async_ops=True) as manager:
            for one in given:
                dist.all_reduce(one, group=group)
        manager.wait()
        return given

    calls: dict[str, Callable[[Any], list[Tensor]]] = {
        "all_reduce": lambda g: all_reduced(g, wait=False),
        "all_reduce again": lambda g: all_reduced(g, wait=False),
        "all_reduce async": lambda g: all_reduced(g, wait=True),
        "broadcast": lambda g: filled(dist.broadcast, own(), src=1, group=g),
        "all_gather": lambda g: filled(
            dist.all_gather, [pending(), torch.empty(ELEMENTS)], own(), group=g
        ),
        "all_gather_single": lambda g: filled(
            dist.all_gather_single, pending(world * ELEMENTS), own(), group=g
        ),
        "reduce_scatter": lambda g: filled(
            dist.reduce_scatter_single, pending(), own(world * ELEMENTS), group=g
        ),
        "all_to_all": lambda g: filled(dist.all_to_all_single, pending(), own(), group=g),
        "scatter": lambda g: filled(
            dist.scatter, pending(), [own(), own()][: 2 - 2 * rank] or None, group=g
        ),
        "gather": lambda g: filled(
            dist.gather, own(), [pending(), pending()][: 2 - 2 * rank], group=g
        ),
        "messages": swapped,
        "a message": relayed,
        "coalesced": one_work,
    }
    for name, call in calls.items():
        found[name] = [
            [value for tensor in call(group) for value in (tensor + 0).tolist()[::1_000]]
            for group in (dist.group.WORLD, gloo)
        ]
    dist.destroy_process_group()
    return found


def test_a_result_that_nobody_has_waited_for_is_served_as_by_gloo() -> None:
    for found in run_good(rank_results, 2, EXACT):
        for name, (ours, theirs) in found.items():
            assert ours, name
            assert ours == theirs, name


def refused_tensors() -> dict[str, Tensor]:
    """By what the error says: tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with FakeTensorMode():
        fake = torch.empty(ELEMENTS)
    freed = torch.ones(ELEMENTS)
    freed.untyped_storage().resize_(0)
    begin = torch.ones(ELEMENTS + 4)
    shifted = begin[4:]
    begin.untyped_storage().resize_(0)
    return {
        r"a DTensor .*\.to_local\(\)": DTensor.from_local(
            torch.ones(ELEMENTS), mesh, [Replicate()]
        ),
        "a FakeTensor .*FakeTensorMode": fake,
        "a Wrapping .*that it wraps": Wrapping(torch.ones(ELEMENTS)),
        "a Tensor .*storage was freed": freed,
        "a Tensor .*was freed, so": shifted,
    }


def rank_refuses(rank: int, world: int) -> tuple[int, float]:
    """Number of the last call, and a sum after all that was refused here alone."""
    init()
    peer, good = 1 - rank, torch.ones(ELEMENTS)
    parts, twice = [torch.empty(ELEMENTS) for _ in range(world)], torch.empty(world * ELEMENTS)
    group: Any = dist.group.WORLD
    tensors = refused_tensors()
    for _ in range(3):  # calls like it have been served then
        dist.all_reduce(good)
        dist.broadcast(good, 0)
        dist.all_gather_single(twice, good)
    before = group._health.seq

    def refuses(text: str, call: Callable[[], Any]) -> None:
        with pytest.raises(lossycoll.UnsupportedError, match=text):
            call()

    for text, bad in tensors.items() if rank == 0 else ():
        refuses(text, lambda bad=bad: dist.all_reduce(bad))
        refuses(text, lambda bad=bad: dist.all_reduce(bad, async_op=True))
        refuses(text, lambda bad=bad: dist.broadcast(bad, 0))
        refuses(text, lambda bad=bad: dist.reduce(bad, 0))
        refuses(text, lambda bad=bad: dist.all_gather_single(twice, bad))
        refuses(text, lambda bad=bad: dist.all_gather([parts[0], bad], good))
        refuses(text, lambda bad=bad: dist.reduce_scatter(bad, parts))
        refuses(text, lambda bad=bad: dist.reduce_scatter(good, [good, bad]))
        refuses(text, lambda bad=bad: dist.gather(bad, parts))
        refuses(text, lambda bad=bad: dist.scatter(good, [bad, good]))
        refuses(text, lambda bad=bad: dist.all_to_all(parts, [good, bad]))
        refuses(text, lambda bad=bad: dist.all_to_all_single(torch.empty(ELEMENTS), bad))
        refuses(text, lambda bad=bad: dist.send(bad, peer))
        refuses(text, lambda bad=bad: dist.irecv(bad, peer))
        refuses(text, lambda bad=bad: group.allreduce_coalesced([good, bad]))
        refuses(text, lambda bad=bad: lossycoll.wire_allreduce_(bad))
        refuses(text, lambda bad=bad: group.all_gather_blocks(bad))

    def inside(tensor: Tensor) -> Tensor:
        refuses(r"a Tensor .*vmap", lambda: dist.all_reduce(tensor))
        refuses(r"a Tensor .*vmap", lambda: dist.send(tensor, peer))
        return tensor

    if rank == 0:
        torch.vmap(inside)(torch.ones(2, ELEMENTS))
        torch.func.grad(lambda x: inside(x).sum())(torch.ones(ELEMENTS))
        waiting = fc.all_gather_single(good, 0, dist.new_group([0]))
        refuses(r"Tensor .*what its \.wait\(\)", lambda: group.all_gather_blocks(waiting))
    else:
        dist.new_group([0])
    assert group._health.seq == before, "it had a number"
    good.fill_(rank + 1.0)
    dist.all_reduce(good)
    text: list[Any] = [rank]
    dist.broadcast_object_list(text, 1)
    assert text == [1]
    dist.destroy_process_group()
    return before, float(good[-1])


def test_what_has_no_memory_is_refused_on_that_rank_alone() -> None:
    (one, first), (other, second) = run_good(rank_refuses, 2, EXACT)
    assert one == other
    assert first == second == 3.0


def rank_empty(rank: int, world: int) -> None:
    """Nothing is touched of an empty tensor, so it needs no memory."""
    init()
    nothing = torch.empty(0)
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    dist.all_gather_single(torch.empty(0), nothing)
    if rank:
        dist.send(nothing, 0)
    else:
        dist.recv(nothing, 1)
    dist.destroy_process_group()


def test_an_empty_tensor_needs_no_memory() -> None:
    run_good(rank_empty, 2)
