"""The tables on a fake device: streams that are threads, with delays, and poisoned host memory.

It has the two ways in which a wait ends: by streams that wait for a word of memory, and by the host
that waits for the operation.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest

import lossycoll
from tests.gpu.runner import FAKE, SAMPLE, run_table
from tests.support.harness import init, run_good
from tests.support.waiting import until


@pytest.mark.in_clear
@pytest.mark.parametrize(
    ("module", "names", "waits"),
    [
        ("collectives", SAMPLE, "stream"),
        ("few_bits", None, "host"),
        pytest.param("collectives", SAMPLE, "host", marks=pytest.mark.long),
        pytest.param("few_bits", None, "stream", marks=pytest.mark.long),
        *(
            pytest.param(name, None, waits, marks=pytest.mark.long)
            for name in ("collectives", "failures", "losses", "training")
            for waits in ("stream", "host")
        ),
    ],
)
def test_what_the_checks_want_holds_on_a_fake_device(
    module: str, names: tuple[str, ...] | None, waits: str
) -> None:
    env = {"LOSSYCOLL_LOG": "off", FAKE: waits}
    found = run_table(f"tests.gpu.{module}", device="cpu", env=env, names=names)
    bad = {name: one.errors for name, one in found.items() if any(one.errors.values())}
    assert not bad
    assert any(one.errors for one in found.values()), "nothing was run"


def rank_counts(rank: int, world: int) -> tuple[int, int, int]:
    """Lanes that two groups took, and pieces of memory after the first calls and after more."""
    import torch
    import torch.distributed as dist

    from lossycoll.devices.registry import device_of
    from tests.support import fake_device

    fake_device.install(seed=rank)
    init(timeout=20)
    tensor = torch.ones(3000)
    device = device_of(tensor)
    group = dist.new_group()

    def given_back() -> bool:
        return device.pool.pieces == sum(map(len, device.pool._free.values()))

    def call() -> None:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, group=group)
        until(given_back, "memory of calls that are over is given back")

    call()
    pieces = device.pool.pieces
    for _ in range(20):
        call()
    layer: Any = device.layer
    dist.destroy_process_group()
    assert (tensor == world**42).all()
    return len(layer.lanes), pieces, device.pool.pieces


def test_calls_take_lanes_by_group_and_memory_once() -> None:
    for value in run_good(rank_counts, 2, {"LOSSYCOLL_LOG": "off"}):
        lanes, pieces, later = value
        assert lanes == 2
        # Each call takes one for its tensor and one for its gate, of which the first may be over
        # when the second is made.
        assert 2 <= pieces <= later <= 4


def rank_is_interrupted(rank: int, world: int) -> list[float]:
    """Ctrl-C at rank 0, when the engine has the operation, and its way back isn't queued."""
    import torch
    import torch.distributed as dist

    from tests.support import fake_device

    fake_device.install(seed=rank)
    init(timeout=20)
    tensors = [torch.full((3000,), float(rank + 1)) for _ in range(3)]
    dist.all_reduce(tensors[0])
    stream: Any = fake_device.FakeStream
    begun = stream.wait_for_word
    interrupts = [True]

    def wait_for_word(self: Any, address: int) -> None:
        if interrupts and interrupts.pop():
            raise KeyboardInterrupt
        begun(self, address)

    if rank == 0:
        stream.wait_for_word = wait_for_word
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(tensors[1])
    else:
        dist.all_reduce(tensors[1])
    dist.all_reduce(tensors[2])
    fake_device.synchronize()
    assert not interrupts or rank
    dist.destroy_process_group()
    return [float(tensor[0]) for tensor in tensors]


def test_an_interrupted_call_goes_on() -> None:
    """The other ranks have it, so it can't be taken back."""
    values = run_good(rank_is_interrupted, 2, {"LOSSYCOLL_LOG": "off"})
    assert values == [[3.0] * 3] * 2


def rank_needs_the_first_of_two(rank: int, world: int) -> tuple[float, float]:
    """Rank 1 makes the second call when it has heard from rank 0, which has the first one's result
    by then."""
    import torch
    import torch.distributed as dist

    from tests.support import fake_device

    fake_device.install(seed=rank)
    init(timeout=20)
    store = dist.distributed_c10d._get_default_store()
    counts, floats = torch.full((3000,), rank + 1), torch.full((3000,), rank + 1.0)
    first = dist.all_reduce(counts, async_op=True)
    if rank == 1:
        store.wait(["rank 0 has counted"], timedelta(seconds=10))
    second = dist.all_reduce(floats, async_op=True)
    first.wait()
    total = int(counts[0])
    if rank == 0:
        store.set("rank 0 has counted", "")
    second.wait()
    assert first.is_completed()
    found = total, float(floats[0])
    dist.destroy_process_group()
    return found


def test_what_ends_on_the_host_stands_behind_nothing_that_waits() -> None:
    values = run_good(rank_needs_the_first_of_two, 2, {"LOSSYCOLL_LOG": "off"})
    assert values == [(3, 3.0)] * 2


def rank_has_no_memory(rank: int, world: int) -> tuple[str, str]:
    """Rank 0 is refused host memory, for a call or for a message."""
    import torch
    import torch.distributed as dist

    from lossycoll.devices.registry import device_of
    from tests.support import fake_device

    fake_device.install(seed=rank)
    init(timeout=20)
    tensor = torch.ones(3000)
    layer: Any = device_of(tensor).layer
    layer.refuses_memory = rank == 0

    def call() -> None:
        if os.environ["REFUSED"] == "call":
            dist.all_reduce(tensor)
            dist.barrier()
        elif rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)

    with pytest.raises(lossycoll.LossyError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("refused", ["call", "message"])
def test_a_rank_without_memory_is_an_error_of_all(refused: str) -> None:
    env = {"LOSSYCOLL_LOG": "off", "REFUSED": refused}
    values = run_good(rank_has_no_memory, 2, env)
    for kind, text in values:
        assert kind in ("EngineError", "AbortedError"), text
        assert "no memory" in text, text


def rank_writes(rank: int, world: int) -> tuple[int, int]:
    """How many copies a device made into a tensor that was sent, and into one that was received."""
    import torch
    import torch.distributed as dist

    from tests.support import fake_device

    fake_device.install(seed=rank)
    init(timeout=20)
    sent, got = torch.ones(3000), torch.zeros(3000)
    copied_to, copy = [], fake_device.FakeStream.copy

    def noted(stream: Any, to: torch.Tensor, source: torch.Tensor) -> None:
        copied_to.append(to.data_ptr())
        copy(stream, to, source)

    fake_device.FakeStream.copy = noted  # type: ignore[method-assign]
    works = [dist.isend(sent, 1 - rank), dist.irecv(got, 1 - rank)]
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier()
    dist.destroy_process_group()
    assert (got == 1.0).all()
    return copied_to.count(sent.data_ptr()), copied_to.count(got.data_ptr())


def test_a_send_writes_nothing_to_its_tensor() -> None:
    """Its work may be retired long after the tensor has been written anew."""
    assert run_good(rank_writes, 2, {"LOSSYCOLL_LOG": "off"}) == [(0, 1), (0, 1)]
