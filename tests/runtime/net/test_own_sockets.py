"""This process's TCP sockets, found by descriptor and shut by address."""

from __future__ import annotations

import os
import socket
import tempfile

import pytest

from lossycoll.runtime.net.own_sockets import borrow, connections, listeners, shut


def pair(family: socket.AddressFamily, host: str) -> tuple[socket.socket, ...]:
    """A listener, and both ends of one connection to it."""
    listener = socket.create_server((host, 0), family=family)
    client = socket.create_connection(listener.getsockname()[:2])
    server, _ = listener.accept()
    return listener, client, server


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_listeners_and_connections_are_told_apart(family: socket.AddressFamily, host: str) -> None:
    listener, client, server = pair(family, host)
    datagrams = socket.socket(family, socket.SOCK_DGRAM)
    datagrams.connect(listener.getsockname()[:2])
    with listener, client, server, datagrams:
        place, ours = listener.getsockname()[:2], client.getsockname()[:2]
        assert place in listeners()
        assert ours not in listeners()
        found = connections()
        assert found[client.fileno()] == (ours, place)
        assert found[server.fileno()] == (place, ours)
        assert not {listener.fileno(), datagrams.fileno()} & found.keys()
    assert place not in listeners()


def test_only_connections_of_these_addresses_are_shut() -> None:
    ends = [pair(socket.AF_INET, "127.0.0.1") for _ in range(2)]
    for _, client, server in ends:
        client.settimeout(10)
        server.settimeout(10)
    (listener, client, server), (_, other_client, other_server) = ends
    shut({listener.getsockname()[:2]})
    assert client.recv(1) == server.recv(1) == b"", "each finds its end"
    assert client.fileno() >= 0, "the owner keeps the descriptor"
    other_client.sendall(b"x")
    assert other_server.recv(1) == b"x"
    for each in ends:
        for end in each:
            end.close()


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
