"""What peers, strangers and directories may do that they shouldn't, and what comes of it."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from lossycoll.errors import ClosedError, LossyError, OperationTimeout
from lossycoll.runtime.control.transport import Transport
from lossycoll.runtime.net.interfaces import interfaces
from lossycoll.runtime.swarm import client
from lossycoll.runtime.swarm.directory_transport import TransportConnection, ZmqDirectoryTransport
from lossycoll.runtime.swarm.member import SwarmMember
from lossycoll.runtime.swarm.protocol import MOST_PEERS, VERSION, Here, Join, Ready, pack
from lossycoll.runtime.swarm.swarm import Swarm
from tests.runtime.swarm.test_member import NOTHING_MOVED, SCHEMA, directory, peers, together

SECRET = "a secret of tests"


def means(members: list[SwarmMember]) -> None:
    """A round of all of them is right."""
    values = [np.full(800, float(peer), np.float32) for peer in range(len(members))]
    reports = together(members, values)
    assert {one.failure for one in reports} == {""}
    assert all(np.allclose(one, np.mean(range(len(members)))) for one in values)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        b'["ready",' + b"1" + b"0" * 400 + b"]",
        b'["group",0,1,[]]',
        b"\xff\xfe",
        b"[" * 5000,
        pack(Ready(1.0)),
        pack(Here("::1", 5)) + b" ",
    ],
    ids=range(6),
)
def test_nothing_that_a_stranger_says_ends_the_directory(
    said: bytes, joins: bool, stack: ExitStack
) -> None:
    place = directory(stack, None)
    members = peers(stack, place, "ab", None)
    stranger = Transport()
    peer = stranger.connect(place)
    if joins:
        stranger.send(peer, pack(Join(VERSION, "stranger", "7" * 32, MOST_PEERS, "0" * 16, 0)))
        stranger.send(peer, pack(Here("127.0.0.1", 9)))
    stranger.send(peer, said)
    end = time.monotonic() + 0.1
    while (left := end - time.monotonic()) > 0:
        stranger.poll(left)
    means(members)
    stranger.close()
    means(members)


def test_a_directory_that_never_answers_is_none(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CONNECT_SECONDS", 0.3)
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    place = directory(stack, None)
    one = SwarmMember([("127.0.0.1", silent.getsockname()[1]), place], name="a", timeout=5.0)
    stack.callback(one.close)
    assert one.client.names() == ("a",)


def test_one_that_stands_by_says_whom_to_ask(stack: ExitStack) -> None:
    first = stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET, name="a"))
    second = stack.enter_context(Swarm("127.0.0.1:0", [first.address], secret=SECRET, name="b"))
    for swarm in (first, second):
        swarm.wait_for(2, 5.0)
    third = stack.enter_context(Swarm(join=[second.address], secret=SECRET, name="c"))
    assert second._server is not None
    assert not second._server._directory.peers
    third.wait_for(3, 5.0)
    assert first.peers() == second.peers() == third.peers() == ("a", "b", "c")
    third.member.client._broken.set()  # and so it is after its connection has broken
    third.member.client._nudge()
    assert third.peers() == ("a", "b", "c")


def test_all_addresses_are_told_as_one_that_others_reach(stack: ExitStack) -> None:
    others = [one for one in interfaces() if one.name != "lo" and ":" not in one.address]
    first = stack.enter_context(Swarm("0.0.0.0:0", secret=SECRET))
    assert first.member.address == first.address.rpartition(":")[0]
    if not others:
        pytest.skip("this machine has no interface but loopback")
    assert not first.address.startswith("127.")


def test_who_waits_is_told_when_the_swarm_is_closed(stack: ExitStack) -> None:
    place = directory(stack, None)
    one, _ = peers(stack, place, "ab", None)
    found: list[Any] = []

    def wait() -> None:
        try:
            one.average(np.zeros(100, np.float32), timeout=60.0)
        except LossyError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)  # it waits for the other
    one.close()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(found[0], ClosedError)
    for again in range(3):
        with pytest.raises(ClosedError, match="peer 'a' has left the swarm"):
            one.average(np.zeros(100, np.float32), timeout=60.0 + again)
    with pytest.raises(ClosedError):
        one.client.names()


def test_a_round_that_is_on_ends_when_the_swarm_is_closed(stack: ExitStack) -> None:
    """The other member never takes part, so that the engine waits."""
    place = directory(stack, None)
    one, other = peers(stack, place, "ab", None)
    entered, leave = threading.Event(), threading.Event()

    def stay(paths: Any, group: Any, *rest: object) -> object:
        paths.begin_round(group.number, group.members)
        entered.set()
        leave.wait(20)
        return NOTHING_MOVED

    other._exchange = stay  # type: ignore[assignment]
    reports: list[Any] = []

    def average(who: SwarmMember) -> None:
        reports.append(who.average(np.zeros(900, np.float32)))

    threads = [
        threading.Thread(
            target=lambda who=who: reports.append(who.average(np.zeros(900, np.float32)))
        )  # type: ignore[misc]
        for who in (one, other)
    ]
    for thread in threads:
        thread.start()
    assert entered.wait(10)
    time.sleep(0.2)
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < 5
    leave.set()
    for thread in threads:
        thread.join(10)
    assert "destroyed" in next(one.failure for one in reports if one.failure)


def test_two_threads_average_one_after_the_other(stack: ExitStack) -> None:
    (one,) = peers(stack, directory(stack, None), "a", None)
    threads = [
        threading.Thread(target=lambda: one.average(np.zeros(100, np.float32))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert one.average(np.zeros(100, np.float32)).round == 4


def test_without_a_directory_nobody_turns_in_circles(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as ends:
        place = directory(ends, None)
        (one,) = peers(stack, place, "a", None)
    tries = []
    reach = ZmqDirectoryTransport.reach

    def counted(self: ZmqDirectoryTransport, *rest: Any) -> TransportConnection:
        tries.append(rest)
        return reach(self, *rest)

    monkeypatch.setattr(ZmqDirectoryTransport, "reach", counted)
    for _ in range(20):
        with pytest.raises(OperationTimeout, match="no answer of a directory for 0"):
            one.client.names(0.05)
    assert 1 <= len(tries) < 10


def test_a_member_that_cannot_be_reached_costs_its_share(stack: ExitStack) -> None:
    """Its address is of another family than the others'."""
    place = directory(stack, None)
    members = peers(stack, place, "abc", None)
    members[2].client.say(Here("::1", 4711))
    members[2]._exchange = lambda *rest: NOTHING_MOVED  # type: ignore[assignment]
    time.sleep(0.2)
    values = [np.full(20_000, float(peer), np.float32) for peer in range(3)]
    reports = together(members, values)
    assert [one.failure for one in reports[:2]] == ["", ""]
    assert (values[0] == 0.5).mean() > 0.6


def test_paths_to_those_that_have_gone_are_forgotten(stack: ExitStack) -> None:
    place = directory(stack, None)
    (one,) = peers(stack, place, "a", None)
    for turn in range(6):
        (other,) = peers(stack, place, [f"b{turn}"], None)
        means([one, other])
        other.close()
    (last,) = peers(stack, place, "z", None)
    means([one, last])
    means([one, last])
    assert len(one._endpoint.paths._known) == 1
    assert len(one._endpoint.paths._over) <= 2
    assert one.said is not None
    assert one.said.schema == SCHEMA


def test_who_was_out_of_sight_of_another_directory_is_met_again(stack: ExitStack) -> None:
    """Parts of a split network hear from their own directory that the others have gone. When a
    directory has them all, they are there, by the same incarnations."""
    place = directory(stack, None)
    members = peers(stack, place, "ab", None)
    values = [np.full(100, float(i), np.float32) for i in range(2)]
    together(members, values)
    for member in members:
        for incarnation in list(member.client._partners.values()):
            member.gone(incarnation)
    assert all(map(members[0]._endpoint.paths.has_gone, members[0].client._partners.values()))
    for one, value in zip(values, (1.0, 3.0), strict=True):
        one.fill(value)
    reports = together(members, values)
    assert [one.contributions for one in reports] == [2.0, 2.0]
    assert [float(one[0]) for one in values] == [2.0, 2.0]
