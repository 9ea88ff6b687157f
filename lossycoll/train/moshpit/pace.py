"""When a peer's next round is due, and the samples that count for it."""

from __future__ import annotations

import logging
import time
from numbers import Integral
from typing import Final

from lossycoll.errors import OptionError

from .averager import MOST_SECONDS, MoshpitAverager

MOST_TARGET: Final = 1 << 40
REPORTS: Final = 16  # reports of a peer's samples between rounds, if all are equally fast
log: Final = logging.getLogger("lossycoll")


class Pace:
    """Pace of a peer's rounds: by its steps, by time, or by the samples of all peers. The arguments
    are :class:`.sgd.MoshpitSGD`'s. OptionError: they can't be."""

    def __init__(
        self,
        averager: MoshpitAverager,
        every: int,
        every_seconds: float | None,
        target: int | None,
        timeout: float,
    ) -> None:
        _check(every, every_seconds, target)
        self._averager = averager
        self.every = every
        self._every_seconds = every_seconds
        self.target = target or 0
        self._timeout = timeout
        self.began = time.monotonic()  # when the latest round did
        self._has_warned = False  # that no round begins
        self.samples = self.since = self._reported = 0
        """Samples of the swarm at the latest round, this peer's since, and those reported."""

    @property
    def is_by_steps(self) -> bool:
        return not self.target and self._every_seconds is None

    def is_due(self, steps: int) -> bool:
        """True if a round is. ``steps``: of this peer so far. Of samples it tells the others as
        often as a round needs."""
        if self.target:
            return self._is_due_by_samples()
        if self._every_seconds is None:
            return steps % self.every == 0
        # Time is counted from when the latest group formed: by their own clocks alone, peers that
        # started at unlike times would wait for one another in each round.
        now = time.monotonic()
        is_due = now - self.began >= self._every_seconds
        self.began = now if is_due else self.began
        return is_due

    def _is_due_by_samples(self) -> bool:
        now = time.monotonic()
        if self._averager.is_due:
            self.began = now
            return True
        if (self.since - self._reported) * max(1, self._averager.peers) * REPORTS >= self.target:
            self.tell()
        if now - self.began > self._timeout and not self._has_warned:
            self._has_warned = True
            log.warning(
                "no round for %g s: %d samples of this peer since the latest one, and a round is "
                "due after %d of all peers (target_samples, and the weight of each step)",
                now - self.began,
                self.since,
                self.target,
            )
        return False

    def formed(self, at: float) -> None:
        """The latest round's group formed then; 0: it didn't."""
        if self._every_seconds is not None:
            self.began = max(self.began, at)

    def weight(self, of_step: float) -> float:
        """Weight with which this peer is ready: the directory has the samples."""
        return float(self.since > 0) if self.target else of_step

    def tell(self) -> None:
        """Tell the others how far this peer is."""
        self._reported = self.since
        self._averager.progress(self.samples, self.since)

    def has_had(self, samples: int) -> None:
        """A round is over, in which the swarm had had so many samples, those reported among
        them. The others hear what is left: else another directory would count these again."""
        self.samples = max(self.samples, samples)
        self.since -= self._reported
        self.tell()

    def continue_from(self, samples: int) -> None:
        """This peer has the state of so many samples, and none since."""
        self.samples, self.since, self._reported = samples, 0, 0


def _check(every: int, every_seconds: float | None, target: int | None) -> None:
    if not isinstance(every, Integral) or every < 1:
        raise OptionError(f"every is {every}, wanted 1 or more")
    if every_seconds is not None and not (0 < every_seconds < MOST_SECONDS and every == 1):
        raise OptionError(
            f"every_seconds is {every_seconds} and every {every}, wanted seconds above 0 and "
            f"below {MOST_SECONDS:g}, or steps"
        )
    if target is None:
        return
    if type(target) is not int or not 1 <= target <= MOST_TARGET:
        raise OptionError(
            f"target_samples is {target!r}, wanted a whole number from 1 to {MOST_TARGET}"
        )
    if every != 1 or every_seconds is not None:
        raise OptionError(
            f"target_samples is {target}, every {every} and every_seconds {every_seconds}: wanted "
            f"one of the three"
        )
