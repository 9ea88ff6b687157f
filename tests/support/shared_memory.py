"""Memory as a host shares it, and processes that are threads."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from lossycoll.runtime.net.descriptor_exchange import F_SEAL_FUTURE_WRITE, SEALS

BYTES = 4096
SEALED = SEALS | F_SEAL_FUTURE_WRITE

_Value = TypeVar("_Value")


def memory(seals: int = SEALED, size: int = BYTES) -> int:
    """A descriptor of memory that begins with its own number in this process."""
    made = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(made, size)
    if size:
        os.pwrite(made, f"{made};".encode(), 0)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made


class Meeting:
    """A rendezvous of threads. ``rounds``: the names of those that there were."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.rounds: list[str] = []
        self._said: dict[str, dict[int, Any]] = {}
        self._changed = threading.Condition()

    def of(self, rank: int) -> MeetingOfOne:
        return MeetingOfOne(self, rank)

    def exchange(self, rank: int, name: str, value: Any, meanwhile: Callable[[], None]) -> Any:
        with self._changed:
            if name not in self._said:
                self.rounds.append(name)
            self._said.setdefault(name, {})[rank] = value
            self._changed.notify_all()
            while len(self._said[name]) < self.world:
                meanwhile()
                assert self._changed.wait(20), f"{name}: only {sorted(self._said[name])} came"
            return [self._said[name][other] for other in range(self.world)]


class MeetingOfOne:
    """The rendezvous as a rank sees it."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def exchange(
        self, name: str, value: Any, meanwhile: Callable[[], None] = lambda: None
    ) -> list[Any]:
        found: list[Any] = self._meeting.exchange(self._rank, name, value, meanwhile)
        return found


def at_once(world: int, run: Callable[[int], _Value]) -> list[_Value]:
    """What ``run`` returns for each rank, each in a thread; raises what one of them raises."""
    found: dict[int, _Value] = {}
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            found[rank] = run(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(world)]
