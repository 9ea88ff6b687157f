"""Swarms that meet by a valkey server: nobody listens, whoever goes, the server included."""

from __future__ import annotations

import contextlib
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lossycoll.errors import OperationTimeout, OptionError, RendezvousError
from lossycoll.options.fields import Options
from lossycoll.runtime.swarm.ice_agent import DIRECTORY, ConnectivityMessage, Kind, Sends
from lossycoll.runtime.swarm.member import RoundReport
from lossycoll.runtime.swarm.nat_agent import NatAgent
from lossycoll.runtime.swarm.protocol import DirectoryStatus, Here, Serves, pack
from lossycoll.runtime.swarm.swarm import Swarm
from lossycoll.runtime.swarm.valkey_relay import _ClientConnection
from lossycoll.runtime.swarm.valkey_server import Notices, ValkeyServer, ValkeyUrl
from tests.runtime.swarm.test_member import SCHEMA, together
from tests.runtime.swarm.test_swarm import Peer
from tests.support.swarm_peer import VALUES
from tests.support.valkey import Server
from tests.support.waiting import until

SECRET = "a secret of tests"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("valkey", reason="the package valkey isn't installed")
    made = Server(tmp_path)
    yield made
    made.close()


@pytest.fixture
def join(server: Server, stack: ExitStack) -> Callable[..., Swarm]:
    """A peer that joins, and averages."""

    def joined(name: str, prefix: str = "tests", secret: str | None = SECRET) -> Swarm:
        swarm = Swarm(join=[server.url(prefix)], secret=secret, name=name)
        stack.callback(swarm.close)
        swarm.member.averages(SCHEMA)
        return swarm

    return joined


def means(swarms: Sequence[Swarm]) -> list[RoundReport]:
    """A round of all of them is right."""
    values = [np.full(800, float(peer), np.float32) for peer in range(len(swarms))]
    reports = together([swarm.member for swarm in swarms], values)
    assert {one.failure for one in reports} == {""}
    assert {len(one.members) for one in reports} == {len(swarms)}
    assert all(np.allclose(one, np.mean(range(len(swarms)))) for one in values)
    return reports


def serving(swarms: Sequence[Swarm]) -> list[Swarm]:
    """Those whose directory serves."""
    found = [(swarm, swarm._relay._directory) for swarm in swarms if swarm._relay is not None]
    return [swarm for swarm, own in found if own is not None and not own.over]


@pytest.mark.in_clear
@pytest.mark.parametrize("secret", [None, SECRET], ids=["clear", "sealed"])
def test_rounds_have_the_exact_mean_and_nobody_listens(
    secret: str | None, server: Server, stack: ExitStack
) -> None:
    swarms = []
    for name in "abcd":
        swarms.append(Swarm(join=[server.url()], secret=secret, name=name))
        stack.callback(swarms[-1].close)
    for swarm in swarms:
        swarm.member.averages(SCHEMA, "2x2")
    swarms[0].wait_for(4)
    generator = np.random.default_rng(1)
    values = [generator.standard_normal(5000).astype(np.float32) for _ in swarms]
    mean = np.mean(values, axis=0)
    for number in range(2):
        reports = together([swarm.member for swarm in swarms], values)
        assert {one.round for one in reports} == {number}
        assert {(one.failure, len(one.members)) for one in reports} == {("", 2)}
    for one in values:
        np.testing.assert_allclose(one, mean, rtol=0, atol=1e-6)
    assert len(serving(swarms)) == 1
    with pytest.raises(RendezvousError, match="doesn't listen"):
        _ = swarms[0].address
    assert all(set(swarm.stats().values()) == {0} for swarm in swarms)


def test_nobody_reserves_a_port_or_waits_for_a_reflexive_address(
    join: Callable[..., Swarm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notice elects, and nobody is there that could see where packets come from."""
    said: list[ConnectivityMessage] = []
    say = NatAgent._say

    def heard(nat_agent: NatAgent, sends: Sends) -> None:
        said.extend(message for _, message in sends)
        say(nat_agent, sends)

    monkeypatch.setattr(NatAgent, "_say", heard)
    swarms = [join(name) for name in "ab"]
    means(swarms)
    assert {one.kind for one in said} >= {Kind.CHECK, Kind.NOMINATE}
    assert DIRECTORY not in {one.receiver for one in said}
    for swarm in swarms:
        member = swarm.member
        assert swarm._reserved is None
        assert swarm._server is None
        assert member._endpoint.nat_agent.reflexive_address(1e6) is None
        here = member.client._standing[Here]
        assert isinstance(here, Here)
        assert ((here.host, here.port), here.others) == (member._endpoint.place, ())
        assert Serves not in member.client._standing
    (first,) = serving(swarms)
    assert first._relay is not None
    assert first._relay._directory is not None
    assert first._relay._directory._directory.directories() == ()


def test_who_asks_as_another_directory_is_none_of_the_swarm(
    join: Callable[..., Swarm], server: Server
) -> None:
    swarms = [join(name, secret=None) for name in "ab"]
    (first,) = serving(swarms)
    assert first._relay is not None
    assert first._relay._directory is not None
    channel = f"lossycoll:tests:{first._relay._directory._inbox}"
    session = swarms[0].member.session
    rival = DirectoryStatus(session, "0" * 16, 0, 5, 100, 0, "", "same", "127.0.0.1", 7000, 0)
    client = server.client()
    with contextlib.closing(client.pubsub()) as heard:
        heard.subscribe(f"lossycoll:tests:{'7' * 32}")
        client.publish(channel, bytes.fromhex("7" * 32) + pack(rival))
        until(lambda: not first._relay._directory.service._strangers)  # type: ignore[union-attr]
        time.sleep(0.2)
        found = [heard.get_message(timeout=0.1) for _ in range(3)]
    assert {one["type"] for one in found if one} == {"subscribe"}
    means(swarms)


def test_another_peer_s_directory_takes_over_when_one_leaves(join: Callable[..., Swarm]) -> None:
    swarms = [join(name) for name in "abc"]
    session = swarms[0].member.session
    rounds = [means(swarms)[0].round]
    while len(swarms) > 1:
        (first,) = serving(swarms)
        swarms.remove(first)
        first.close()
        until(lambda: len(swarms[0].peers()) == len(swarms))
        rounds.append(means(swarms)[0].round)
        assert len(serving(swarms)) == 1
    swarms.append(join("d"))
    rounds.append(means(swarms)[0].round)
    assert rounds == sorted(set(rounds))
    assert {swarm.member.session for swarm in swarms} == {session}


def test_swarms_of_two_prefixes_know_nothing_of_each_other(join: Callable[..., Swarm]) -> None:
    ones, others = [[join(name, prefix) for name in "ab"] for prefix in ("one", "another")]
    for swarms in (ones, others):
        means(swarms)
        assert swarms[0].peers() == ("a", "b")
    assert ones[0].member.session != others[0].member.session
    for swarm in ones:
        swarm.close()
    means(others)


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param(0, id="directory"),
        pytest.param(2, id="another", marks=pytest.mark.long),
    ],
)
def test_a_peer_that_is_killed_is_not_missed_for_long_and_comes_back(
    killed: int, server: Server, stack: ExitStack
) -> None:
    """SIGKILL, to the one whose directory serves, and to one that has none."""
    peers = [Peer(server.url(), "peer 0", 0.0)]
    stack.callback(lambda: [peer.kill() for peer in peers if peer.process.poll() is None])
    until(lambda: server.client().get("lossycoll:tests"), "its directory serves", seconds=60)
    watch = Swarm(join=[server.url()], secret=SECRET, name="watch", timeout=60.0)
    stack.callback(watch.close)
    peers += [Peer(server.url(), f"peer {number}", float(number)) for number in (1, 2)]
    watch.wait_for(4, 60.0)
    assert not serving([watch])
    peers.pop(killed).kill()
    until(lambda: f"peer {killed}" not in _peers(watch), seconds=20)
    peers.append(Peer(server.url(), f"peer {killed}", 7.0))  # of the same name
    until(lambda: len(_peers(watch)) == 4, seconds=60)
    watch.member.averages(SCHEMA)
    values = np.zeros(VALUES, np.float32)
    until(lambda: len(watch.member.average(values, 1.0, 20.0).members) == 4, seconds=60)
    done = [peer.end() for peer in peers]
    for told in done:
        assert [one["round"] for one in told] == sorted({one["round"] for one in told})
        assert not [one for one in told[:-2] if one["failure"]]


@pytest.mark.long
def test_a_directory_whose_peer_is_frozen_is_replaced(server: Server, stack: ExitStack) -> None:
    """It listens, so the server's clock alone says so; when it goes on, it is a peer as others."""
    frozen = Peer(server.url(), "frozen", 5.0)
    stack.callback(lambda: frozen.process.poll() is None and frozen.kill())
    assert select.select([frozen.process.stdout], [], [], 60)[0]  # it has had a round
    swarms = [Swarm(join=[server.url()], secret=SECRET, name=name) for name in "ab"]
    for swarm in swarms:
        stack.callback(swarm.close)
        swarm.member.averages(SCHEMA)
    swarms[0].wait_for(3)
    assert not serving(swarms)
    frozen.process.send_signal(signal.SIGSTOP)
    until(lambda: serving(swarms), "another one serves", seconds=60)
    until(lambda: _peers(swarms[0]) == _peers(swarms[1]) == ("a", "b"), seconds=30)
    frozen.process.send_signal(signal.SIGCONT)
    until(lambda: len(_peers(swarms[0])) == 3, seconds=30)
    assert len(serving(swarms)) == 1
    assert len(frozen.end()) > 0


def _peers(swarm: Swarm) -> tuple[str, ...]:
    """Nobody, as long as no directory answers."""
    try:
        return swarm.peers(5.0)
    except OperationTimeout:
        return ()


def test_a_server_that_is_killed_is_a_typed_error_and_then_a_pause(
    server: Server, join: Callable[..., Swarm]
) -> None:
    swarms = [join(name) for name in "abc"]
    session, before = swarms[0].member.session, means(swarms)[0].round
    server.kill()
    until(lambda: not serving(swarms), "the directory ends with its server")
    place = f"127.0.0.1:{server.port}"
    for timeout, why in ((0.3, ""), (1.5, " .*refused")):
        began = time.monotonic()
        with pytest.raises(OperationTimeout, match=f"no answer .* tried: {place}{why}"):
            swarms[0].member.average(np.zeros(100, np.float32), 1.0, timeout)
        assert time.monotonic() - began < timeout + 5
    with pytest.raises(RendezvousError, match=f"no directory answers at {place} .*refused"):
        Swarm(join=[server.url()], secret=SECRET, timeout=0.5)
    assert server.start()
    until(lambda: len(_peers(swarms[0])) == 3, "all are back", seconds=20)
    swarms.append(join("d"))
    assert means(swarms)[0].round > before
    assert {swarm.member.session for swarm in swarms} == {session}


@pytest.mark.long
def test_a_server_that_answers_nothing_is_a_typed_error(
    server: Server, join: Callable[..., Swarm]
) -> None:
    """Its connections stay, so that nothing but the clock says so."""
    swarms = [join(name) for name in "ab"]
    means(swarms)
    server.freeze()
    began = time.monotonic()
    with pytest.raises(OperationTimeout, match="no answer of a directory for 1 s"):
        swarms[0].member.average(np.zeros(100, np.float32), 1.0, 1.0)
    swarms.pop().close()
    assert time.monotonic() - began < 30
    server.thaw()
    swarms.append(join("c"))
    until(lambda: _peers(swarms[0]) == ("a", "c"), seconds=30)
    means(swarms)


def test_connections_that_the_server_ends_are_made_anew(
    server: Server, join: Callable[..., Swarm]
) -> None:
    """What was published meanwhile is lost for good: nobody may take such a channel for whole."""
    swarms = [join(name) for name in "abc"]
    for kind in ("pubsub", "normal"):
        means(swarms)
        assert server.client().execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        until(lambda: len(_peers(swarms[0])) == 3, seconds=20)
    assert means(swarms)[0].round >= 2


def test_a_server_that_forgets_all_costs_nothing(
    server: Server, join: Callable[..., Swarm]
) -> None:
    swarms = [join(name) for name in "ab"]
    (first,) = serving(swarms)
    server.client().flushall()
    until(lambda: server.client().get("lossycoll:tests"), "the notice is back")
    swarms.append(join("c"))
    means(swarms)
    assert serving(swarms) == [first]


@pytest.mark.parametrize("serves", [False, True])
def test_news_are_believed_as_far_as_to_ask(serves: bool, server: Server, stack: ExitStack) -> None:
    """Of another directory: a connection ends if nobody listens to its own directory's inbox."""
    address = ValkeyUrl.of(server.url())
    reached = ValkeyServer(address)
    stack.callback(reached.close)
    notices = Notices(reached, address.prefix, None)
    if serves:
        stack.callback(reached.listen(notices.channel("5" * 32)).close)
    connection = _ClientConnection(notices, "5" * 32)
    stack.callback(connection.close)
    assert not connection.broken
    server.client().publish(notices.news, b"whatever")
    if serves:
        server.client().publish(notices.channel(connection.incarnation.hex()), b"after it")
        until(lambda: connection.read() == [b"after it"])
        assert not connection.broken
    else:
        until(lambda: connection.broken)


def test_who_has_another_secret_stays_outside(server: Server, join: Callable[..., Swarm]) -> None:
    swarms = [join(name) for name in "ab"]
    for secret in (None, "another secret of tests"):
        with pytest.raises(
            RendezvousError, match=r"of the same secret.*has another secret, or none"
        ):
            Swarm(join=[server.url()], secret=secret, name="c", timeout=1.5)
    means(swarms)
    assert swarms[0].peers() == ("a", "b")


def test_passwords(tmp_path: Path, stack: ExitStack) -> None:
    pytest.importorskip("valkey", reason="the package valkey isn't installed")
    server = Server(tmp_path, "pass/word")
    stack.callback(server.close)
    swarm = Swarm(join=[server.url(login=":pass%2Fword@")], secret=SECRET)
    stack.callback(swarm.close)
    assert len(swarm.peers()) == 1
    for login, why in (("", "Authentication required"), (":wrong@", "invalid username-password")):
        with pytest.raises(RendezvousError, match=f"{why}") as error:
            Swarm(join=[server.url(login=login)], secret=SECRET, timeout=0.3)
        assert "wrong" not in str(error.value)


def test_addresses_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("h:1", "h:1/", "h:1/a/b", "h:x/a", "/a", "h:1/" + "a" * 65, "h:1/a?b=c", "h:1/ä"):
        with pytest.raises(OptionError, match="is no valkey://host:port/prefix") as error:
            Swarm(join=[f"valkey://me:hidden@{text}"], secret=SECRET)
        assert "hidden" not in str(error.value)
    one = "valkey://127.0.0.1:1/a"
    places: list[dict[str, Any]] = [{"join": [one, one]}, {"join": [one, "127.0.0.1:7000"]}]
    for arguments in (*places, {"join": [one], "listen": "127.0.0.1:0"}):
        with pytest.raises(OptionError, match="has this one place: join="):
            Swarm(secret=SECRET, **arguments)
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(OptionError, match=r"needs the package valkey: pip install 'lossycoll\[val"):
        Swarm(join=[one], secret=SECRET, options=Options(link="udp"))
