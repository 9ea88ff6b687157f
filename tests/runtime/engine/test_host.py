"""The host of a process: what it refuses to start with, and what it is told before."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest
from lossycoll._native import lib

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


class Told:
    """The engine's library, which notes who is told to be crowded before it starts."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("lc_host_crowded", "lc_host_start"):
            self.calls.append(name)
        return getattr(lib, name)


@pytest.mark.parametrize("crowded", [False, True])
def test_a_host_that_has_too_few_cores_is_told_so(
    crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    monkeypatch.setattr("lossycoll.runtime.engine.host.lib", told)
    host = Host(0, 1, "127.0.0.1", payload_bytes=1400, options=Options())
    try:
        host.start(0x5EED, [("127.0.0.1", host.link().port)], crowded=crowded)
    finally:
        host.close()
    assert told.calls == ["lc_host_crowded"] * crowded + ["lc_host_start"]


def test_one_process_of_a_machine_speaks_for_all() -> None:
    hosts = [Host(i, 3, "127.0.0.1", payload_bytes=1400, options=Options()) for i in range(3)]
    try:
        peers = [("127.0.0.1", host.link().port) for host in hosts]
        for host, session in zip(hosts, (0x5EED, 0x5EED, 0x0DD), strict=True):
            host.start(session, peers)
        assert [host.claim("SIZE") for host in hosts] == [True, False, True]
        assert [host.claim("SIZE") for host in hosts] == [False, False, False]
        assert hosts[1].claim("SINGLE")
    finally:
        for host in hosts:
            host.close()
    assert not hosts[0].claim("SIZE")
