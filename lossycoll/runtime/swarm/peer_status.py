"""Status file of a swarm's peer on its machine, which it replaces at each round.

`lossycoll status` reads the files of all peers of its user. A peer that Python keeps busy, that is
stopped or that was killed is seen by its process and by when its file was written.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lossycoll.runtime.engine import status_page
from lossycoll.runtime.world.job_status import ALIVE, DEAD

MOST_BYTES: Final = 1 << 16
KEPT_SECONDS: Final = 60.0  # time that a dead peer's file is kept
SUFFIX: Final = ".peer"
SILENT_SECONDS: Final = 60.0
"""A peer that began no round for so long, and for SLOW_ROUNDS of its rounds, counts as slow."""
SLOW_ROUNDS: Final = 3
UNSEEN_SECONDS: Final = 3600.0
"""A peer whose process can't be looked up, as one in a container, is taken for dead after so long
without a sign, and after SLOW_ROUNDS of its rounds. Its file is written at rounds alone."""


class PeerFile:
    """This process's file; ``close`` removes it. Without a folder nothing is told."""

    def __init__(self, session: str, name: str) -> None:
        self._pid = os.getpid()
        self._fixed = {
            "session": session,
            "name": name,
            "host": socket.gethostname(),
            "pid": self._pid,
            "pid_start": status_page.start_of(self._pid),
            "pid_space": status_page.space(),
        }
        self._path: Path | None = None
        self._rounds, self._latest = 0, -1
        self._had: dict[str, Any] = {}
        """What the latest round has left, told on while the next is waited for."""
        with contextlib.suppress(OSError):
            self._path = status_page.make_folder() / f"{session}-{self._pid}-{id(self)}{SUFFIX}"

    def waits(self, peers: int) -> None:
        """A round is asked for. ``peers``: how many there are in the swarm."""
        self._write({**self._had, "doing": "waits", "peers": peers})

    def averaged(self, peers: int, number: int, report: Mapping[str, Any]) -> None:
        """A round is over. ``peers``: how many there are in the swarm."""
        self._rounds += report["round"] != self._latest  # it may be told again, with more
        self._latest = report["round"]
        self._had = {"number": number, "last": report}
        self._write({**self._had, "doing": "trains", "peers": peers})

    def _write(self, told: Mapping[str, Any]) -> None:
        if self._path is None or os.getpid() != self._pid:
            return
        now = {"rounds": self._rounds, "since_ns": time.monotonic_ns()}
        found = {**self._fixed, **now, **told}
        with contextlib.suppress(OSError):
            new = self._path.with_suffix(".new")
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(found, file)
            new.replace(self._path)

    def close(self) -> None:
        if self._path is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)


def swarms() -> list[dict[str, Any]]:
    """The swarms of which this user has peers on this machine (docs/status-reference.md).
    UnsafeFolder: the folder isn't this user's alone."""
    where = status_page.folder()
    try:
        status_page.check_folder(where)
    except FileNotFoundError:
        return []
    by_session: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(where.glob(f"*{SUFFIX}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            session, peer = _read(path)
            if peer["state"] == DEAD and peer["since_seconds"] > KEPT_SECONDS:
                path.unlink()
                continue
            by_session.setdefault(session, []).append(peer)
    return [_swarm(session, peers) for session, peers in sorted(by_session.items())]


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    file = status_page.open_page(path)
    try:
        said = json.loads(os.read(file, MOST_BYTES))
    finally:
        os.close(file)
    last = said.get("last") or {}
    kernel = status_page.state_of(int(said["pid"]), int(said["pid_start"]), int(said["pid_space"]))
    peer: dict[str, Any] = {
        "name": str(said["name"]),
        "number": int(said.get("number", -1)),
        "host": str(said["host"]),
        "pid": int(said["pid"]),
        "state": ALIVE if kernel in (status_page.RUNS, status_page.ELSEWHERE) else kernel,
        "peers": int(said["peers"]),
        "doing": str(said["doing"]),
        "since_seconds": round((time.monotonic_ns() - int(said["since_ns"])) * 1e-9, 3),
        "rounds": int(said["rounds"]),
        "round": int(last.get("round", -1)),
        "members": [int(one) for one in last.get("members", ())],
        "missing": [int(one) for one in last.get("missing", ())],
        "refused": [int(one) for one in last.get("refused", ())],
        "absent": [[str(name), str(why)] for name, why in last.get("absent", ())],
        "round_seconds": float(last.get("seconds", 0.0)),
        "waited_seconds": float(last.get("waited", 0.0)),
        "kept": float(last.get("kept", 0.0)),
        "failure": str(last.get("failure", "")),
        "left_out": str(last.get("left_out", "")),
    }
    if kernel == status_page.ELSEWHERE and _is_late(peer, UNSEEN_SECONDS):
        peer["state"] = DEAD
    return str(said["session"]), peer


def _swarm(session: str, peers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    peers = sorted(peers, key=lambda one: (one["name"], one["pid"]))
    living = [peer for peer in peers if peer["state"] != DEAD]
    return {
        "session": session,
        "peers_in_all": max((peer["peers"] for peer in living), default=0),
        "rounds": max((peer["round"] for peer in peers), default=-1) + 1,
        "trouble": list(_trouble(peers)),
        "peers": list(peers),
    }


def _trouble(peers: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Troubles to look at first: peers that are gone, sick, slow, or out of reach."""
    names = {peer["number"]: peer["name"] for peer in peers if peer["state"] != DEAD}
    for peer in peers:
        if peer["state"] != ALIVE:
            yield f"peer {peer['name']} is {peer['state']}"
        elif peer["left_out"]:
            yield f"peer {peer['name']} is sick: {peer['left_out']}"
        elif _is_late(peer, SILENT_SECONDS):
            yield (
                f"peer {peer['name']} is slow: no round for {peer['since_seconds']:.0f} s "
                f"({peer['doing']})"
            )
        if peer["failure"]:
            yield f"round {peer['round']} of peer {peer['name']} failed: {peer['failure']}"
        for key, what in (("missing", "was lost to"), ("refused", "wasn't believed by")):
            for other in peer[key]:
                who = names.get(other, f"number {other}")
                yield f"peer {who} {what} peer {peer['name']} in round {peer['round']}"
    latest = max(peers, key=lambda one: one["round"])
    for name, why in latest["absent"]:
        yield f"peer {name} wasn't in round {latest['round']}: {why}"


def _is_late(peer: Mapping[str, Any], least: float) -> bool:
    """True if a peer has begun no round for ``least`` seconds and for SLOW_ROUNDS of its rounds."""
    usual = peer["round_seconds"] + peer["waited_seconds"]
    return bool(peer["since_seconds"] > max(least, SLOW_ROUNDS * usual))
