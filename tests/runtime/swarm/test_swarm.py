"""A swarm as scripts join it: by addresses, in threads of one process and in processes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lossycoll.errors import OptionError, RendezvousError
from lossycoll.runtime.swarm import client, directory_list, partition_merge
from lossycoll.runtime.swarm import swarm as swarm_module
from lossycoll.runtime.swarm.partition_merge import PartitionMerge
from lossycoll.runtime.swarm.swarm import Swarm
from tests.runtime.swarm.test_member import SCHEMA, together
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
SECRET = "a secret of tests"
HERE = "127.0.0.1"
AHEAD = ["unshare", "--map-root-user", "--time", "--fork", "--kill-child", "--monotonic=100000000"]


def test_peers_join_by_address_and_see_one_another(stack: ExitStack) -> None:
    first = stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET, name="first"))
    assert first.peers() == ("first",)
    second = stack.enter_context(Swarm(join=[first.address], secret=SECRET, name="second"))
    first.wait_for(peers=2, timeout=5.0)
    assert second.peers() == ("first", "second")
    with pytest.raises(RendezvousError, match=r"2 peers after 0.2 s, wanted 3: first, second"):
        first.wait_for(peers=3, timeout=0.2)
    with pytest.raises(RendezvousError, match="peer 'second' doesn't listen"):
        _ = second.address
    second.close()
    second.close()
    until(lambda: first.peers() == ("first",))
    with pytest.raises(RendezvousError, match="peer 'second' has left the swarm"):
        second.peers()


def test_a_directory_that_opens_while_its_swarm_ends_is_closed(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member's thread may take over for a peer that leaves at the same time."""
    first = stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET, name="first"))
    second = Swarm(join=[first.address], secret=SECRET, name="second")
    first.wait_for(2, 5.0)
    member, close = second.member, second.member.close
    assert second._reserved is not None
    place = member.address, second._reserved.port

    def open_and_close() -> None:
        second._open(member, place)
        close()

    monkeypatch.setattr(member, "close", open_and_close)
    second.close()
    assert second._server is not None
    assert second._server._stop


def test_any_interface_is_joined_by_an_address_that_others_can_reach(stack: ExitStack) -> None:
    first = stack.enter_context(Swarm("0.0.0.0:0", secret=SECRET))
    assert not first.address.startswith("0.0.0.0")
    stack.enter_context(Swarm(join=[first.address], secret=SECRET))
    first.wait_for(2, 5.0)


def test_directories_take_over_from_one_another(stack: ExitStack) -> None:
    """The first peer ends, and its directory with it; a newcomer comes to the second one."""
    swarms = [Swarm("127.0.0.1:0", secret=SECRET, name="0")]
    swarms += [
        Swarm("127.0.0.1:0", [swarms[0].address], secret=SECRET, name="1"),
        Swarm(join=[swarms[0].address], secret=SECRET, name="2"),
    ]
    for swarm in swarms:
        stack.callback(swarm.close)
        swarm.member.averages(SCHEMA)
    values = [np.full(500, float(peer), np.float32) for peer in range(3)]
    together([swarm.member for swarm in swarms], values)
    assert all(np.allclose(one, 1.0) for one in values)
    swarms.pop(0).close()
    swarms.append(Swarm(join=[swarms[0].address], secret=SECRET, name="3"))
    stack.callback(swarms[-1].close)
    swarms[-1].member.averages(SCHEMA)
    swarms[-1].wait_for(3, 10.0)
    values = [np.full(500, float(peer), np.float32) for peer in range(3)]
    together([swarm.member for swarm in swarms], values)
    assert all(np.allclose(one, 1.0) for one in values)
    assert sorted(swarms[0].peers()) == ["1", "2", "3"]


def test_what_cannot_be(stack: ExitStack) -> None:
    for arguments, why in (
        ({"listen": "7000"}, "'7000' is no HOST:PORT"),
        ({"listen": "127.0.0.1:70000"}, "is no HOST:PORT"),
        ({"join": "127.0.0.1:7000"}, "wanted a list of host:port"),
        ({"secret": "short"}, "has 5 bytes, but a secret has 16 to 4096"),
    ):
        with pytest.raises(OptionError, match=why):
            Swarm(**arguments)  # type: ignore[arg-type]
    with pytest.raises(RendezvousError, match="no address of 'no-such-host"):
        Swarm(join=["no-such-host.invalid:7000"])
    with pytest.raises(
        RendezvousError, match=r"no directory answers at 127\.0\.0\.1:1 within 0\.5 s"
    ):
        Swarm(join=["127.0.0.1:1"], timeout=0.5)
    first = stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET))
    with pytest.raises(RendezvousError, match="Address already in use"):
        Swarm(first.address, secret=SECRET)


@pytest.mark.parametrize("alive", [(0, 1, 2), (2,), (1, 2)], ids=str)
def test_one_list_on_all_machines_ends_in_one_swarm(
    alive: tuple[int, ...], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each listens and joins all, itself among them, whatever is alive; all are started at once."""
    monkeypatch.setattr(directory_list, "BEGIN_SECONDS", 2.0)
    with ExitStack() as bound:
        held = [bound.enter_context(socket.create_server((HERE, 0))) for _ in range(3)]
        places = [f"{HERE}:{one.getsockname()[1]}" for one in held]
    places.sort(key=lambda place: int(place.rpartition(":")[2]))
    swarms: dict[int, Swarm] = {}

    def start(number: int) -> None:
        listen = places[number].replace(HERE, "0.0.0.0") if number == 1 else places[number]
        swarms[number] = Swarm(listen, places, secret=SECRET, name=f"peer {number}")
        stack.callback(swarms[number].close)

    threads = [threading.Thread(target=start, args=(number,)) for number in alive]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(swarms) == list(alive)
    for swarm in swarms.values():
        swarm.wait_for(len(alive))
    assert [number for number in alive if swarms[number]._has_begun] == [alive[0]]
    assert len({swarm.member.session for swarm in swarms.values()}) == 1


@pytest.mark.in_clear
def test_the_log_tells_what_a_start_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a typing error in a list begins a swarm of one peer, without a word."""
    monkeypatch.setattr(directory_list, "BEGIN_SECONDS", 2.0)
    monkeypatch.setattr(client, "QUIET_SECONDS", 0.1)
    with caplog.at_level("WARNING", "lossycoll"):
        Swarm(f"{HERE}:0", [f"{HERE}:1"], secret=SECRET, name="lost").close()
        said = [one.getMessage() for one in caplog.records]
        assert len(said) == 2, said
        assert re.match(r"peer 'lost': no directory has a swarm yet at 127\.0\.0\.1:1, ", said[0])
        assert said[1] == "peer 'lost' begins a swarm: none of 127.0.0.1:1 has one"
        # From here on a busy machine's own directory isn't late for those who ask nobody else.
        monkeypatch.setattr(client, "QUIET_SECONDS", 20.0)
        Swarm(f"{HERE}:0", name="here").close()
        monkeypatch.setattr(swarm_module, "ip_address", lambda text: ip_address("192.0.2.1"))
        Swarm(f"{HERE}:0", secret=SECRET, name="sealed").close()
        assert len(caplog.records) == 2
        Swarm(f"{HERE}:0", name="open").close()
    assert "without a secret" in caplog.records[2].getMessage()


def test_who_comes_to_a_swarm_begins_none(stack: ExitStack) -> None:
    first = stack.enter_context(Swarm(f"{HERE}:0", secret=SECRET, name="first"))
    second = Swarm(f"{HERE}:0", [f"{HERE}:1", first.address], secret=SECRET, name="second")
    stack.callback(second.close)
    assert not second._has_begun
    assert first.peers() == ("first", "second")


def test_two_swarms_of_one_secret_that_meet_stay_two(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their directories ask one another, and neither takes the other's peers."""
    answers = []
    answered = PartitionMerge.answered

    def noted(self: PartitionMerge, asked: Any, other: Any, place: Any) -> bool:
        answers.append((asked.session, other.session, found := answered(self, asked, other, place)))
        return found

    monkeypatch.setattr(PartitionMerge, "answered", noted)
    monkeypatch.setattr(partition_merge, "ASK_SECONDS", 0.2)
    firsts = [stack.enter_context(Swarm(f"{HERE}:0", secret=SECRET, name=name)) for name in "ab"]
    others = [
        stack.enter_context(Swarm(join=[one.address], secret=SECRET, name=f"{one.name}2"))
        for one in firsts
    ]
    for one, other in (firsts, firsts[::-1]):
        assert one._server is not None
        host, _, port = other.address.rpartition(":")
        one._server._merge.learn((host, int(port)))
    sessions = [one.member.session for one in firsts]
    until(lambda: {asked for asked, other, _ in answers if asked != other} == {*sessions})
    assert not any(yielded for *_, yielded in answers)
    assert [one.peers() for one in firsts] == [("a", "a2"), ("b", "b2")]
    newcomer = stack.enter_context(
        Swarm(join=[one.address for one in firsts[::-1]], secret=SECRET, name="c")
    )
    assert newcomer.peers() == ("b", "b2", "c")
    assert [one.member.session for one in others] == sessions


class Peer:
    """A process that averages."""

    def __init__(self, address: str, name: str, own: float, before: Sequence[str] = ()) -> None:
        """``before``: a command that runs it."""
        python = [*before, sys.executable]
        command = [*python, "-m", "tests.support.swarm_peer", address, name, str(own)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=20)

    def end(self) -> list[dict[str, Any]]:
        """Its rounds."""
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("killed", [pytest.param(3, marks=pytest.mark.long), 1])
def test_peers_that_are_killed_are_not_missed_for_long(killed: int, stack: ExitStack) -> None:
    """SIGKILL, at any time; others come in their places."""
    first = stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET, name="first"))
    peers = [Peer(first.address, f"peer {number}", float(number)) for number in range(4)]
    first.wait_for(5, 60.0)
    for again in range(killed):
        before = _round(first)
        peers.pop(0).kill()
        until(lambda: len(first.peers()) == 4, seconds=20)
        until(lambda n=before: _round(first) > n + 5, seconds=30)  # type: ignore[misc]
        peers.append(Peer(first.address, f"another {again}", 7.0))
        first.wait_for(5, 60.0)
    rounds = _round(first)
    until(lambda: _round(first) > rounds + 5, seconds=30)  # the last one has been in some
    done = [peer.end() for peer in peers]
    for told in done:
        assert [one["round"] for one in told] == sorted({one["round"] for one in told})
        assert not any(one["failure"] for one in told[:-2])
        assert all(0 <= one["least"] <= one["most"] <= 7 for one in told)
    last = [told[-1]["most"] for told in done]
    assert len(done[0]) > 5
    assert max(last) - min(last) < 1.0


def test_a_peer_whose_clock_is_years_ahead_is_as_any(stack: ExitStack) -> None:
    """Its own clock alone counts for it: no message has a time of day."""
    if subprocess.run([*AHEAD, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system gives no time namespace")
    first = stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET, name="first"))
    peers = [Peer(first.address, "right", 2.0), Peer(first.address, "ahead", 4.0, AHEAD)]
    first.wait_for(3, 60.0)
    until(lambda: _round(first) > 10, seconds=30)
    for told in [peer.end() for peer in peers]:
        together = [one for one in told if len(one["members"]) == 2]
        assert len(together) > 5
        assert not any(one["failure"] or one["missing"] for one in together[:-1])
        assert together[0]["least"] == together[0]["most"] == 3.0


def test_the_name_of_a_peer_that_is_silent_goes_to_whoever_asks(stack: ExitStack) -> None:
    """A machine without power leaves its connection open; so does a process that is stopped."""
    first = stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET, name="first"))
    frozen = Peer(first.address, "frozen", 0.0)
    stack.callback(frozen.kill)
    first.wait_for(2, 60.0)
    frozen.process.send_signal(signal.SIGSTOP)
    again = stack.enter_context(Swarm(join=[first.address], secret=SECRET, name="frozen"))
    assert first._server is not None
    replaced = first._server._service.counts
    assert replaced["replaced"] == 1
    with pytest.raises(RendezvousError, match="a peer named 'frozen' is there; choose another"):
        Swarm(join=[first.address], secret=SECRET, name="frozen")
    assert replaced["replaced"] == 1
    for swarm in (first, again):
        swarm.member.averages(SCHEMA)
    values = [np.full(500, value, np.float32) for value in (0.0, 1.0)]
    together([first.member, again.member], values)
    assert all(np.allclose(one, 0.5) for one in values)


def _round(swarm: Swarm) -> int:
    """How far the swarm is, as its directory knows."""
    assert swarm._server is not None
    return max(peer.round for peer in list(swarm._server._directory.peers.values()))
