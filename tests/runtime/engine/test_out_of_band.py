"""Out-of-band datagrams: by the engine's socket, sealed or not, and beside its packets."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from lossycoll.errors import EngineError
from lossycoll.options.fields import Options
from lossycoll.runtime.engine.host import MARK, MOST_OUT_OF_BAND, Host, OutOfBand
from lossycoll.runtime.keys.secret import Secret
from tests.support.waiting import until


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.bind(("127.0.0.1", 0))
        made.settimeout(10)
        yield made


def opened(*, sealed: bool = False) -> tuple[Host, OutOfBand, tuple[str, int]]:
    host = Host(0, 4, "127.0.0.1", payload_bytes=256, options=Options(link="udp"))
    if sealed:
        host.seal(b"", Secret.of(b"a secret of tests").filter("5" * 16))
    out_of_band = host.out_of_band()
    own = ("127.0.0.1", host.link().port)
    host.start(5, [own, None, None, None])
    return host, out_of_band, own


@pytest.mark.parametrize("sealed", [False, True])
def test_they_come_and_go_by_the_engines_socket(sealed: bool, stranger: socket.socket) -> None:
    host, out_of_band, own = opened(sealed=sealed)
    assert out_of_band.say(stranger.getsockname(), MARK + b"hello")
    assert stranger.recvfrom(100) == (MARK + b"hello", own)
    assert out_of_band.heard() is None
    stranger.sendto(MARK + b"yes", own)
    assert select.select([out_of_band.descriptor], [], [], 10)[0]
    assert out_of_band.heard() == (stranger.getsockname(), MARK + b"yes")
    assert out_of_band.heard() is None
    stranger.sendto(MARK + bytes(MOST_OUT_OF_BAND), own)
    until(lambda: out_of_band.dropped == 1)
    host.close()


def test_what_can_not_be_said(stranger: socket.socket) -> None:
    host, out_of_band, _ = opened()
    to = stranger.getsockname()
    assert not out_of_band.say(to, b"no mark")
    assert not out_of_band.say(to, MARK + bytes(MOST_OUT_OF_BAND))
    assert not out_of_band.say(("::1", to[1]), MARK)
    assert not out_of_band.say(("somewhere", to[1]), MARK)
    with pytest.raises(EngineError):
        host.out_of_band()
    host.close()
    assert not out_of_band.say(to, MARK)
    assert out_of_band.heard() is None
    assert out_of_band.dropped == 0
