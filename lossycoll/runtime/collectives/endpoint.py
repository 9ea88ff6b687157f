"""One rank's endpoint of a group, without torch: its collectives, its ranks' fate, its end."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from lossycoll.errors import ClosedError, LossyError
from lossycoll.plan import packet_count
from lossycoll.runtime.core.call import Collective
from lossycoll.runtime.core.logfmt import log
from lossycoll.runtime.engine.binding import DType
from lossycoll.runtime.engine.failures import MESSAGES, error_of
from lossycoll.runtime.engine.gates import Wakers
from lossycoll.runtime.world.view_agreement import View

from .collective_endpoint import CollectiveEndpoint
from .group_context import GroupContext
from .leaving import Leaving
from .watcher import Watcher


class Endpoint(CollectiveEndpoint):
    """The endpoint that a group has. What the control plane says of other ranks comes here, too.

    Attributes:
        health: The group's, as in ``context``.
        options: The group's, as in ``context``.
        operations: Operations that were submitted.
        watcher: Completes what only a future waits for.
        stats: Counters of the group.
    """

    def __init__(self, context: GroupContext, *, timeout: float) -> None:
        super().__init__(context, timeout=timeout)
        self.watcher: Final = Watcher(context, self.operations)
        self._leaving = Leaving(context, self.operations, self.watcher, self.stats)

    @property
    def one_host(self) -> bool:
        """Whether nothing that the ranks send leaves a host."""
        return self._topology.one_host

    @property
    def host_each(self) -> bool:
        """Whether each rank counts as a host of its own."""
        return len(set(self._topology.hosts)) == self.world

    @property
    def group(self) -> int:
        """The group's number, the same on all ranks."""
        return self._group

    @property
    def wakers(self) -> Wakers:
        """Wakers for the gates of its operations."""
        assert self._engine is not None
        return self._engine.wakers

    @property
    def timeout(self) -> float:
        """Seconds for ranks that never take part."""
        return self.operations.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.operations.timeout = seconds

    @property
    def block_bytes(self) -> int:
        """Bytes of one packet's data, without an encoding."""
        return self._payload

    def block_elements(self, encoding: str) -> int:
        """The float32 elements that one packet carries. ``encoding``: a name of plan.codec's."""
        return self._block_elements(encoding)

    def blocks(self, nbytes: int, encoding: str = "same") -> int:
        """The number of packets that carry so many bytes, of float32 if they are encoded."""
        if encoding == "same":
            return packet_count(nbytes, self._payload)
        return packet_count(nbytes // DType.F32.itemsize, self.block_elements(encoding))

    # ---- what the control plane says of other ranks, in its thread ----

    def lose(self, rank: int) -> int:
        """Stops submitting until :meth:`go_on`, and gives a rank up."""
        assert self._engine is not None
        # First: who waited for the rank could otherwise submit another operation of the old view.
        following = self._sequencer.stop()
        with contextlib.suppress(ClosedError):
            self._engine.peer_dead(rank)
        return following

    def left(self, rank: int) -> None:
        """A rank has left in order: nothing else comes from it.

        Nor does it need what was done here before its last call. If it never took part in something
        that is still sent, the group fails by that.
        """
        if self._engine is not None:
            with contextlib.suppress(ClosedError):
                if self._engine.lingering()[0]:
                    self.health.waiting_for_last()
                self._engine.peer_left(rank)

    def go_on(self, views: Sequence[View], agreed: bool) -> None:
        """Takes views over, and submits again if the last one is agreed."""
        before = self._sequencer.latest
        self._sequencer.resume(views, agreed=agreed)
        after = self._sequencer.latest
        for rank in sorted(set(after.lost) - set(before.lost)):
            log.warning(
                "%s: lost %s; going on with ranks %s from operation %d on, means are over those",
                self.health.where,
                self.health.where.peer(rank),
                ", ".join(str(rank) for rank in after.ranks),
                views[-1].first,
            )

    def lost_alike(self) -> tuple[int, ...]:
        """Lost ranks, as of the last operation submitted here."""
        return self._sequencer.at(self._sequencer.next - 1).lost

    def look(self) -> None:
        """Now and then, from the control plane's thread: warns of what the figures show, and tells
        the other ranks of a message that ended the group, which nobody here may wait for."""
        self.stats.own()
        if self.health.failure is None and self._engine is not None:
            with contextlib.suppress(ClosedError):
                failure = self._engine.failure()
                if failure.code in MESSAGES:
                    self.health.fail(error_of(failure, self.health.where), tell=True)

    # ---- the end ----

    def fail(self, call: Collective, error: LossyError) -> None:
        """Makes an error of this rank's own the failure of all ranks.

        It doesn't overtake calls that were done here: other ranks get what they need of them
        first, within a second.
        """
        try:
            self._leaving.finish_delivery(call)
        finally:  # also if Ctrl-C ends the wait
            self.health.fail(error, tell=True)

    def close(self) -> None:
        """Announces to the other ranks that this one leaves, ends what is pending, joins threads.

        Idempotent; if Ctrl-C interrupts it, the next call does the rest.
        """
        self._leaving.close()
