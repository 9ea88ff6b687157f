"""Peers that average over loopback: engines, a directory, and rounds, in threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lossycoll.errors import LossyError, OperationTimeout, RendezvousError
from lossycoll.options.fields import Options
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.swarm.client import DirectoryClient
from lossycoll.runtime.swarm.directory import FIRST_GRACE
from lossycoll.runtime.swarm.member import RoundReport, SwarmMember
from lossycoll.runtime.swarm.paths import Paths
from lossycoll.runtime.swarm.protocol import Group
from lossycoll.runtime.swarm.server import DirectoryServer
from tests.support.waiting import until

SECRET = Secret.of(b"a secret of tests")
SCHEMA = "5c" * 16
NOTHING_MOVED = SimpleNamespace(contributions=1.0, kept=1.0, refused=())
"""An exchange that a test has stood in for."""


def directory(stack: ExitStack, secret: Secret | None, *shape: int) -> tuple[str, int]:
    server = DirectoryServer("127.0.0.1", 0, secret, shape=shape, patience=20.0)
    stack.callback(server.close)
    return "127.0.0.1", server.port


def peers(
    stack: ExitStack,
    place: tuple[str, int],
    names: Sequence[str],
    secret: Secret | None,
    **options: Any,
) -> list[SwarmMember]:
    made = []
    for name in names:
        one = SwarmMember([place], name=name, secret=secret, options=Options(link="udp", **options))
        one.averages(SCHEMA)
        stack.callback(one.close)
        made.append(one)
    return made


def alone(stack: ExitStack, name: str) -> SwarmMember:
    """A peer of a swarm of its own."""
    one = SwarmMember([directory(stack, None)], name=name)
    stack.callback(one.close)
    return one


def together(
    members: Sequence[SwarmMember],
    values: Sequence[np.ndarray[Any, Any]],
    weights: Sequence[float] = (),
) -> list[RoundReport]:
    """One round of all."""
    out: list[Any] = [None] * len(members)

    def work(i: int) -> None:
        try:
            out[i] = members[i].average(values[i], (weights or [1.0] * len(members))[i], 20.0)
        except LossyError as error:
            out[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(one, RoundReport) for one in out), out
    return out


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OperationTimeout])
def test_a_wait_for_a_group_that_ends_early_is_no_readiness(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory may still take the peer for ready: it comes anew."""

    def ends(*rest: Any) -> None:
        raise error("enough")

    transport: Any = SimpleNamespace(wake=lambda: None)
    client = DirectoryClient([("127.0.0.1", 9)], "a", transport)
    monkeypatch.setattr(client, "_awaited", ends)
    client._in_round = True
    with pytest.raises(error):
        client.next_group(1.0, 5.0)
    assert client._broken.is_set()
    assert not client._in_round
    assert not client._pending


@pytest.mark.parametrize("secret", [None, SECRET], ids=["clear", "sealed"])
@pytest.mark.parametrize("shape", [(2, 2), (4,)])
def test_a_full_grid_has_the_exact_mean(
    shape: tuple[int, ...], secret: Secret | None, stack: ExitStack
) -> None:
    place = directory(stack, secret, *shape)
    members = peers(stack, place, "abcd", secret)
    generator = np.random.default_rng(1)
    values = [generator.standard_normal(5000).astype(np.float32) for _ in members]
    mean = np.mean(values, axis=0)
    for number in range(len(shape)):
        reports = together(members, values)
        assert {one.round for one in reports} == {number}
        assert {one.failure for one in reports} == {""}
        assert {len(one.members) for one in reports} == {shape[number]}
        assert {one.contributions for one in reports} == {float(shape[number])}
    for one in values:
        np.testing.assert_allclose(one, mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["clear", "sealed"])
def test_values_count_by_their_weights(secret: Secret | None, stack: ExitStack) -> None:
    members = peers(stack, directory(stack, secret), "abc", secret)
    generator = np.random.default_rng(2)
    values = [generator.standard_normal(3000).astype(np.float32) for _ in members]
    weights = [1.0, 0.0, 2.5]
    wanted = np.average(values, axis=0, weights=weights)
    together(members, values, weights)
    for one in values:
        np.testing.assert_allclose(one, wanted, rtol=0, atol=2e-6)


def test_lost_packets_cost_contributions_and_no_scale(stack: ExitStack) -> None:
    """Whatever is lost, and whatever the weights: a mean is of some peers' values."""
    members = peers(stack, directory(stack, None), "abcd", None, inject="loss=0.2,seed=5", repair=0)
    weights, losses = [1.0, 3.0, 0.5, 2.0], 0
    for _ in range(6):
        values = [np.full(40_000, 1.0 + peer, np.float32) for peer in range(4)]
        reports = together(members, values, weights)
        losses += sum(one.contributions < 4 for one in reports)
        for one in values:
            assert one.min() >= 1 - 1e-5
            assert one.max() <= 4 + 1e-5
        same = [np.full(40_000, 7.0, np.float32) for _ in members]
        together(members, same, weights)
        assert all(np.allclose(one, 7.0, rtol=1e-6) for one in same)
    assert losses > 10


def test_values_that_cannot_be_are_left_alone(stack: ExitStack) -> None:
    """What one peer makes of its values costs the packets that have them, and nothing else."""
    members = peers(stack, directory(stack, None), "ab", None)
    values = [np.full(10_000, 1.0, np.float32), np.full(10_000, 3.0, np.float32)]
    values[1][5000] = np.nan
    values[1][9000] = np.inf
    reports = together(members, values)
    for one, own in zip(values, (1.0, 3.0), strict=True):
        kept = one != 2.0
        assert 0 < kept.sum() < 1000
        assert set(one[kept][np.isfinite(one[kept])]) == {own}
    assert 0 < reports[0].kept < 0.1


def test_who_comes_later_takes_part_from_then_on(stack: ExitStack) -> None:
    place = directory(stack, SECRET)
    members = peers(stack, place, "ab", SECRET)
    for count in (3, 4, 5):
        values = [np.full(500, float(peer), np.float32) for peer in range(len(members))]
        together(members, values)
        assert all(np.allclose(one, np.mean(range(len(members)))) for one in values)
        members += peers(stack, place, [f"peer {count}"], SECRET)


def test_who_leaves_is_not_waited_for_and_may_come_again(stack: ExitStack) -> None:
    place = directory(stack, SECRET)
    members = peers(stack, place, "abc", SECRET)
    for turn in range(3):
        values = [np.full(500, float(peer), np.float32) for peer in range(3)]
        together(members, values)
        assert all(np.allclose(one, 1.0) for one in values)
        members.pop(1).close()
        pair = [np.full(500, 1.0, np.float32), np.full(500, 2.0, np.float32)]
        began = time.monotonic()
        together(members, pair)
        assert time.monotonic() - began < FIRST_GRACE
        assert all(np.allclose(one, 1.5) for one in pair)
        members.insert(1, *peers(stack, place, [f"b, started {turn}"], SECRET))


def test_a_peer_that_dies_in_a_round_costs_its_share_alone(stack: ExitStack) -> None:
    """It says that it is ready, and is never heard of by the engine."""
    place = directory(stack, None)
    members = peers(stack, place, "abc", None)
    members[2]._exchange = lambda *rest: members[2].client.close() or NOTHING_MOVED  # type: ignore
    values = [np.full(20_000, float(peer), np.float32) for peer in range(3)]
    reports = together(members, values)
    assert [one.missing for one in reports[:2]] == [(2,), (2,)]
    assert [one.failure for one in reports[:2]] == ["", ""]
    for one in values[:2]:
        assert set(np.unique(one)) <= {0.0, 0.5, 1.0}
        assert (one == 0.5).mean() > 0.6  # of the rest the lost peer was to be the owner
    assert max(one.seconds for one in reports[:2]) < 5


@pytest.mark.parametrize(
    ("secret", "why"), [(None, "of the same secret"), (Secret.of(b"x" * 16), "of the same secret")]
)
def test_whoever_has_another_secret_stays_outside(
    secret: Secret | None, why: str, stack: ExitStack
) -> None:
    place = directory(stack, SECRET)
    members = peers(stack, place, "ab", SECRET)
    with pytest.raises(RendezvousError, match=why):
        SwarmMember([place], name="c", secret=secret, timeout=1.0)
    values = [np.full(500, float(peer), np.float32) for peer in range(2)]
    together(members, values)
    assert np.allclose(values[0], 0.5)


def test_refusals_and_addresses_that_are_dead(stack: ExitStack) -> None:
    place = directory(stack, None)
    peers(stack, place, "a", None)
    (other,) = [SwarmMember([place], name="b")]
    stack.callback(other.close)
    with pytest.raises(RendezvousError, match="peer 'b': you average something else than 'a'"):
        other.averages("77" * 16)
    with pytest.raises(RendezvousError, match="peer 'b': '3y3' is no grid"):
        SwarmMember.averages(alone(stack, "b"), SCHEMA, "3y3")
    assert other.client.names() == ("a", "b")
    with pytest.raises(RendezvousError, match="a peer named 'a' is there; choose another name"):
        SwarmMember([place], name="a")
    with pytest.raises(RendezvousError, match=r"no directory answers at 127.0.0.1:1 within 1 s"):
        SwarmMember([("127.0.0.1", 1)], name="c", timeout=1.0)
    with pytest.raises(RendezvousError, match=f"no directory at 127.0.0.1:{place[1]}: Address alr"):
        DirectoryServer("127.0.0.1", place[1])


def of_two_directories(
    stack: ExitStack, session: str = ""
) -> tuple[DirectoryServer, list[SwarmMember]]:
    """The one that is in use, and three peers that know another; ``session``: that one's."""
    first = DirectoryServer("127.0.0.1", 0, SECRET, patience=20.0)
    second = DirectoryServer("127.0.0.1", 0, SECRET, patience=20.0, session=session)
    stack.callback(first.close)
    stack.callback(second.close)
    places = [("127.0.0.1", one.port) for one in (first, second)]
    members = []
    for name in "abc":
        members.append(SwarmMember(places, name=name, secret=SECRET))
        stack.callback(members[-1].close)
        members[-1].averages(SCHEMA)
    return first, members


def test_a_directory_that_dies_costs_a_pause(stack: ExitStack) -> None:
    """Another one takes over, that knows nothing: peers say what they had."""
    first, members = of_two_directories(stack, session="5" * 16)
    rounds = []
    for turn in range(3):
        values = [np.full(500, float(peer), np.float32) for peer in range(3)]
        reports = together(members, values)
        assert all(np.allclose(one, 1.0) for one in values)
        rounds.append(reports[0].round)
        if turn == 0:
            first.close()
    assert rounds == [0, 1, 2]


def test_a_peer_that_dies_together_with_the_directory_is_not_waited_for(stack: ExitStack) -> None:
    """Nobody is left who was told both who was in the group and that one of it has gone. It dies
    when the others have a route to it, or they would miss that."""
    first, members = of_two_directories(stack)

    def die(paths: Paths, group: Group, *rest: object) -> object:
        assert not paths.begin_round(group.number, group.members)[1]
        first.close()
        members[2].client.close()
        return NOTHING_MOVED

    members[2]._exchange = die  # type: ignore[assignment]
    values = [np.full(20_000, float(peer), np.float32) for peer in range(3)]
    reports = together(members, values)
    assert [one.missing for one in reports[:2]] == [(2,), (2,)]
    assert [one.failure for one in reports[:2]] == ["", ""]


def test_one_that_was_frozen_or_timed_out_takes_part_again(stack: ExitStack) -> None:
    """Others have been told that it is lost; and one that gave up waiting isn't waited for."""
    place = directory(stack, SECRET)
    members = peers(stack, place, "abc", SECRET)
    for turn in range(3):
        values = [np.full(500, float(peer), np.float32) for peer in range(3)]
        if turn == 1:
            members[1].client._broken.set()  # as a directory does to one that is overdue
            members[1].client._nudge()
        if turn == 2:
            with pytest.raises(OperationTimeout, match=r"peer 1: no round began within 0\.2 s"):
                members[1].average(values[1], 1.0, timeout=0.2)
        # It asks over its new connection, by which it has said all else before.
        until(lambda: members[1].client._broken.is_set() is False)
        until(lambda: members[1].client.names() == ("a", "b", "c"))
        reports = together(members, values)
        assert {one.failure for one in reports} == {""}
        assert all(np.allclose(one, 1.0) for one in values)


def test_peers_that_meet_anew_have_new_keys(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same incarnations, too: numbers of packets begin anew, and are never used twice."""
    keys: list[bytes] = []
    admit = Host.admit

    def noting(host: Host, process: int, peer: Any, secrets: bytes = b"") -> None:
        keys.append(secrets)
        admit(host, process, peer, secrets)

    monkeypatch.setattr(Host, "admit", noting)
    members = peers(stack, directory(stack, SECRET), "ab", SECRET)
    for turn in range(2):
        values = [np.full(800, float(peer), np.float32) for peer in range(2)]
        assert {one.failure for one in together(members, values)} == {""}
        assert all((each == 0.5).all() for each in values)
        assert len(keys) == 2 + 2 * turn
        for one in members:
            one._endpoint.nat_agent.forget(1 - one.number)
    halves = [{key[:32], key[32:]} for key in keys]
    assert halves[0] == halves[1]
    assert halves[2] == halves[3]
    assert not halves[0] & halves[2]
