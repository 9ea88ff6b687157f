"""This process's TCP connections, found by descriptor."""

from __future__ import annotations

import os
import socket
import tempfile

import pytest

from benchmarks.common.tcp import borrow, connections


def pair(family: socket.AddressFamily, host: str) -> tuple[socket.socket, ...]:
    """A listener, and both ends of one connection to it."""
    listener = socket.create_server((host, 0), family=family)
    client = socket.create_connection(listener.getsockname()[:2])
    server, _ = listener.accept()
    return listener, client, server


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_connections_are_told_from_other_sockets(family: socket.AddressFamily, host: str) -> None:
    listener, client, server = pair(family, host)
    datagrams = socket.socket(family, socket.SOCK_DGRAM)
    datagrams.connect(listener.getsockname()[:2])
    with listener, client, server, datagrams:
        place, ours = listener.getsockname()[:2], client.getsockname()[:2]
        found = connections()
        assert found[client.fileno()] == (ours, place)
        assert found[server.fileno()] == (place, ours)
        assert not {listener.fileno(), datagrams.fileno()} & found.keys()


def test_a_borrowed_socket_stays_its_owners() -> None:
    with socket.socket() as mine:
        with borrow(mine.fileno()) as end:
            assert end.fileno() != mine.fileno()
            end.bind(("127.0.0.1", 0))
            place = end.getsockname()
        assert mine.getsockname() == place


def test_what_is_no_socket_is_not_borrowed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with (
        tempfile.TemporaryFile() as file,
        pytest.raises(OSError, match="non-socket"),
        borrow(file.fileno()),
    ):
        pass
    assert len(os.listdir("/proc/self/fd")) == before, "the copy was closed"
