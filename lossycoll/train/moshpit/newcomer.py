"""A newcomer's way to the state of the others, and into their next round."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from lossycoll.errors import ClosedError, LossyError, OperationTimeout, OptionError, RendezvousError
from lossycoll.runtime.swarm.member import RoundReport
from lossycoll.runtime.swarm.state_transfer import Snapshot
from lossycoll.train.common.collectives import extremes
from lossycoll.train.common.models import is_dtensor
from lossycoll.train.common.packing import unpacked

from .replica import Replica

MOST_STATES: Final = 16
"""A state may have so many times the bytes of the model's own, and MOST_BYTES besides."""
MOST_BYTES: Final = 1 << 26
MOST_DONORS: Final = 127
MOST_KEPT: Final = 0.5  # a round of which less came is none to begin with
FAILED: Final = -1  # in place of a step
AGAIN_SECONDS: Final = 0.2  # after donors that have failed


@dataclass(frozen=True, slots=True)
class CatchUpReport:
    """Report of a newcomer's catch-up with the others' state.

    Attributes:
        round: Number of the round in which it took part with weight 0.
        in_step: Whether its state is the others'. False: its outer optimizer is of an earlier
            round.
        tries: Number of states that it fetched.
        donors: Number of peers that sent parts of the last state.
        bytes: Bytes received, in all.
        seconds: Seconds in all, the wait for the others' round included.
    """

    round: int
    in_step: bool
    tries: int
    donors: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A peer that takes the others' state. ``empty_round`` has a round of at most so many seconds,
    to which this peer brings nothing. The rest is of :meth:`.sgd.MoshpitSGD.catch_up`."""

    replica: Replica
    empty_round: Callable[[float], RoundReport]
    donors: int
    tries: int

    def __post_init__(self) -> None:
        if not 1 <= self.donors <= MOST_DONORS or self.tries < 1:
            raise OptionError(
                f"donors={self.donors} and tries={self.tries}, wanted 1 to {MOST_DONORS}, and 1 or "
                f"more"
            )

    def catch_up(self, until: float) -> CatchUpReport | None:
        """With ranks of one peer, all come to one step: those that are behind have the others' next
        round. If one fails, all do. ``until``: by :func:`time.monotonic`."""
        if not self.replica.shards:
            return self._alone(until)
        shard = next(filter(is_dtensor, self.replica.shards.values()))
        report: CatchUpReport | None = None
        greatest: int | None = None
        while True:
            failed: LossyError | None = None
            try:
                if greatest is None or self.replica.latest_at < greatest:
                    report = self._alone(until, is_behind=greatest is not None)
            except LossyError as error:
                failed = error
            at = FAILED if failed else self.replica.latest_at
            least, greatest = extremes(at, shard)
            if least == FAILED:
                raise failed or OperationTimeout(
                    "another rank of this peer can't come to the others' step"
                )
            if least == greatest:
                return report

    def _alone(self, until: float, *, is_behind: bool = False) -> CatchUpReport | None:
        """``is_behind``: it has a round even with the newest state."""
        begin, came, number, donors = time.monotonic(), 0, 0, 0
        own = first = self.replica.snapshot()
        most = MOST_STATES * len(own.data) + MOST_BYTES
        failed: LossyError | None = None
        while (left := until - time.monotonic()) > 0:
            taken, error = None, None
            try:
                taken = self.replica.averager.fetch_state(own, self.donors, most, left)
            except (ClosedError, RendezvousError, OperationTimeout):
                raise
            except LossyError as found:  # others may have it
                error = failed = found
            if taken is None and failed is not None and (error or own is first):
                if error is None and self.replica.averager.peers == 1:  # all others have gone
                    raise failed
                # For a while the directory names none that couldn't be reached.
                time.sleep(min(AGAIN_SECONDS, left))
                continue
            if taken is not None and taken.snapshot is not own:
                own, came, donors = taken.snapshot, came + taken.bytes, taken.donors
                self._take(own, first)
            elif own is first and not is_behind:
                return None
            number += 1
            report = self.join_in(until - time.monotonic())
            if report.failure or report.kept > MOST_KEPT:
                number -= 1
                continue
            in_step = self._is_in_step(own, report)
            if in_step or (number >= self.tries and not self.replica.by_gradients):
                self.replica.offer(report)
                took = time.monotonic() - begin
                return CatchUpReport(report.round, in_step, number, donors, came, took)
        raise failed or OperationTimeout(f"no round of the others within {until - begin:g} s")

    def _take(self, taken: Snapshot, first: Snapshot) -> None:
        state_of = partial(unpacked, taken.skeleton, taken.data)
        self.replica.take_state(state_of, taken.round, first, "the others' state")
        self.replica.pace.samples = taken.samples
        self.replica.pace.tell()

    def _is_in_step(self, began_with: Snapshot, report: RoundReport) -> bool:
        """Return whether this peer is where the others are, after its first round."""
        replica = self.replica
        if replica.outer is None and not replica.by_gradients:
            # The mean is all that they have in common. Moments are each peer's own: those of some
            # rounds ago are as good, and by the time that newer ones came they would be old, too.
            return True
        # A round that runs beside steps has begun when the one before is taken.
        follows = report.round - began_with.round - 1 <= int(replica.is_delayed)
        return follows and (report.kept == 0 or not replica.by_gradients)

    def join_in(self, timeout: float) -> RoundReport:
        """Have the others' next round. Then this peer has had as many steps as they had when it
        began."""
        replica = self.replica
        before, at = replica.latest, replica.latest_at
        report = self.empty_round(max(1.0, timeout))
        # A state doesn't say which round comes next: this one is known by its number.
        replica.latest_at = at + max(1, report.round - before) * replica.pace.every
        replica.steps = replica.latest_at
        return report
