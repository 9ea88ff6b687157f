"""Queue of groups' messages: delivered, kept until the group opens, or dropped.

Groups are opened and closed at other times on other ranks, so that messages come for groups that
aren't open here yet, or not any more.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, Final, Generic, Protocol, TypeVar

from lossycoll.runtime.control.schema import Malformed

from .messages import Addressed

MOST_EARLY: Final = 1024
"""Messages kept for groups that aren't open here yet."""
MOST_ENDED: Final = 4096
"""Groups that are remembered as over."""


class Receiver(Protocol):
    """A group that is open here."""

    @property
    def group(self) -> int: ...
    def take(self, process: int, packed: list[Any]) -> None: ...


_Group = TypeVar("_Group", bound=Receiver)


class GroupMessages(Generic[_Group]):
    """The groups that are open here, and the messages for others.

    ``foreign`` counts what was malformed or, of too much that came early, the oldest; ``late`` what
    came after its group was over here.
    """

    def __init__(self) -> None:
        self.foreign = 0
        self.late = 0
        self._open: dict[int, _Group] = {}
        self._early: deque[Addressed] = deque()
        self._ended: OrderedDict[int, None] = OrderedDict()

    def __iter__(self) -> Iterator[_Group]:
        """The groups that are open, of which some may end meanwhile."""
        return iter(list(self._open.values()))

    def open(self, group: _Group) -> None:
        """From now on ``group`` takes its messages, those that came early first."""
        self._open[group.group] = group
        early = [message for message in self._early if message.group == group.group]
        for message in early:
            self._early.remove(message)
            self._hand(group, message)

    def close(self, group: _Group) -> None:
        """``group`` takes no more messages, whether it was open or not. Idempotent."""
        self._open.pop(group.group, None)
        self._ended[group.group] = None
        for message in [one for one in self._early if one.group == group.group]:
            self._early.remove(message)
            self.late += 1
        while len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)

    def deliver(self, message: Addressed) -> None:
        """A message that has come for one of this rank's groups."""
        group = self._open.get(message.group)
        if group is not None:
            self._hand(group, message)
        elif message.group in self._ended:
            self.late += 1
        else:
            self._early.append(message)
            if len(self._early) > MOST_EARLY:
                self._early.popleft()
                self.foreign += 1

    def _hand(self, group: _Group, message: Addressed) -> None:
        try:
            group.take(message.sender, message.body)
        except Malformed:
            self.foreign += 1
