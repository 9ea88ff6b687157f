"""Messages beside a group's collectives: futures of theirs, and failures of theirs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from lossycoll.errors import LinkError
from lossycoll.plan import Topology
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.collectives.group_context import GroupContext
from lossycoll.runtime.collectives.point_to_point import Messages
from lossycoll.runtime.core.call import Collective
from lossycoll.runtime.engine.failures import Code, Failure
from lossycoll.runtime.world.group_state import Health
from tests.support.network import Network
from tests.support.waiting import until

ELEMENTS = 200_000
"""More than a small message has: its send too is done only when it has arrived."""


class End:
    """A rank's endpoint and messages, without a control plane."""

    def __init__(self, network: Network, rank: int) -> None:
        health = Health(
            rank,
            network.world,
            addresses=[f"host{other}" for other in range(network.world)],
            liveness=10.0,
            control=None,
            on_failure=lambda error: None,
        )
        self.engine = network.engines[rank]
        topology = Topology.flat(network.world)
        parts = GroupContext(health, network.options, 3, self.engine, None, topology)
        self.endpoint = Endpoint(parts, timeout=60.0)
        self.messages = Messages(
            self.engine, health, network.options, self.endpoint.operations.group_failure
        )
        self.data = np.full(ELEMENTS, rank, np.uint8)

    def post(self, name: str) -> Any:
        call = Collective(f"{name} 0", "uint8", ELEMENTS, "tag 0")
        message = call, self.data.ctypes.data, 1, 1 - self.endpoint.rank, 0
        is_send = name == "send to"
        return self.messages.post(*message, is_send=is_send, keep=self.data, timeout=60.0)

    def close(self) -> None:
        self.endpoint.close()
        self.messages.close()


def test_the_engine_names_messages_to_the_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher here does nothing but take what it is given, so nothing is noticed by looking."""
    with Network(2) as network:
        ends = [End(network, rank) for rank in range(2)]
        a, b = ends
        names = b.engine.completions
        asks, given = names.next, threading.Event()

        def wait_long() -> tuple[int, int]:
            given.set()
            while (found := asks())[0] == 0:
                pass
            return found

        monkeypatch.setattr(names, "next", wait_long)
        done: list[str] = []
        receive = b.post("receive from")
        receive.on_done(lambda: done.append(threading.current_thread().name))
        b.endpoint.watcher.complete(receive)
        assert given.wait(30)
        b.endpoint.watcher.complete(receive)  # it is asked for once
        send = a.post("send to")
        until(lambda: bool(done))
        assert done == ["lossycoll-complete"]
        assert receive.done
        assert not b.data.any()
        until(send.poll)
        # One that has ended in the engine, and of which nobody here knows.
        a.endpoint.watcher.complete(send)
        late = b.post("send to")
        a.post("receive from").wait(30)
        until(lambda: b.engine.outcome(late.ticket)[0] == Code.OK)
        assert not late.done
        b.endpoint.watcher.complete(late)
        until(lambda: late.done)
        assert not b.messages._transfers
        assert not b.endpoint.watcher._asked_for
        for end in ends:
            end.close()


@pytest.mark.parametrize("of_message", [True, False])
def test_a_dead_link_that_a_message_met_is_not_laid_on_a_collective(
    monkeypatch: pytest.MonkeyPatch, of_message: bool
) -> None:
    with Network(2) as network:
        end = End(network, 0)
        first, later = Collective("broadcast"), Collective("barrier")
        end.endpoint.health.issue(first)
        first.last_op, first.submitted = 0, 1
        end.endpoint.health.issue(later)
        failure = Failure(
            Code.LINK, peer=1, op=0, of_message=of_message, mine=(0, 0, 2_000_000_000)
        )
        monkeypatch.setattr(end.engine, "failure", lambda: failure)
        error = end.endpoint.operations.group_failure(later)
        assert isinstance(error, LinkError)
        assert "rank 1 (host1)" in str(error)
        assert ("broadcast" in str(error)) is not of_message
        assert "barrier" not in str(error)
        end.close()


def test_a_link_that_dies_under_a_message_says_so() -> None:
    with Network(2, liveness=0.5, deadline_max=0.5, deadline_min=0.1) as network:
        a = End(network, 0)
        network.engines[1].close()
        send = a.post("send to")
        with pytest.raises(LinkError, match="send to 0"):
            send.wait(60)
        failure = a.engine.failure()
        assert failure.code == Code.LINK
        assert failure.of_message
        a.close()
