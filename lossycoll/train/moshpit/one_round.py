"""One round of averaging in a training, that may run beside the next steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from lossycoll.runtime.core.exits import start_thread
from lossycoll.runtime.swarm.member import RoundReport

from .averager import MoshpitAverager
from .fragments import WHOLE, Fragments


class OneRound:
    """One round, maybe on a thread of its own; ``values`` has what it makes of ``before`` less
    ``origin``, a tensor for each of the first, or none.

    ``at`` is this peer's steps before it, ``timeout`` the seconds for all of it, ``fragments``
    those of which the round averages one.
    """

    def __init__(
        self,
        averager: MoshpitAverager,
        values: list[Tensor],
        weight: float,
        timeout: float,
        at: int,
        fragments: Fragments = WHOLE,
        origin: Sequence[Tensor] = (),
    ) -> None:
        self._averager = averager
        self.at = at
        self.before = values
        self.values = [value.clone() for value in values]
        for value, begin in zip(self.values, origin, strict=False):
            value.sub_(begin)
        self._fragments = fragments
        self._how = weight, timeout
        self._report: RoundReport | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Has the round, on this thread."""
        try:
            self._report = self._averager.step_on(
                self.values, *self._how, fragments=self._fragments
            )
        except Exception as error:  # the thread that asks for the result raises it
            self._error = error

    def start(self) -> None:
        """Has it on another one."""
        self._thread = start_thread(self.run, "moshpit round")

    @property
    def is_over(self) -> bool:
        """True if :meth:`result` waits for nothing."""
        return self._thread is None or not self._thread.is_alive()

    def result(self) -> RoundReport:
        """Waits for its end.

        OperationTimeout: no group formed in time. RendezvousError: it was refused.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report
