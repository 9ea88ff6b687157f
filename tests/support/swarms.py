"""Peers of a swarm in one process, each by a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lossycoll import Options, Swarm

SECRET = "a secret of tests"
Make = Callable[..., list[Swarm]]


def made_in(stack: ExitStack, count: int = 3, **options: Any) -> list[Swarm]:
    """Peers "0", "1" and so on of one swarm, of which the first one listens."""
    how = Options(**options) if options else None
    swarms = [stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET, name="0", options=how))]
    while len(swarms) < count:
        at, name = swarms[0].address, str(len(swarms))
        swarms.append(stack.enter_context(Swarm(join=[at], secret=SECRET, name=name, options=how)))
    return swarms


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """What each returns, or raises."""
    out: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            out[number] = works[number]()
        except Exception as error:
            out[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return out


def all_do(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` returns of each peer; the first error of one is raised."""
    found = at_once(*(partial(work, number) for number in range(count)))
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found
