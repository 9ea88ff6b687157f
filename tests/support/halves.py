"""A swarm that is in two parts, as after a split, in threads of one process: what each part can
reach is a matter of whom its peers are told to ask."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.swarm import partition_merge
from lossycoll.runtime.swarm.member import SwarmMember
from lossycoll.runtime.swarm.server import DirectoryServer
from tests.support.waiting import until

ASK_SECONDS = 0.2


def hurry(monkeypatch: pytest.MonkeyPatch, patience: float = 60.0) -> None:
    """Directories that ask, and give up, sooner than in earnest."""
    monkeypatch.setattr(partition_merge, "ASK_SECONDS", ASK_SECONDS)
    monkeypatch.setattr(partition_merge, "HOLD_SECONDS", 1.0)
    monkeypatch.setattr(partition_merge, "BOUND_SECONDS", 2.5)
    monkeypatch.setattr(partition_merge, "PATIENCE_SECONDS", patience)
    monkeypatch.setattr(partition_merge, "ANSWER_SECONDS", 1.0)


def directory(
    stack: ExitStack, secret: Secret | None, session: str = "", patience: float = 20.0
) -> DirectoryServer:
    """Nobody's; in a session, it takes over its peers."""
    made = DirectoryServer("127.0.0.1", 0, secret, patience=patience, session=session)
    stack.callback(made.close)
    if session:
        made.adopt(session)
    return made


def place(server: DirectoryServer) -> tuple[str, int]:
    return "127.0.0.1", server.port


def divide(members: Sequence[SwarmMember], server: DirectoryServer, *, waits: bool = True) -> None:
    """These lose their directory, and find but this one."""
    for member in members:
        member.client.directories.learn([place(server)])
        member.client.directories.prefer(place(server))
        member.client._broken.set()
        member.client._nudge()
    until(lambda: not waits or len(names(server)) >= len(members))


def cut(*servers: DirectoryServer) -> None:
    """None of them sees another."""
    for server in servers:
        server._merge._known.clear()
        server._merge._redirect_to = None


def heal(one: DirectoryServer, other: DirectoryServer) -> None:
    """The one can reach the other, and so can its peers."""
    one._merge.learn(place(other))


def names(server: DirectoryServer) -> set[str]:
    """Of the peers of a directory that has told nobody to go."""
    peers = list(server._directory.peers.values())
    return {peer.name for peer in peers if not peer.told}
