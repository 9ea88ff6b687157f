"""Operations that wait until a device has written their input."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from lossycoll.plan import Delivery, hierarchical
from lossycoll.runtime.engine import gates
from lossycoll.runtime.engine.binding import DType, EngineCall
from lossycoll.runtime.engine.failures import Code
from tests.oracle.codec import Array
from tests.support.network import Network
from tests.support.waiting import until

COUNT = 3000
STILL = 0.2
"""Seconds after which an operation that was let start would have ended."""


class Gate:
    """One gate, and the function that a device would call."""

    def __init__(self, wakers: gates.Wakers, spoiled: Array | None = None) -> None:
        self._memory = np.zeros(gates.GATE_BYTES, np.uint8)
        self.address = self._memory.ctypes.data
        self._wakers = wakers
        output = (0, 0) if spoiled is None else (spoiled.ctypes.data, spoiled.nbytes)
        gates.shut(self.address, wakers, output)

    def open(self) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(gates.OPENER)(self.address)

    @property
    def done(self) -> bool:
        return gates.is_done(self.address)


class Ranks:
    """Two ranks that add up, each call with a gate at rank 0."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.data = [np.arange(COUNT, dtype=np.float32) * (rank + 1) for rank in range(2)]

    def gate(self) -> Gate:
        """One at rank 0, whose output is made NaN if the operation fails."""
        return Gate(self.network.engines[0].wakers, self.data[0])

    def submit(
        self, rank: int, gate: Gate | None = None, size: int = COUNT, timeout: float = 20.0
    ) -> int:
        per_packet = self.network.payload_bytes // 4
        plan = hierarchical.all_reduce(2, rank, size, per_packet)
        address = self.data[rank].ctypes.data
        call = EngineCall.of(plan).given(
            dtype=DType.F32, signature=plan.signature, timeout=timeout, delivery=Delivery(True)
        )
        engine = self.network.engines[rank]
        return engine.submit(call, address, address, gate=gate.address if gate else 0)

    def wait(self, rank: int, ticket: int, seconds: float = 10.0) -> int:
        end = time.monotonic() + seconds
        code = Code.PENDING
        while code == Code.PENDING and time.monotonic() < end:
            code = Code(self.network.engines[rank].wait(ticket, 0.05))
        return code

    def abort(self, ticket: int) -> None:
        """Ends rank 0's operation."""
        self.network.engines[0].abort(Code.ABORTED)
        assert self.wait(0, ticket) == Code.ABORTED


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Network(2) as network:
        yield Ranks(network)


def test_a_gate_may_be_opened_before_the_operation_is_there(ranks: Ranks) -> None:
    """Whoever opens it wakes an engine that finds nothing, and goes to sleep again."""
    gate = ranks.gate()
    gate.open()
    ticket = ranks.submit(1)
    assert ranks.wait(1, ticket, STILL) == Code.PENDING
    tickets = [ranks.submit(0, gate), ticket]
    # Nobody drives rank 0's engine: it has to be awake by itself.
    until(lambda: gate.done, "the operation ends")
    assert [ranks.wait(rank, tickets[rank]) for rank in range(2)] == [Code.OK] * 2


def test_an_operation_waits_for_its_gate(ranks: Ranks) -> None:
    gate = ranks.gate()
    ranks.data[0][:] = -1  # what the device has yet to write
    tickets = [ranks.submit(0, gate), ranks.submit(1)]
    assert ranks.wait(1, tickets[1], STILL) == Code.PENDING
    assert not gate.done
    ranks.data[0][:] = np.arange(COUNT)
    gate.open()
    assert [ranks.wait(rank, tickets[rank]) for rank in range(2)] == [Code.OK] * 2
    assert gate.done
    for rank in range(2):
        np.testing.assert_array_equal(ranks.data[rank], np.arange(COUNT) * 1.5)


def test_what_comes_later_waits_as_well(ranks: Ranks) -> None:
    """Operations start in the order of the calls, whichever gate is opened first."""
    first, second = ranks.gate(), ranks.gate()
    tickets = [ranks.submit(0, first), ranks.submit(0, second), ranks.submit(0)]
    others = [ranks.submit(1) for _ in range(3)]
    second.open()
    assert ranks.wait(0, tickets[1], STILL) == Code.PENDING
    assert not second.done
    first.open()
    for rank, mine in enumerate((tickets, others)):
        assert [ranks.wait(rank, ticket) for ticket in mine] == [Code.OK] * 3
    assert first.done
    assert second.done


def test_the_output_of_what_fails_is_no_number(ranks: Ranks) -> None:
    """So nobody takes half a result for a whole one; and the device is freed."""
    gate = ranks.gate()
    ticket = ranks.submit(0, gate)
    gate.open()
    assert ranks.wait(0, ticket, STILL) == Code.PENDING  # rank 1 doesn't call
    ranks.abort(ticket)
    assert gate.done
    assert np.isnan(ranks.data[0]).all()


def test_what_fails_before_its_input_is_there_is_no_number_either(ranks: Ranks) -> None:
    """The device writes its input after the failure, and then opens the gate."""
    gate = ranks.gate()
    ticket = ranks.submit(0, gate)
    ranks.abort(ticket)
    assert gate.done
    ranks.data[0][:] = 7
    gate.open()
    assert np.isnan(ranks.data[0]).all()


def test_what_is_not_to_be_spoiled_stays(ranks: Ranks) -> None:
    gate = Gate(ranks.network.engines[0].wakers)
    ranks.data[0][:] = 7
    ticket = ranks.submit(0, gate)
    ranks.abort(ticket)
    gate.open()
    assert (ranks.data[0] == 7).all()


def test_time_behind_a_gate_is_no_time_that_others_are_late(ranks: Ranks) -> None:
    gate = ranks.gate()
    tickets = [ranks.submit(0, gate), ranks.submit(0, timeout=STILL)]
    others = [ranks.submit(1), ranks.submit(1)]
    time.sleep(2 * STILL)
    gate.open()
    for rank, mine in enumerate((tickets, others)):
        assert [ranks.wait(rank, ticket) for ticket in mine] == [Code.OK] * 2


def test_a_gate_that_is_never_opened_holds_no_group_open(ranks: Ranks) -> None:
    gate = ranks.gate()
    ticket = ranks.submit(0, gate)
    ranks.abort(ticket)
    assert gate.done
    gate.open()  # by a copy that was under way


def test_a_mismatch_is_found_behind_a_gate(ranks: Ranks) -> None:
    gate = ranks.gate()
    tickets = [ranks.submit(0, gate, COUNT - 8), ranks.submit(1)]
    gate.open()
    assert ranks.wait(0, tickets[0]) == Code.MISMATCH
    assert gate.done


def test_many_gates_that_another_thread_opens(ranks: Ranks) -> None:
    """As the driver's threads do: no wake is lost, whatever the loop is at."""
    from threading import Thread

    opened: list[Gate] = []
    pending = [ranks.gate() for _ in range(200)]

    def open_all() -> None:
        for gate in pending:
            until(lambda gate=gate: gate in opened, "the operation is submitted")  # type: ignore[misc]
            gate.open()

    thread = Thread(target=open_all)
    thread.start()
    for gate in pending:
        tickets = [ranks.submit(0, gate), ranks.submit(1)]
        opened.append(gate)
        assert [ranks.wait(rank, tickets[rank]) for rank in range(2)] == [Code.OK] * 2
        assert gate.done
    thread.join()


def test_gates_outlive_their_host() -> None:
    with Network(2) as network:
        wakers = network.engines[0].wakers
        assert network.engines[0].wakers is wakers
        gate = Gate(wakers)
    gate.open()
    descriptors = wakers.descriptors
    assert all(os.fstat(one) for one in descriptors)
    del gate, wakers
    gc.collect()
    for one in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(one)
