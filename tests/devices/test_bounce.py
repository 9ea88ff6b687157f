"""One call's way by host memory and back, on a fake device: order, lifetimes, failures."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import Counter

import pytest
import torch

from lossycoll.backend import on_device
from lossycoll.devices import registry
from lossycoll.devices.bounce import Bounce
from lossycoll.devices.layer import DeviceError, HostMemory
from lossycoll.devices.registry import Device
from lossycoll.runtime.engine import gates
from tests.support.fake_device import POISON, FakeLayer, PoisonedMemory
from tests.support.waiting import until


class Made:
    """A device of its own, and calls on it."""

    def __init__(self, *, waits_by_stream: bool = False) -> None:
        self.layer = FakeLayer(waits_by_stream=waits_by_stream)
        self.lane = self.layer.new_lane()
        self.pool: HostMemory = PoisonedMemory(self.layer.memory)

    def bounce(self, source: torch.Tensor, target: torch.Tensor, **rest: object) -> Bounce:
        made = Bounce(self.layer, self.lane, self.pool, source, target, **rest)  # type: ignore[arg-type]
        made.fill()
        return made


def test_what_comes_back_is_what_the_operation_left() -> None:
    made = Made()
    source, target = torch.arange(1000.0), torch.zeros(10, 100)
    way = made.bounce(source, target)
    way.wait_until_copied()
    torch.testing.assert_close(way.source, source)
    assert (way.target.view(torch.uint8) == POISON).all()  # nothing was copied that isn't read
    way.target.copy_(2 * way.source)
    way.finish(())
    way.order_current()
    torch.testing.assert_close(target, 2 * source.view(10, 100))


def test_one_tensor_has_one_copy() -> None:
    made = Made()
    tensor = torch.ones(7, dtype=torch.bfloat16)
    way = made.bounce(tensor, tensor)
    assert way.source is way.target
    assert way.source.dtype == torch.bfloat16


def test_what_may_stay_as_it_is_is_copied_too() -> None:
    made = Made()
    way = made.bounce(torch.ones(5), torch.full((5,), 9.0), keeps=True)
    way.wait_until_copied()
    assert way.target.tolist() == [9.0] * 5


def test_a_source_that_is_written_comes_back_before_the_target() -> None:
    """They may lie in each other: of what is in both the target counts."""
    made = Made()
    whole = torch.zeros(6)
    way = made.bounce(whole, whole[2:4], returns_source=True)
    way.wait_until_copied()
    way.source.fill_(1)
    way.target.fill_(2)
    way.finish(())
    way.order_current()
    assert whole.tolist() == [1, 1, 2, 2, 1, 1]


def test_what_follows_gets_the_ranks_that_took_part() -> None:
    made = Made(waits_by_stream=True)
    told: list[object] = []
    tensor = torch.ones(3)
    way = made.bounce(tensor, tensor, among=told.append)
    assert not way.ahead  # who took part is known at the end alone
    way.finish((0, 2))
    way.order_current()
    assert told == [(0, 2)]


def test_memory_is_given_back_when_nothing_is_under_way() -> None:
    made = Made()
    tensor = torch.ones(3000)
    way = made.bounce(tensor, tensor)
    way.wait_until_copied()
    assert way.is_over(())
    way.release()
    assert (way.source.view(torch.uint8) == POISON).all()
    again = made.bounce(tensor, tensor)
    again.wait_until_copied()
    assert made.pool.pieces == 1


def test_nothing_is_over_before_its_copies_are() -> None:
    made, held = Made(), threading.Event()
    tensor = torch.ones(3000)
    way = made.bounce(tensor, tensor)
    way.wait_until_copied()
    made.lane.at_end.run(held.wait)
    way.finish(())
    assert not way.is_over(())
    held.set()
    until(lambda: way.is_over(()), "the copy back is done")


class Pipes:
    """In place of a host's wakers."""

    def __init__(self) -> None:
        self.descriptors = os.pipe()


def end(way: Bounce, piece: int) -> None:
    """As the engine, when a piece's operation is done."""
    address = gates.done_word(way.pieces[piece].gate)
    ctypes.c_uint32.from_address(address).value = 1


def is_open(way: Bounce, piece: int) -> bool:
    """Whether its operation may start."""
    return ctypes.c_uint32.from_address(way.pieces[piece].gate).value == 1


def test_pieces_come_back_one_by_one() -> None:
    made, told = Made(waits_by_stream=True), []
    tensor = torch.arange(10.0).view(2, 5)
    way = made.bounce(
        tensor, tensor, wakers=Pipes(), cuts=(4, 6), epilogue=lambda: told.append(tensor.tolist())
    )
    assert [piece.source.numel() for piece in way.pieces] == [4, 2, 4]
    until(lambda: is_open(way, 2), "the last gate opens")
    assert is_open(way, 0)
    assert is_open(way, 1)
    torch.testing.assert_close(way.source, torch.arange(10.0))
    way.come_back()
    way.source.mul_(2)
    end(way, 0)
    until(lambda: tensor[0, 3] == 6, "the first piece comes back")
    time.sleep(0.1)  # in which others would come that don't wait
    assert tensor.flatten()[4:].tolist() == [4, 5, 6, 7, 8, 9]
    assert not told
    end(way, 2)
    end(way, 1)
    way.order_current()
    assert told == [[[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]]


def test_pieces_that_end_in_any_order_come_back_as_they_end() -> None:
    made, told = Made(), []
    tensor = torch.arange(10.0)
    way = made.bounce(
        tensor, tensor, wakers=Pipes(), cuts=(5,), epilogue=lambda: told.append(tensor.tolist())
    )
    assert not way.ahead
    until(lambda: is_open(way, 1), "the last gate opens")
    way.source.mul_(2)
    way.finish((), 1)
    way.order_current()
    assert tensor.tolist() == [0, 1, 2, 3, 4, 10, 12, 14, 16, 18]
    assert not told
    way.finish((), 0)
    way.order_current()
    assert told == [(2 * torch.arange(10.0)).tolist()]


def test_a_gate_opens_when_its_piece_is_there() -> None:
    made, held = Made(waits_by_stream=True), threading.Event()
    tensor = torch.arange(8.0)
    copy, copies = made.lane.to_host.copy, []

    def slow(to: torch.Tensor, source: torch.Tensor) -> None:
        copies.append(source.numel())
        if len(copies) == 2:
            made.lane.to_host.run(held.wait)
        copy(to, source)

    made.lane.to_host.copy = slow
    way = made.bounce(tensor, tensor, wakers=Pipes(), cuts=(4,))
    until(lambda: is_open(way, 0), "the first gate opens")
    assert not is_open(way, 1)
    assert way.pieces[0].source.tolist() == [0, 1, 2, 3]
    held.set()
    until(lambda: is_open(way, 1), "the second gate opens")
    assert copies == [4, 4]


def test_a_device_without_memory_says_so() -> None:
    made = Made()
    made.layer.refuses_memory = True
    tensor = torch.ones(3)
    with pytest.raises(MemoryError, match="fake device has no"):
        made.bounce(tensor, tensor)


def test_a_retired_call_is_released_without_anybody_waiting() -> None:
    layer = FakeLayer(waits_by_stream=False)
    device = Device(layer)
    tensor = torch.ones(3000)
    for _ in range(3):
        way = Bounce(layer, device.take_lane(), device.pool, tensor, tensor)
        way.fill()
        device.retirement.add(way, ())
        until(lambda way=way: not way._memory, "the memory is given back")
    assert device.pool.pieces == 1


def test_a_large_call_leaves_room_for_another_in_its_lane() -> None:
    for mib, world, pieces in [
        (12, 2, 1),
        (13, 2, 2),
        (400, 2, 50),
        (401, 2, 25),
        (1024, 2, 43),
        (1024, 64, 32),
        (1 << 20, 2, 50),
    ]:
        tensor = torch.empty(mib << 18, device="meta")
        cuts = on_device._cuts(tensor, world)
        assert len(cuts) + 1 == pieces, (mib, world)
        assert pieces <= registry.CALL_PIECES <= registry.LANE_PIECES / 2
    for elements in range(1, 5000, 7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(on_device, "PIECE_BYTES", 64)
            patch.setattr(on_device, "RANK_BYTES", 4)
            cuts = on_device._cuts(torch.empty(elements, device="meta"), 3)
        assert len(cuts) < registry.CALL_PIECES
        assert list(cuts) == sorted(set(cuts))
        assert all(0 < cut < elements for cut in cuts)


def test_a_call_waits_until_all_of_its_pieces_have_room() -> None:
    retirement, lane = registry.Retirement(), FakeLayer(waits_by_stream=False).new_lane()
    retirement._under_way[id(lane)] = registry.LANE_PIECES - 10
    retirement.wait_for_room(lane, 10)
    waiting = threading.Thread(target=retirement.wait_for_room, args=(lane, 11))
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()
    retirement._under_way[id(lane)] -= 1
    waiting.join(60)
    assert not waiting.is_alive()


def test_what_is_under_way_is_counted_under_the_lock() -> None:
    """Threads that make calls count up, the device's thread counts down."""
    device = Device(FakeLayer(waits_by_stream=False))
    retirement, held = device.retirement, []

    class Watched(Counter[int]):
        def __setitem__(self, key: int, value: int) -> None:
            held.append(retirement._lock.locked())
            super().__setitem__(key, value)

    retirement._under_way = Watched()
    tensor = torch.ones(3)
    way = Bounce(device.layer, device.take_lane(), device.pool, tensor, tensor)
    way.fill()
    retirement.add(way, ())
    until(lambda: len(held) == 2, "the call is over")
    assert held == [True, True]
    assert list(retirement._under_way.values()) == [0]


def test_lanes_are_used_again_by_other_groups() -> None:
    device = Device(FakeLayer(waits_by_stream=False))
    one, other = device.take_lane(), device.take_lane()
    assert one is not other
    device.give_back(one)
    assert device.take_lane() is one
    assert device.take_lane() not in (one, other)


def test_without_a_driver_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from lossycoll.devices import cuda

    monkeypatch.setattr(cuda, "LIBRARY", "libcuda-that-is-not-there.so.1")
    cuda._library.cache_clear()
    with pytest.raises(DeviceError, match=r"libcuda-that-is-not-there.*driver"):
        cuda.current_context()
    cuda._library.cache_clear()


def test_the_cpu_is_no_device_by_itself() -> None:
    assert not registry.is_served(torch.ones(1))
    assert not registry.is_served(torch.ones(1, device="meta"))
