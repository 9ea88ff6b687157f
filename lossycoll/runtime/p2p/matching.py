"""Which message goes to which receive: pure data, no sockets.

A receive names a tag and a source, or takes from any source. Of several messages that fit, the
first to arrive is taken; of several receives that fit, the first to be posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_Message = TypeVar("_Message")
_Receive = TypeVar("_Receive")
_Item = TypeVar("_Item")

_Queues = dict[int, dict[int | None, deque[tuple[int, _Item]]]]
"""By tag and source: items with their place in the order of all."""


class Mailbox(Generic[_Message, _Receive]):
    """What has arrived and what is wanted, as far as they have not met."""

    def __init__(self) -> None:
        self._arrived: _Queues[_Message] = {}
        self._posted: _Queues[_Receive] = {}
        self._count = 0

    def arrive(self, source: int, tag: int, message: _Message) -> _Receive | None:
        """The receive that ``message`` goes to; without one it is kept until it is wanted."""
        found = _take(self._posted, tag, (source, None))
        if found is None:
            self._put(self._arrived, tag, source, message)
        return found

    def post(self, source: int | None, tag: int, receive: _Receive) -> _Message | None:
        """The message that ``receive`` takes; without one it is kept until one arrives.

        ``source``: None for any.
        """
        sources = tuple(self._arrived.get(tag, ())) if source is None else (source,)
        found = _take(self._arrived, tag, sources)
        if found is None:
            self._put(self._posted, tag, source, receive)
        return found

    def forget(self, unwanted: Callable[[_Receive], bool]) -> None:
        """Removes the posted receives that are ``unwanted``."""
        for queues in self._posted.values():
            for queue in queues.values():
                kept = [entry for entry in queue if not unwanted(entry[1])]
                queue.clear()
                queue.extend(kept)

    def drop(self, source: int) -> None:
        """Removes what has arrived from ``source``."""
        for queues in self._arrived.values():
            queues.pop(source, None)

    def _put(self, table: _Queues[_Item], tag: int, source: int | None, item: _Item) -> None:
        self._count += 1
        table.setdefault(tag, {}).setdefault(source, deque()).append((self._count, item))


def _take(table: _Queues[_Item], tag: int, sources: tuple[int | None, ...]) -> _Item | None:
    """The earliest of what is there for any of ``sources``. Leaves no empty queue behind."""
    queues = table.get(tag, {})
    source = min(
        (source for source in sources if queues.get(source)),
        key=lambda source: queues[source][0][0],
        default=_NOBODY,
    )
    if source == _NOBODY:
        return None
    _, item = queues[source].popleft()
    if not queues[source]:
        del queues[source]
        if not queues:
            del table[tag]
    return item


_NOBODY = -1
