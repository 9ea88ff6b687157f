"""A peer's part in loans: threads that lend its state, and groups of two for both ways."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from lossycoll.errors import EngineError, LossyError

from .loans import LENDER, TAKER, Pair, Taken, lend, refuse, take
from .paths import Paths
from .protocol import Loan
from .state import Snapshot

MOST_LENT: Final = 4
"""Newcomers that are served at a time."""
log: Final = logging.getLogger("lossycoll")


class Lending:
    """Of one peer, until ``close``.

    Args:
        number: The peer's.
        paths: Its engine's.
        per_packet: Bytes of a packet.
    """

    def __init__(self, number: int, paths: Paths, per_packet: int) -> None:
        self._number = number
        self._paths = paths
        self._per_packet = per_packet
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.schema = ""
        """Of what the peer averages."""
        self.state: Callable[[], Snapshot] | None = None
        """What is lent; None: nothing."""

    def borrow(
        self, loans: Sequence[Loan], own: Snapshot | None, most: int, timeout: float
    ) -> Taken | None:
        """Takes a state from all who lend; None: none is newer than this peer's.

        Args:
            loans: At least one.
            own: What this peer has already; None: nothing.
            most: Bytes that a state may have.
            timeout: Seconds for all of it.

        Raises:
            OperationTimeout: It hasn't come within ``timeout``.
            LossyError: No lender has all of it, or none is there any more.
        """
        pairs: list[Pair] = []
        failed: LossyError = EngineError(f"peer {self._number} has no lender")

        def end(pair: Pair) -> None:
            self._paths.end_loan(pair.engine)

        try:
            for loan in loans:
                try:
                    pairs.append(self._pair(loan, TAKER))
                except LossyError as error:  # it can't be reached: others can
                    failed = error
            if not pairs:
                raise failed
            return take(pairs, own, most, timeout, end)
        finally:
            for pair in pairs:
                end(pair)

    def lend(self, loan: Loan) -> None:
        """Serves a newcomer, on a thread of its own. Those that are too many are told so."""
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            if self._closed:
                return
            state = self.state if len(self._threads) < MOST_LENT else None
            thread = threading.Thread(
                target=self._serve, args=(loan, state), name="lossycoll-lender", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Ends all loans. Idempotent."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        while any(thread.is_alive() for thread in threads):
            self._paths.end_loans()
            for thread in threads:
                thread.join(0.05)

    def _serve(self, loan: Loan, state: Callable[[], Snapshot] | None) -> None:
        taker = loan.members[TAKER].number
        try:
            pair = self._pair(loan, LENDER)
            try:
                self._give(pair, state)
            finally:
                self._paths.end_loan(pair.engine)
        except LossyError as error:
            log.info("peer %d lends peer %d no more: %s", self._number, taker, error)

    def _give(self, pair: Pair, state: Callable[[], Snapshot] | None) -> None:
        if state is None:
            refuse(pair, f"peer {self._number} has no state to lend, or lends to {MOST_LENT}")
            return
        try:
            snapshot = state()
        except Exception as error:  # of a training, whatever it is: both ends say so
            log.warning("peer %d can't lend its state: %s", self._number, error)
            refuse(pair, f"peer {self._number} can't lend its state: {error}")
        else:
            lend(pair, snapshot)

    def _pair(self, loan: Loan, rank: int) -> Pair:
        own, other = loan.members[rank], loan.members[1 - rank]
        self._paths.admit(other, own.coming)
        engine = self._paths.loan(loan.number, loan.members)
        return Pair(engine, rank, f"{other.host}:{other.port}", self._per_packet, self.schema)
