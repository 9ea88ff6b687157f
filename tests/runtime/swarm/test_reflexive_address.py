"""The directory's UDP port: what it answers, what it doesn't, and what a peer believes of it."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import numpy as np
import pytest

from lossycoll.errors import RendezvousError
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.swarm.ice_agent import (
    CONNECTIVITY_BYTES,
    DIRECTORY,
    ConnectivityMessage,
    Kind,
    key_of,
    pack,
    unpack,
)
from lossycoll.runtime.swarm.server import (
    BURST,
    RATE,
    TAKEN_AT_ONCE,
    DirectoryServer,
    ReflexiveAddressServer,
    bound_to,
)
from tests.runtime.swarm.test_member import SECRET, directory, peers, together
from tests.support.waiting import until

KEY = key_of(None, "5" * 16)
NONCE = bytes(range(16))
QUESTION = ConnectivityMessage(Kind.CHECK, 3, DIRECTORY, nonce=NONCE)


class Asker:
    """A socket that asks an observer, whose clock stands."""

    def __init__(self, stack: ExitStack, host: str = "127.0.0.1") -> None:
        self.now = 0.0
        self.observer = ReflexiveAddressServer(bound_to(host, 0).udp, lambda: KEY, lambda: self.now)
        stack.callback(self.observer.close)
        self.port = self.observer.bound.getsockname()[1]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        self.socket.bind(("::1" if ":" in host else "127.0.0.1", 0))
        self.socket.setblocking(False)

    def ask(self, data: bytes, to: str = "127.0.0.1") -> None:
        self.socket.sendto(data, (to, self.port))

    def answers(self) -> list[tuple[bytes, str]]:
        self.observer.serve()
        out = []
        while True:
            try:
                data, source = self.socket.recvfrom(2048)
            except BlockingIOError:
                return out
            out.append((data, source[0]))


@pytest.mark.parametrize("to", ["127.0.0.1", "127.0.0.2"])
def test_a_peer_hears_its_reflexive_address(to: str, stack: ExitStack) -> None:
    """From the address that it has asked, whichever of the host's that is."""
    asker = Asker(stack, "0.0.0.0")
    asker.ask(pack(QUESTION, KEY), to)
    ((data, source),) = asker.answers()
    assert unpack(data, KEY) == ConnectivityMessage(
        Kind.ANSWER, DIRECTORY, 3, echo=NONCE, reflexive=asker.socket.getsockname()
    )
    assert len(data) == CONNECTIVITY_BYTES
    assert source == to


def test_the_same_by_ipv6(stack: ExitStack) -> None:
    try:
        asker = Asker(stack, "::")
    except OSError:
        pytest.skip("this system has no IPv6")
    asker.ask(pack(QUESTION, KEY), "::1")
    ((data, _),) = asker.answers()
    assert unpack(data, KEY).reflexive == asker.socket.getsockname()[:2]


def test_strangers_are_not_answered(stack: ExitStack) -> None:
    asker = Asker(stack)
    for data in (
        b"",
        b"OOBD",
        bytes(CONNECTIVITY_BYTES),
        bytes(1400),
        pack(QUESTION, key_of(None, "6" * 16)),
        pack(ConnectivityMessage(Kind.ANSWER, DIRECTORY, 3, echo=NONCE), KEY),
        pack(ConnectivityMessage(Kind.CHECK, 3, 4, nonce=NONCE), KEY),
        pack(ConnectivityMessage(Kind.CHECK, DIRECTORY, DIRECTORY, nonce=NONCE), KEY),
    ):
        asker.ask(data)
    assert asker.answers() == []
    counts = asker.observer.counts
    assert (counts["forged"], counts["malformed"], counts["answered"]) == (2, 6, 0)


def test_answers_are_bounded(stack: ExitStack) -> None:
    asker, heard = Asker(stack), 0
    turns = int(BURST) // 10 + 5
    for _ in range(turns):
        for _ in range(10):
            asker.ask(pack(QUESTION, KEY))
        heard += len(asker.answers())
    assert heard == BURST == asker.observer.counts["answered"]
    assert asker.observer.counts["over_rate"] == 10 * turns - BURST
    asker.now += 10 / RATE
    for _ in range(TAKEN_AT_ONCE):
        asker.ask(pack(QUESTION, KEY))
    assert len(asker.answers()) == 10


def test_a_port_that_is_taken_is_named(stack: ExitStack) -> None:
    taken = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    taken.bind(("127.0.0.1", 0))
    with pytest.raises(RendezvousError, match="its UDP port: Address already in use"):
        DirectoryServer("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("secret", [None, SECRET], ids=["clear", "sealed"])
def test_what_strangers_say_of_an_address_is_not_believed(
    secret: Secret | None, stack: ExitStack
) -> None:
    """Messages of other keys, and of the right one that answer nothing; and the round is right."""
    server = DirectoryServer("127.0.0.1", 0, secret, patience=20.0)
    stack.callback(server.close)
    one, other = peers(stack, ("127.0.0.1", server.port), "ab", secret)
    end = one._endpoint
    stranger = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    wrong, right = key_of(secret, "6" * 16), key_of(secret, one.session)
    lie = ConnectivityMessage(
        Kind.ANSWER, DIRECTORY, one.number, nonce=NONCE, echo=NONCE, reflexive=("198.51.100.66", 66)
    )
    sent = {"forged": pack(lie, wrong), "stale": pack(lie, right), "dropped": b"OOBD" + bytes(200)}
    sent["malformed"] = b"OOBD"
    for data in sent.values():
        stranger.sendto(data, end.place)
    for name in sent:
        until(lambda name=name: one._endpoint.nat_agent.counts[name] > 0)  # type: ignore[misc]
    stranger.sendto(pack(QUESTION, wrong), ("127.0.0.1", server.port))
    until(lambda: server.reflexive.counts["forged"] > 0)
    assert end.nat_agent.reflexive_address() == end.place
    assert server._directory.peers[one.number].place.others == ()  # type: ignore[union-attr]
    values = [np.full(800, float(peer), np.float32) for peer in range(2)]
    assert {report.failure for report in together([one, other], values)} == {""}
    assert all((each == 0.5).all() for each in values)


def test_a_peer_whose_address_changes_comes_anew(stack: ExitStack) -> None:
    (one,) = peers(stack, directory(stack, None), "a", None)
    before, seen = one.client.joined, ("203.0.113.9", 4711)
    incarnations = []
    join = one.client._run_session
    assert before is not None
    one.client._run_session = lambda place: incarnations.append(place) or join(place)  # type: ignore[assignment,func-returns-value]
    one.say_address(one._endpoint.place, seen, moved=True)
    until(lambda: len(incarnations) > 0)
    assert one.client.names() == ("a",)
    assert any(getattr(said, "others", ()) == (seen,) for said in one.client._standing.values())
