"""The host of a process: what it refuses to start with."""

from __future__ import annotations

import errno
import socket

import pytest

from lossycoll.errors import EngineError
from lossycoll.options.fields import Options
from lossycoll.runtime.engine.host import Host


def test_a_range_without_a_free_udp_port_is_named() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(EngineError) as caught:
            Host(
                *(1, 2, "127.0.0.1"),
                payload_bytes=1400,
                options=Options(port_range=f"{port}-{port}"),
            )
    assert f"rank 1/2: no free UDP port at 127.0.0.1 in {port}-{port} (1 port)" in str(caught.value)
    assert "LOSSYCOLL_PORT_RANGE" in str(caught.value)
    assert caught.value.errno == errno.EADDRINUSE
