"""Health of a group, with the reason of its failure.

A failure belongs to the group: the first one wins, ends all that is pending, and every later call
is refused with it at once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from lossycoll import errors
from lossycoll.errors import ClosedError, LossyError, MismatchError
from lossycoll.runtime.core.call import Collective, LongWait
from lossycoll.runtime.core.logfmt import event
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.net.interfaces import why_cut_off

from .membership import Membership

IN_ORDER: Final = (
    "; a hook that issues collectives in callbacks of futures (PowerSGD's, with several buckets) "
    "needs Options(futures='in_order') for its group"
)
HISTORY: Final = 4096
"""Calls that are remembered for comparison with other ranks."""
SHARED: Final[Mapping[str, type[LossyError]]] = {
    "LinkError": errors.LinkError,
    "MismatchError": MismatchError,
    "OperationTimeout": errors.OperationTimeout,
    "PeerLostError": errors.PeerLostError,
    "RendezvousError": errors.RendezvousError,
}
"""Errors that are of the same type on all ranks, whoever finds them, by their name on the wire,
which stays when a class is renamed. Of any other the others hear by an AbortedError."""


def kind_of(error: BaseException) -> str:
    """The name under which other ranks hear of ``error``."""
    return next((name for name, cls in SHARED.items() if isinstance(error, cls)), "Exception")


def kind_of_unmade(error: BaseException) -> str:
    """The same of an error by which this rank can't make a group: the others can't meet it."""
    is_own = isinstance(error, errors.OptionError | errors.InterfaceError)
    return "RendezvousError" if is_own else kind_of(error)


@dataclass(eq=False)
class Health:
    """One rank's view of its group; the control plane's callbacks end here."""

    rank: int
    world: int
    _: KW_ONLY
    addresses: Sequence[str]  # one text per rank
    liveness: float
    control: Membership | None  # None in a world of one
    # Runs once, in the thread that finds the failure, and must be quick
    on_failure: Callable[[LossyError], None]
    outlive: bool = False  # the group continues without ranks that are lost
    group: str = ""  # its name in torch
    device: str = ""  # the interface that has this rank's address

    def __post_init__(self) -> None:
        self.where = Where(self.rank, self.world, addresses=self.addresses, group=self.group)
        self.failure: LossyError | None = None
        self.closed = False
        self.runs_callbacks = False
        """Whether calls have had futures that complete in another order at each rank."""
        self.seq = -1
        """Number of the last call issued."""
        self.lost: dict[int, str] = {}
        """Ranks that the group continues without, and why."""
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._failed = threading.Event()
        self._all_left = threading.Event()
        self._left: dict[int, tuple[int, str]] = {}
        """Ranks that have said goodbye: after which call, and why."""
        self._history: list[Collective | None] = [None] * HISTORY
        self.on_long_wait: Callable[[], None] = lambda: None
        """Called about once a second while a call takes long."""

    # ---- calls ----

    def admit(self, call: Collective) -> None:
        """Every call comes here first: raises the reason why there can't be one."""
        if self.failure is not None:
            raise self.failure.again(call.numbered)
        if self.closed:
            raise ClosedError(f"{self.where}: {call}: the group was destroyed; make a new one")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self.where}: {call}: the group belongs to process {self._pid}, from which "
                f"process {os.getpid()} was forked; make a group after the fork, or use spawn"
            )

    def issue(self, call: Collective) -> None:
        """Admits a collective and numbers it: all ranks issue the same ones in the same order."""
        if self.failure is not None or self.closed or os.getpid() != self._pid:
            self.admit(call)  # which raises
        self.seq += 1
        call.seq = self.seq
        self._history[call.seq % HISTORY] = call

    def take_back(self, call: Collective) -> bool:
        """Takes the number back of a call of which nothing was submitted, if it is the last one."""
        if call.seq != self.seq:
            return False
        self._history[call.seq % HISTORY] = None
        self.seq -= 1
        call.seq = -1
        return True

    def _call_at(self, seq: int) -> Collective | None:
        call = self._history[seq % HISTORY] if seq >= 0 else None
        return call if call is not None and call.seq == seq else None

    def call_at(self, seq: int) -> str | None:
        call = self._call_at(seq)
        return None if call is None else str(call)

    def call_of(self, op: int) -> Collective | None:
        """The call that operation number ``op`` is of; None if it is forgotten."""
        for call in self._history:
            if call is not None and call.last_op - call.submitted < op <= call.last_op:
                return call
        return None

    def waiting(self, call: Collective) -> None:
        """This rank waits for ``call``: will it ever end, and do the others mean the same?"""
        self.on_long_wait()
        if call.seq < 0:
            return
        for rank, (last, _) in sorted(dict(self._left).items()):
            if call.seq > last and rank not in self.lost:
                if self.outlive and self.control is not None:
                    self.control.missed(rank)
                elif (error := self.left(rank)) is not None:
                    self.fail(error)
                    return
        if self.control is not None:
            self.control.waiting(call.seq, str(call))

    def last_call(self) -> Collective | None:
        """The last one that this rank has issued, unless it is forgotten."""
        return self._call_at(self.seq)

    def long_wait(self, call: Collective, since: float) -> LongWait:
        """A wait for ``call`` that asks as ``waiting`` does from time to time."""
        return LongWait(self.waiting, call, since)

    # ---- failures ----

    def fail(self, error: LossyError, *, tell: bool = False) -> None:
        """Makes ``error`` the group's failure, unless it has one. ``tell``: the other ranks too."""
        if self.runs_callbacks and isinstance(error, MismatchError) and IN_ORDER not in str(error):
            error.args = (f"{error}{IN_ORDER}",)
        with self._lock:
            if self.failure is not None or self.closed:
                return
            self.failure = error
        last = {"seq": self.seq} if self.seq >= 0 else {}
        event(logging.INFO, self.where, "failed", **last, type=type(error).__name__, why=error)
        self.on_failure(error)
        self._failed.set()
        if tell and self.control is not None:
            self.control.abort(str(error), kind_of(error))

    def await_failure(self, seconds: float) -> LossyError | None:
        self._failed.wait(seconds)
        return self.failure

    def left(self, rank: int) -> errors.PeerLostError | None:
        """Why a rank that has said goodbye can't take part; None: it hasn't."""
        if rank not in self._left:
            return None
        last, why = self._left[rank]
        when = f"after call #{last}" if last >= 0 else "before its first call was done"
        reason = f", by {why}" if why else "; did it end early, or raise an error of its own?"
        text = f"{self.where}: {self.where.peer(rank)} left the group {when}{reason}"
        return errors.PeerLostError(text, peer=rank)

    def detach(self) -> None:
        """Lets go of whoever made this, so that a closed group is freed without a collector."""
        self.on_failure = lambda error: None
        self.on_long_wait = lambda: None

    # ---- what the control plane tells, from its thread ----

    def on_dead(self, rank: int, silent: float, ended: bool) -> None:
        where = self.where
        if rank == where.rank:
            cause = self.why_cut_off(0)
            text = (
                f"{where}: the others have given this rank up, since it was silent for {silent:g} "
                f"s (liveness {self.liveness:g} s): {cause or 'stopped, or cut off from rank 0'}"
            )
            self.fail(errors.AbortedError(text, peer=rank))
        else:
            remedy = "restart the job (LOSSYCOLL_ON_PEER_LOSS=continue lets DDP's survivors go on)"
            cause = "" if ended else self.why_cut_off(rank)
            if not ended and not cause:
                remedy += ", or raise LOSSYCOLL_LIVENESS if it was only busy"
            how = self._how(silent, ended, cause)
            text = f"{where}: lost {where.peer(rank)}: {how}; {remedy}"
            self.fail(errors.PeerLostError(text, peer=rank))

    def _how(self, silent: float, ended: bool, cause: str) -> str:
        if ended:
            return "its process has ended"
        limits = f"silent for {silent:g} s (liveness {self.liveness:g} s)"
        return f"{limits}: {cause}" if cause else f"{limits}, so it is dead, stopped or cut off"

    def why_cut_off(self, rank: int) -> str:
        """Why this host can't send to ``rank``, with a remedy; "": it can, or nothing is known."""
        own, far = self.where.numeric(self.where.rank), self.where.numeric(rank)
        return why_cut_off(self.device, own, far) if self.device and own and far else ""

    def on_lost(self, rank: int, silent: float, ended: bool) -> None:
        cause = "" if ended else self.why_cut_off(rank)
        with self._lock:
            self.lost[rank] = self._how(silent, ended, cause)
            self._count_left()

    def lost_error(self, rank: int) -> errors.PeerLostError:
        how = self.lost.get(rank, "")
        return errors.PeerLostError(f"{self.where}: lost {self.where.peer(rank)}: {how}", peer=rank)

    def on_no_quorum(self, lost: Sequence[int], remaining: Sequence[int]) -> None:
        names = ", ".join(f"{self.where.peer(rank)}: {self.lost.get(rank)}" for rank in lost)
        text = (
            f"{self.where}: lost {names}; ranks {list(remaining)} don't continue, since they may "
            f"be the smaller part of a network that fell apart, or couldn't agree in time; "
            f"restart the job"
        )
        self.fail(errors.PeerLostError(text, peer=lost[0] if lost else None))

    def on_abort(self, rank: int, reason: str, kind: str) -> None:
        text = f"{self.where}: {self.where.peer(rank)} ended the group: {reason}"
        self.fail(SHARED.get(kind, errors.AbortedError)(text, peer=rank))

    def on_differs(self, how: str) -> None:
        self.fail(errors.RendezvousError(f"{self.where}: {how}"), tell=True)

    def on_own_host(self, rank: int, options: Mapping[str, Any]) -> None:
        """``rank`` waits for all to make a host for this group, which has none here."""
        asked = ", ".join(f"{name}={value!r}" for name, value in options.items())
        text = (
            f"{self.where}: {self.where.peer(rank)} asks for a socket of the group's own by "
            f"{asked}, this rank doesn't; write the same option into pg_options on all ranks"
        )
        self.fail(errors.RendezvousError(text, peer=rank), tell=True)

    def on_broken(self, error: Exception) -> None:
        """The control plane's thread ends by ``error``: nobody here would learn of a death."""
        text = f"{self.where}: the thread that hears of other ranks failed: {error!r}"
        self.fail(errors.EngineError(text), tell=True)

    def on_bye(self, rank: int, seq: int, why: str = "") -> None:
        with self._lock:
            self._left[rank] = seq, why
            self._count_left()

    def _count_left(self) -> None:
        if len(self._left.keys() | self.lost.keys()) == self.where.world - 1:
            self._all_left.set()

    def await_others(self, seconds: float) -> None:
        """Returns when all other ranks have said goodbye, or after ``seconds``, or on a failure:
        what a rank owes the others (a last confirmation that was lost, say) needs it to stay."""
        end = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < end:
            if self._all_left.wait(0.05):
                return

    def on_mismatch(self, seq: int, calls: dict[int, str]) -> None:
        where = self.where
        parts = [f"{call} on {where.peer(rank)}" for rank, call in sorted(calls.items())]
        text = (
            f"{where}: call #{seq} is {' but '.join(parts)}; make all ranks issue the same "
            f"collectives in the same order with the same sizes and dtypes"
        )
        peer = next((rank for rank in sorted(calls) if rank != where.rank), None)
        self.fail(MismatchError(text, peer=peer))
