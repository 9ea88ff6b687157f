"""What the tests of failures share: how they catch, time and count what a rank is left with."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.harness import Outcome

LIVENESS = 2.0
SLACK = 15.0
"""Seconds that a loaded machine may add to any bound."""
QUIET = {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_LIVENESS": str(LIVENESS)}
CALM = {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_LIVENESS": "30"}
"""Where no rank is silent, a starved machine must not make it look so."""


@dataclass
class Caught:
    """How a call ended at one rank. ``kind`` is the error's type name ("" if none).

    ``when``: time.monotonic(), which is the same clock in all processes of a machine. ``again``:
    the type that a second call raised, and ``again_seconds`` how long that took.
    """

    kind: str
    text: str
    peer: int | None
    when: float
    again: str = ""
    again_seconds: float = 0.0


def catch(call: Callable[[], Any]) -> Caught:
    """Calls once."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return Caught(
            type(error).__name__, str(error), getattr(error, "peer", None), time.monotonic()
        )
    return Caught("", "", None, time.monotonic())


def catch_twice(call: Callable[[], Any]) -> Caught:
    """Calls, and calls once more what must be refused now."""
    first = catch(call)
    second = catch(call)
    first.again, first.again_seconds = second.kind, second.when - first.when
    return first


def must_name_the_lost(
    caught: Caught,
    where: str,
    *,
    rank: int,
    world: int,
    victim: int,
    since: float,
    liveness: float = LIVENESS,
    address: str = "127.0.0.1",
) -> None:
    """Asserts PeerLostError, in time, with all that it must say; ``since``: when the fault began.

    Also through a future, where torch keeps the text only.
    """
    seen = f"{where} at rank {rank}: {caught}"
    assert caught.kind == "PeerLostError" or (
        caught.kind == "RuntimeError" and "PeerLostError: " in caught.text
    ), seen
    assert caught.kind == "RuntimeError" or caught.peer == victim, seen
    for part in (f"rank {rank}/{world}", f"rank {victim} ({address}:"):
        assert part in caught.text, seen
    assert since < caught.when < since + liveness + SLACK, f"{caught.when - since:.2f} s: {seen}"


def good(outcomes: list[Outcome]) -> list[Any]:
    """The values of ranks that must all have ended well."""
    for outcome in outcomes:
        assert not outcome.error, str(outcome)
        assert outcome.code == 0, str(outcome)
    return [outcome.value for outcome in outcomes]


# ---- what a process holds ----


@dataclass
class Holdings:
    """This process's threads, sockets and other descriptors, by what they are, and children."""

    threads: Mapping[str, int]
    descriptors: Mapping[str, int]
    children: int

    def __sub__(self, before: Holdings) -> dict[str, int]:
        """What has come since ``before``."""
        out = {}
        for now, then in (
            (self.threads, before.threads),
            (self.descriptors, before.descriptors),
            ({"children": self.children}, {"children": before.children}),
        ):
            for name, count in now.items():
                if count > then.get(name, 0):
                    out[name] = count - then.get(name, 0)
        return out


def holdings() -> Holdings:
    threads: dict[str, int] = {}
    children = 0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm", encoding="utf-8") as file:
                name = f"thread {file.read().strip()}"
            with open(f"/proc/self/task/{task}/children", encoding="utf-8") as file:
                children += len(file.read().split())
        except OSError:
            continue  # it has just ended
        threads[name] = threads.get(name, 0) + 1
    descriptors: dict[str, int] = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the listing's own
        name = re.sub(r"\d+", "N", target)
        descriptors[name] = descriptors.get(name, 0) + 1
    return Holdings(threads, descriptors, children)


def left_over(before: Holdings, seconds: float = 15.0) -> dict[str, int]:
    """What has come since ``before`` and doesn't go within ``seconds``; empty is good.

    Gloo's thread may end late on a busy machine; what leaks never goes.
    """
    end = time.monotonic() + seconds
    while True:
        found = holdings() - before
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.05)
