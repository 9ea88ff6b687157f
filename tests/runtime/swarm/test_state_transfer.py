"""State transfers between peers over loopback: engines, a directory, threads of one process."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import pytest

from lossycoll.errors import LossyError, OperationTimeout
from lossycoll.options.fields import Options
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.swarm import state_transfer
from lossycoll.runtime.swarm.ice_agent import Route
from lossycoll.runtime.swarm.member import SwarmMember
from lossycoll.runtime.swarm.protocol import Member
from lossycoll.runtime.swarm.server import DirectoryServer
from lossycoll.runtime.swarm.state_transfer import CHUNK, MOST_DONATIONS, Snapshot
from tests.support.waiting import until

SECRET = Secret.of(b"a secret of tests")
SCHEMA = "5c" * 16
MOST = 1 << 28


class Peers:
    """Peers of a swarm, by name."""

    def __init__(self, stack: ExitStack, secret: Secret | None = None) -> None:
        self._stack = stack
        self._secret = secret
        self._server = DirectoryServer("127.0.0.1", 0, secret, patience=20.0)
        stack.callback(self._server.close)

    def come(self, name: str, schema: str = SCHEMA, inject: str = "") -> SwarmMember:
        place = ("127.0.0.1", self._server.port)
        options = Options(link="udp", inject=inject)
        one = SwarmMember([place], name=name, secret=self._secret, options=options)
        self._stack.callback(one.close)
        one.averages(schema)
        return one

    def donor(self, name: str, state: Snapshot, schema: str = SCHEMA) -> SwarmMember:
        one = self.come(name, schema)
        one.offers(lambda: state)
        one.client.names()  # the directory has heard of the offer
        return one


@pytest.fixture
def peers(stack: ExitStack) -> Peers:
    return Peers(stack)


def snapshot(chunks: int, seed: int = 0, number: int = 3) -> Snapshot:
    data = np.random.default_rng(seed).integers(0, 256, chunks * CHUNK - 77, np.uint8)
    return Snapshot(number, b"a skeleton", data)


def changed(one: Snapshot, *chunks: int) -> Snapshot:
    data = one.data.copy()
    for chunk in chunks:
        data[chunk * CHUNK + 5] ^= 1
    return Snapshot(one.round, one.skeleton, data)


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("inject", ["", "loss=0.05,seed=1"])
def test_a_newcomer_has_the_state_of_the_others(
    stack: ExitStack, secret: Secret | None, inject: str
) -> None:
    """From three at once; packets that are lost come again."""
    peers, state = Peers(stack, secret), snapshot(20)
    for name in "abc":
        peers.donor(name, state)
    taken = peers.come("newcomer", inject=inject).fetch_state(None, 4, MOST)
    assert taken is not None
    assert (taken.snapshot.round, taken.snapshot.skeleton) == (3, b"a skeleton")
    np.testing.assert_array_equal(taken.snapshot.data, state.data)
    assert taken.bytes == len(state.data)
    assert taken.donors == 3


def test_nobody_has_a_state(peers: Peers) -> None:
    peers.come("one without")
    assert peers.come("newcomer").fetch_state(None, 4, MOST) is None


def test_a_donor_out_of_reach_keeps_no_other_waiting(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each looks for a route from when all were told: a newcomer that tried one after the other
    would find none but the first."""
    state = snapshot(2)
    lost, *_ = [peers.donor(name, state).number for name in "abc"]
    newcomer = peers.come("newcomer")
    agent, looked = newcomer._endpoint.nat_agent, []
    finds = agent.find_routes

    def find_routes(members: Sequence[Member], own: str, timeout: float) -> dict[int, Route]:
        looked.append(([one.number for one in members], timeout))
        found = finds(members, own, timeout)
        found.pop(lost, None)
        return found

    monkeypatch.setattr(agent, "find_routes", find_routes)
    taken = newcomer.fetch_state(None, 4, MOST, 2.0)
    assert taken is not None
    assert taken.donors <= 2
    np.testing.assert_array_equal(taken.snapshot.data, state.data)
    ((members, timeout),) = looked
    assert sorted(members) == [0, 1, 2]
    assert timeout <= 2.0


def test_an_own_state_that_is_as_new_is_the_one_to_have(peers: Peers) -> None:
    state = dataclasses.replace(snapshot(2), samples=5)
    peers.donor("a", state)
    own = dataclasses.replace(changed(state, 1), samples=6)
    taken = peers.come("newcomer").fetch_state(own, 4, MOST)
    assert taken is not None
    assert taken.snapshot is own
    assert (taken.donors, taken.bytes) == (0, 0)


def test_only_what_has_changed_is_sent(peers: Peers) -> None:
    state = snapshot(6)
    peers.donor("a", state)
    taken = peers.come("newcomer").fetch_state(changed(state, 2), 4, MOST)
    assert taken is not None
    assert taken.bytes == CHUNK
    np.testing.assert_array_equal(taken.snapshot.data, state.data)


def test_no_more_than_so_many_donate_and_the_latest_come_first(peers: Peers) -> None:
    states = [snapshot(9, seed, 3) for seed in range(3)]
    for number, state in enumerate(states):
        peers.donor(str(number), state)
    taken = peers.come("newcomer").fetch_state(None, 1, MOST)
    assert taken is not None
    assert taken.donors == 1
    assert any(np.array_equal(taken.snapshot.data, state.data) for state in states)


def test_a_state_that_is_too_large_is_not_taken(peers: Peers) -> None:
    peers.donor("a", snapshot(3))
    with pytest.raises(LossyError, match="can't be taken"):
        peers.come("newcomer").fetch_state(None, 4, 2 * CHUNK)


def test_a_donor_whose_chunks_are_others_is_left(
    peers: Peers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says that it has what the others have."""
    state = snapshot(12)
    liar = changed(state, *range(12))
    honest = state.manifest()
    real = Snapshot.manifest
    monkeypatch.setattr(Snapshot, "manifest", lambda self: honest if self is liar else real(self))
    peers.donor("honest", state)
    peers.donor("liar", liar)
    caplog.set_level(logging.INFO, "lossycoll")
    taken = peers.come("newcomer").fetch_state(None, 4, MOST)
    assert taken is not None
    np.testing.assert_array_equal(taken.snapshot.data, state.data)
    assert taken.donors == 1
    assert "isn't what its digest says" in caplog.text, "the fault did not happen"


def test_a_donor_that_leaves_in_the_middle(
    peers: Peers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its chunks come from the other."""
    state = snapshot(40)
    leaves = peers.donor("leaves", state)
    peers.donor("stays", state)
    asked = threading.Event()
    real = state_transfer.Pair.move

    def slowly(pair: state_transfer.Pair, buffers: list[np.ndarray], sender: int) -> None:
        if sender == state_transfer.DONOR and len(buffers) > 1:
            asked.set()
            time.sleep(0.1)
        real(pair, buffers, sender)

    monkeypatch.setattr(state_transfer.Pair, "move", slowly)
    newcomer = peers.come("newcomer")
    caplog.set_level(logging.INFO, "lossycoll")
    closing = threading.Thread(target=lambda: asked.wait(20) and leaves.close())
    closing.start()
    taken = newcomer.fetch_state(None, 4, MOST)
    closing.join()
    assert taken is not None
    np.testing.assert_array_equal(taken.snapshot.data, state.data)
    assert "no more" in caplog.text or "not all of it" in caplog.text, "the fault did not happen"


@pytest.mark.parametrize("silently", [False, True])
def test_the_only_donor_leaves(silently: bool, peers: Peers) -> None:
    """Its engine says goodbye, or nothing: then the directory alone can tell the newcomer."""
    asked, goes = threading.Event(), threading.Event()

    def state() -> Snapshot:
        asked.set()
        goes.wait(20)
        return snapshot(2)

    one = peers.come("one")
    one.offers(state)
    one.client.names()
    newcomer = peers.come("newcomer")
    found: list[LossyError] = []

    def take() -> None:
        try:
            newcomer.fetch_state(None, 4, MOST)
        except LossyError as error:
            found.append(error)

    taking = threading.Thread(target=take)
    taking.start()
    assert asked.wait(20)
    leaving = threading.Thread(target=one.client.close if silently else one.close)
    leaving.start()
    if not silently:
        goes.set()
    leaving.join(20)
    taking.join(20)
    goes.set()
    assert found, "it still waits for a peer that has left"
    assert not isinstance(found[0], OperationTimeout)


def test_rounds_go_on_beside_a_transfer(peers: Peers) -> None:
    """Of all three, the newcomer and its donors."""
    state = snapshot(30)
    members = [peers.donor("a", state), peers.donor("b", state), peers.come("newcomer")]
    taken: list[object] = []
    works = [threading.Thread(target=lambda: taken.append(members[2].fetch_state(None, 4, MOST)))]
    values = [np.full(50_000, float(i), np.float32) for i in range(3)]

    def average(i: int) -> None:
        for _ in range(5):
            assert not members[i].average(values[i], 1.0, 40.0).failure

    works += [threading.Thread(target=average, args=(i,)) for i in range(3)]
    for work in works:
        work.start()
    for work in works:
        work.join(60)
        assert not work.is_alive()
    assert taken
    for one in values:
        np.testing.assert_allclose(one, 1.0, rtol=1e-6)


def test_a_donor_that_has_trouble_says_so_at_once(peers: Peers) -> None:
    def fails() -> Snapshot:
        raise KeyError("a hook of the training")

    one = peers.come("one")
    one.offers(fails)
    one.client.names()
    newcomer = peers.come("newcomer")
    began = time.monotonic()
    with pytest.raises(LossyError, match="can't send its state: 'a hook of the training'"):
        newcomer.fetch_state(None, 4, MOST, 30.0)
    peers.donor("another", snapshot(2))
    taken = newcomer.fetch_state(None, 4, MOST, 30.0)
    assert taken is not None
    assert time.monotonic() - began < 15


def test_more_newcomers_than_a_donor_serves_at_once(peers: Peers) -> None:
    """Those that are too many hear it, and don't wait."""
    served, begins = threading.Event(), []

    def state() -> Snapshot:
        begins.append(0)
        served.wait(20)
        return snapshot(1)

    one = peers.come("one")
    one.offers(state)
    one.client.names()
    newcomers = [peers.come(f"newcomer {i}") for i in range(MOST_DONATIONS + 2)]
    found: list[object] = []

    def take(newcomer: SwarmMember) -> None:
        try:
            found.append(newcomer.fetch_state(None, 4, MOST, 30.0))
        except LossyError as error:
            found.append(error)

    threads = [threading.Thread(target=take, args=(newcomer,)) for newcomer in newcomers]
    for thread in threads:
        thread.start()
    until(lambda: len(found) == 2)
    until(lambda: len(begins) == MOST_DONATIONS)
    assert all("a donor refuses" in str(error) for error in found), found
    served.set()
    for thread in threads:
        thread.join(20)
    assert len(found) == MOST_DONATIONS + 2
    assert sum(isinstance(one, state_transfer.TransferredState) for one in found) == MOST_DONATIONS


def test_a_quiet_donor_is_not_waited_for(peers: Peers) -> None:
    """All has come from the other; and what is never to come has its time."""
    goes = threading.Event()

    def state() -> Snapshot:
        goes.wait(20)
        return snapshot(1)

    quiet = peers.come("quiet")
    quiet.offers(state)
    quiet.client.names()
    newcomer = peers.come("newcomer")
    began = time.monotonic()
    try:
        with pytest.raises(OperationTimeout, match=r"hasn't come within [12]\.\d s"):
            newcomer.fetch_state(None, 4, MOST, 2.0)
        peers.donor("another", snapshot(2))
        taken = newcomer.fetch_state(None, 4, MOST, 30.0)
    finally:
        goes.set()
    assert taken is not None
    assert time.monotonic() - began < 10


def test_what_is_no_longer_offered_has_no_donor(peers: Peers) -> None:
    one = peers.donor("one", snapshot(1))
    one.averages(SCHEMA)  # anew: of another training, perhaps
    one.client.names()
    assert peers.come("newcomer").fetch_state(None, 4, MOST) is None


def test_a_donor_asked_for_what_there_is_not(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    peers.donor("a", snapshot(1))
    newcomer = peers.come("newcomer")
    caplog.set_level(logging.INFO, "lossycoll")
    (transfer,) = newcomer.client.transfers(1, 10.0)
    pair = newcomer._endpoint.transfers._pair(transfer, state_transfer.JOINER)
    head = np.zeros(2, np.uint64)
    pair.move([head.view(np.uint8)], state_transfer.DONOR)
    pair.move([np.empty(int(head[0]), np.uint8)], state_transfer.DONOR)
    asked = np.full(state_transfer.BATCH, state_transfer.NONE, np.uint32)
    asked[0] = 1000
    pair.move([asked.view(np.uint8)], state_transfer.JOINER)
    until(lambda: "chunk 1000 is asked for" in caplog.text)
    taken = newcomer.fetch_state(None, 1, MOST)
    assert taken is not None
    assert taken.bytes == len(snapshot(1).data)


def test_others_of_another_model_donate_nothing(peers: Peers) -> None:
    peers.donor("a", snapshot(1))
    newcomer = peers.come("newcomer")
    with pytest.raises(LossyError, match="you average something else"):
        newcomer.averages("ab" * 16)
