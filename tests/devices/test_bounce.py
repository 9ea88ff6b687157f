"""One call's way by host memory and back, on a fake device: order, lifetimes, failures."""

from __future__ import annotations

import threading

import pytest
import torch

from lossycoll.devices import registry
from lossycoll.devices.bounce import Bounce
from lossycoll.devices.host_memory import HostMemory
from lossycoll.devices.layer import DeviceError
from lossycoll.devices.registry import Device
from tests.support.fake_device import POISON, FakeLayer, PoisonedMemory
from tests.support.waiting import until


class Made:
    """A device of its own, and calls on it."""

    def __init__(self, *, waits_by_stream: bool = False) -> None:
        self.layer = FakeLayer(waits_by_stream=waits_by_stream)
        self.lane = self.layer.new_lane()
        self.pool: HostMemory = PoisonedMemory(self.layer.memory)

    def bounce(self, source: torch.Tensor, target: torch.Tensor, **rest: object) -> Bounce:
        return Bounce(self.layer, self.lane, self.pool, source, target, **rest)  # type: ignore[arg-type]


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
        device.retirement.add(way, ())
        until(lambda way=way: way.is_released, "the memory is given back")
    assert device.pool.pieces == 1


def test_lanes_are_used_again_by_other_groups() -> None:
    device = Device(FakeLayer(waits_by_stream=False))
    one, other = device.take_lane(), device.take_lane()
    assert one is not other
    device.give_back(one)
    assert device.take_lane() is one
    assert device.take_lane() not in (one, other)


def test_without_a_driver_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from lossycoll.devices import driver

    monkeypatch.setattr(driver, "LIBRARY", "libcuda-that-is-not-there.so.1")
    driver._library.cache_clear()
    with pytest.raises(DeviceError, match=r"libcuda-that-is-not-there.*driver"):
        driver.current_context()
    driver._library.cache_clear()


def test_the_cpu_is_no_device_by_itself() -> None:
    assert not registry.is_served(torch.ones(1))
    assert not registry.is_served(torch.ones(1, device="meta"))
