"""What somebody can do who may write to the valkey server of a swarm, and read all of it."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lossycoll.runtime.control.transport import LONGEST
from lossycoll.runtime.keys.secret import secret_of
from lossycoll.runtime.swarm.protocol import MOST_PEERS, VERSION, Join, Leave, pack
from lossycoll.runtime.swarm.swarm import Swarm
from lossycoll.runtime.swarm.valkey_server import Notice, Notices, ValkeyServer, ValkeyUrl
from tests.runtime.swarm.test_valkey import SECRET, join, means, server, serving
from tests.support.valkey import Server
from tests.support.waiting import until

__all__ = ["join", "server"]
KEY = "lossycoll:tests"


class Stranger:
    """Hears all that is said, from when it is made."""

    def __init__(self, server: Server) -> None:
        self.client = server.client()
        self.heard: list[tuple[bytes, bytes]] = []
        self._pubsub = self.client.pubsub()
        self._pubsub.psubscribe(f"{KEY}:*")
        self._over = False
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._over:
            found = self._pubsub.get_message(timeout=0.05)
            if found is not None and found["type"] == "pmessage":
                self.heard.append((found["channel"], found["data"]))

    def close(self) -> None:
        self._over = True
        self._thread.join(10)
        self._pubsub.close()

    def inbox(self) -> str:
        return f"{KEY}:{self.client.get(KEY)[:32].decode()}"


@pytest.fixture
def stranger(server: Server) -> Iterator[Stranger]:
    made = Stranger(server)
    yield made
    made.close()


def test_nothing_that_is_heard_can_be_read_or_said_again(
    join: Callable[..., Swarm], stranger: Stranger
) -> None:
    swarms = [join(name) for name in ("a peer's name", "b")]
    means(swarms)
    until(lambda: len(stranger.heard) > 20)
    said = list(stranger.heard)
    names = (b"a peer's name", b"127.0.0.1", b"join", swarms[0].member.session.encode())
    assert not any(name in data for _, data in said for name in names)
    assert swarms[0].member.session.encode() not in stranger.client.get(KEY)
    before = sum(swarm.stats()["forged"] for swarm in swarms)
    for channel, data in said:
        stranger.client.publish(channel, data)
    until(lambda: sum(one.stats()["forged"] for one in swarms) >= before + 10)
    means(swarms)
    (first,) = serving(swarms)  # a directory that moves hears none of what was said to the former
    for swarm in swarms:
        if swarm is not first:
            swarm.close()
    means([first])
    for channel, data in said:  # nor do those of a connection that is over make another
        stranger.client.publish(channel, data)
    until(lambda: first.stats()["foreign"] > 3)
    means([first])
    assert first.peers() == (first.name,)


@pytest.mark.parametrize("secret", [SECRET, None], ids=["sealed", "clear"])
@pytest.mark.in_clear
def test_what_is_no_message_is_counted_and_changes_nothing(
    secret: str | None, join: Callable[..., Swarm], stranger: Stranger
) -> None:
    swarms = [join(name, secret=secret) for name in "ab"]
    (first,) = serving(swarms)
    means(swarms)
    draw = random.Random(1)
    sizes = [0, 1, 15, 16, 17, 31, 32, 33, 48, 200, 5000]
    noise = [draw.randbytes(size) for size in sizes * 5]
    noise += [bytes(16) + b'["ready",1.0]', bytes(16) + b"[" * 5000, bytes(LONGEST + 17)]
    for data in noise:
        stranger.client.publish(stranger.inbox(), data)
    if secret is not None:
        channels = {channel for channel, _ in stranger.heard} - {stranger.inbox().encode()}
        assert len(channels) >= 2
        for channel in channels:
            for data in noise:
                stranger.client.publish(channel, data)
    kinds = ("malformed", "forged", "foreign") if secret else ("malformed",)
    until(lambda: all(first.stats()[kind] for kind in kinds))
    means(swarms)
    assert swarms[0].peers() == ("a", "b")
    assert serving(swarms) == [first]


@pytest.mark.parametrize(
    "kind",
    [
        "bytes",
        pytest.param("list", marks=pytest.mark.long),
        pytest.param("brought back", marks=pytest.mark.long),
        pytest.param("another secret", marks=pytest.mark.long),
        "for good",
    ],
)
def test_a_notice_that_a_stranger_writes_is_written_over(
    kind: str, server: Server, join: Callable[..., Swarm], stranger: Stranger
) -> None:
    client = stranger.client
    old = [join("old")]
    brought_back = client.get(KEY)
    old.pop().close()
    swarms = [join(name) for name in "ab"]
    (first,) = serving(swarms)
    own = client.get(KEY)
    assert own not in (None, brought_back)
    if kind == "bytes":
        client.set(KEY, b"\xff" * 500)
    elif kind == "list":
        pipeline = client.pipeline()
        pipeline.delete(KEY)
        pipeline.lpush(KEY, "a")
        pipeline.execute()
    elif kind == "brought back":
        client.set(KEY, brought_back)
    elif kind == "another secret":
        notices = _notices(server, "another secret of tests")
        client.set(KEY, notices.value(Notice("5" * 32, "5" * 16)), ex=60)
    else:
        client.set(KEY, own[:32] + b" for good", ex=10**6)
    mine = _notices(server, SECRET)

    def is_written_over() -> bool:
        found = client.get(KEY) if client.type(KEY) == b"string" else b""
        return found != brought_back and mine._read(found) is not None

    until(is_written_over)
    swarms.append(join("c"))
    means(swarms)
    assert {one.member.session for one in swarms} == {first.member.session}
    if kind not in ("list", "brought back"):
        assert serving(swarms) == [first]
        assert sum(one.stats()["forged"] for one in swarms) > 0


def _notices(server: Server, secret: str) -> Notices:
    address = ValkeyUrl.of(server.url())
    return Notices(ValkeyServer(address), address.prefix, secret_of(secret))


def test_what_stood_there_before_anybody_came_keeps_nobody_out(
    server: Server, join: Callable[..., Swarm], stranger: Stranger
) -> None:
    stranger.client.set(KEY, b"5" * 32 + b" " + os.urandom(50))
    swarms = [join(name) for name in "ab"]
    means(swarms)
    assert sum(one.stats()["forged"] for one in swarms) > 0


@pytest.mark.in_clear
def test_in_clear_whoever_can_write_is_a_peer(
    join: Callable[..., Swarm], stranger: Stranger
) -> None:
    """As by TCP. So use a secret wherever others can write to the server."""
    swarms = [join(name, secret=None) for name in "ab"]
    incarnation, channel = b"\x07" * 16, f"{KEY}:{'07' * 16}"
    listening = stranger.client.pubsub()
    listening.subscribe(channel)
    until(lambda: _next(listening)["type"] == "subscribe")
    said = pack(Join(VERSION, "stranger", "7" * 32, MOST_PEERS, "0" * 16, 0))
    stranger.client.publish(stranger.inbox(), incarnation + said)
    until(lambda: "stranger" in swarms[0].peers())
    stranger.client.publish(stranger.inbox(), incarnation + pack(Leave()))
    until(lambda: swarms[0].peers() == ("a", "b"))
    listening.close()


def _next(listening: Any) -> dict[str, Any]:
    return listening.get_message(timeout=1.0) or {"type": ""}
