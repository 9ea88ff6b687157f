"""The engine's codes, and the one funnel from them to the errors that users catch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from lossycoll.errors import (
    AbortedError,
    ClosedError,
    EngineError,
    LinkError,
    LossyError,
    MismatchError,
    OperationTimeout,
)


class Code(IntEnum):
    """lc_code of native/lossycoll.h."""

    OK = 0
    PENDING = 1
    ARGUMENT = -1
    MEMORY = -2
    SYSTEM = -3
    MISMATCH = -4
    TIMEOUT = -5
    ABORTED = -6
    CLOSED = -7
    LINK = -8


@dataclass(frozen=True, slots=True)
class Failure:
    """lc_failure of native/lossycoll.h. ``mine`` and ``theirs``: signature, elements, dtype; for
    LINK ``mine`` has the packets that the peer sent, the rounds that it took, and nanoseconds."""

    code: int
    errno: int = 0
    peer: int = -1
    op: int = 0
    mine: tuple[int, int, int] = (0, 0, 0)
    theirs: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Where:
    """What the funnel says besides the code: whose call failed, and whom it is made with.

    ``call`` is the collective as text, ``seq`` its number in the group (-1: no call),
    ``addresses`` one text per rank, ``timeout`` in seconds.
    """

    rank: int
    world: int
    call: str = ""
    seq: int = -1
    addresses: Sequence[str] = ()
    timeout: float = 0.0

    def __str__(self) -> str:
        text = f"rank {self.rank}/{self.world}"
        return f"{text}: call #{self.seq} {self.call}" if self.seq >= 0 else text

    def peer(self, rank: int) -> str:
        """A rank as errors write it: with its address, where that is known."""
        if rank < 0:
            return "a peer"
        known = 0 <= rank < len(self.addresses)
        return f"rank {rank} ({self.addresses[rank]})" if known else f"rank {rank}"


DTYPE_NAMES: Final = ("float32", "float64", "float16", "bfloat16", "bytes")
"""Names of lc_dtype's values, in their order."""


def check(failure: Failure, where: Where) -> None:
    """Raises the typed error of ``failure``; nothing for a code that isn't one."""
    if failure.code < 0:
        raise error_of(failure, where)


def error_of(failure: Failure, where: Where) -> LossyError:
    """The typed error that belongs to an engine failure (``failure.code`` < 0)."""
    code = failure.code
    peer = failure.peer if failure.peer >= 0 else None
    who = where.peer(failure.peer)
    if code == Code.MISMATCH:
        return MismatchError(
            f"{where}: {who} means something else by operation {failure.op}: "
            f"{_difference(failure)}; make all ranks issue the same collectives in the same order "
            f"with the same sizes, dtypes and options",
            peer=peer,
        )
    if code == Code.TIMEOUT:
        return OperationTimeout(
            f"{where}: {who} didn't take part within {where.timeout:g} s; is it stuck or still "
            f"computing? a longer timeout is given to init_process_group or new_group",
            peer=peer,
        )
    if code == Code.LINK:
        return _link_error(failure, where)
    if code == Code.ABORTED:
        return AbortedError(
            f"{where}: aborted; the first error of the job has the cause", peer=peer
        )
    if code == Code.CLOSED:
        return ClosedError(f"{where}: the group was destroyed before the operation ended")
    if code == Code.SYSTEM:
        reason = os.strerror(failure.errno)
        return EngineError(
            f"{where}: the socket failed with errno {failure.errno} ({reason}); "
            f"'lossycoll doctor' checks this machine",
            code=code,
            errno=failure.errno,
            peer=peer,
        )
    reasons: dict[int, str] = {
        Code.ARGUMENT: "refused an argument",
        Code.MEMORY: "ran out of memory",
    }
    return EngineError(
        f"{where}: the engine {reasons.get(code, 'failed')} (code {code}); unless memory "
        f"is short this is a bug in lossycoll",
        code=code,
        errno=failure.errno,
        peer=peer,
    )


def _link_error(failure: Failure, where: Where) -> LinkError:
    packets, rounds, waited = failure.mine
    link = f"the link from {where.peer(failure.peer)} to {where.peer(where.rank)}"
    seconds = f"{waited / 1e9:.3g} s"
    if packets:
        seen = (
            f"{link} delivers no data: of {packets} packets that were sent over it in {rounds} "
            f"rounds none has come for {seconds}, though that rank's control packets do; does a "
            f"firewall or an interface drop large packets (a smaller LOSSYCOLL_MTU helps), or is "
            f"LOSSYCOLL_INJECT set?"
        )
    else:
        seen = (
            f"{link} is silent: no packet has come for {seconds}, though that rank was asked all "
            f"the time and isn't lost; does a firewall drop UDP between the two "
            f"(LOSSYCOLL_PORT_RANGE says which ports are used)?"
        )
    return LinkError(
        f"{where}: {seen} 'lossycoll doctor' checks a network; repair the link, or start the job "
        f"without that rank",
        peer=failure.peer,
    )


def _difference(failure: Failure) -> str:
    """What differs between the two calls, as ``name: mine here, theirs there``."""
    parts = []
    if failure.mine[2] != failure.theirs[2]:
        parts.append(f"{_dtype(failure.mine[2])} here, {_dtype(failure.theirs[2])} there")
    if failure.mine[1] != failure.theirs[1]:
        parts.append(f"{failure.mine[1]} elements here, {failure.theirs[1]} there")
    if not parts:
        parts.append("another collective, root, reduction or delivery")
    return "; ".join(parts)


def _dtype(value: int) -> str:
    return DTYPE_NAMES[value] if 0 <= value < len(DTYPE_NAMES) else f"dtype {value}"
