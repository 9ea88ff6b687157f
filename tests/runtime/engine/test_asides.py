"""Datagrams aside: by the engine's socket, sealed or not, and beside its packets."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from lossycoll.errors import EngineError
from lossycoll.options.fields import Options
from lossycoll.runtime.engine.asides import MARK, MOST_BYTES, Asides
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.keys.secret import Secret
from tests.support.waiting import until


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.bind(("127.0.0.1", 0))
        made.settimeout(10)
        yield made


def opened(*, sealed: bool = False) -> tuple[Host, Asides, tuple[str, int]]:
    host = Host(0, 4, "127.0.0.1", payload_bytes=256, options=Options(link="udp"))
    if sealed:
        host.seal(b"", Secret.of(b"a secret of tests").filter("5" * 16))
    asides = host.asides()
    own = ("127.0.0.1", host.link().port)
    host.start(5, [own, None, None, None])
    return host, asides, own


@pytest.mark.parametrize("sealed", [False, True])
def test_they_come_and_go_by_the_engines_socket(sealed: bool, stranger: socket.socket) -> None:
    host, asides, own = opened(sealed=sealed)
    assert asides.say(stranger.getsockname(), MARK + b"hello")
    assert stranger.recvfrom(100) == (MARK + b"hello", own)
    assert asides.heard() is None
    stranger.sendto(MARK + b"yes", own)
    assert select.select([asides.descriptor], [], [], 10)[0]
    assert asides.heard() == (stranger.getsockname(), MARK + b"yes")
    assert asides.heard() is None
    stranger.sendto(MARK + bytes(MOST_BYTES), own)
    until(lambda: asides.dropped == 1)
    host.close()


def test_what_can_not_be_said(stranger: socket.socket) -> None:
    host, asides, _ = opened()
    to = stranger.getsockname()
    assert not asides.say(to, b"no mark")
    assert not asides.say(to, MARK + bytes(MOST_BYTES))
    assert not asides.say(("::1", to[1]), MARK)
    assert not asides.say(("somewhere", to[1]), MARK)
    with pytest.raises(EngineError):
        host.asides()
    host.close()
    assert not asides.say(to, MARK)
    assert asides.heard() is None
    assert asides.dropped == 0
