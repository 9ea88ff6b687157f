"""Ports for directories: free in TCP and UDP, or an error that says which isn't."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from lossycoll.errors import RendezvousError
from lossycoll.runtime.swarm import server as ports
from lossycoll.runtime.swarm.server import TRIES, bound_to


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_is_reserved_is_nobodys_else(host: str) -> None:
    held = bound_to(host, 0)
    family, port = held.tcp.family, held.port
    try:
        assert held.tcp.getsockname()[:2] == held.udp.getsockname()[:2] == (host, port)
        with pytest.raises(ConnectionRefusedError), socket.create_connection((host, port), 5):
            pass
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            with socket.socket(family, kind) as other, pytest.raises(OSError, match="in use"):
                other.bind((host, port))
    finally:
        held.close()
    bound_to(host, port).close()  # what was closed is free again


def free_for_tcp(taken: socket.socket) -> int:
    """Binds a UDP socket to a port that no TCP connection of this machine has."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.bind(("127.0.0.1", 0))
        taken.bind(one.getsockname())
    return int(taken.getsockname()[1])


def test_a_port_that_is_taken_in_udp_alone_is_held_in_neither() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        port = free_for_tcp(taken)
        with pytest.raises(RendezvousError, match=f":{port}: its UDP port: Address already in use"):
            bound_to("127.0.0.1", port)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as free:
            free.bind(("127.0.0.1", port))


@pytest.mark.parametrize("failures", [TRIES - 1, TRIES])
def test_others_are_tried_where_any_will_do(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bound, failed = ports.bound, []

    def some(host: str, port: int, kind: socket.SocketKind) -> Any:
        if kind == socket.SOCK_DGRAM and len(failed) < failures:
            failed.append(port)
            raise OSError(98, "Address already in use")
        return bound(host, port, kind)

    monkeypatch.setattr(ports, "bound", some)
    if failures == TRIES:
        with pytest.raises(RendezvousError, match="its UDP port"):
            bound_to("127.0.0.1", 0)
    else:
        bound_to("127.0.0.1", 0).close()
    assert len(failed) == failures


def test_an_address_of_another_machine() -> None:
    with pytest.raises(RendezvousError, match=r"no directory at 203\.0\.113\.1:7000"):
        bound_to("203.0.113.1", 7000)
