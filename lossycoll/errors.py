"""Typed errors: what users catch.

Every text names what the reader needs to act: the rank that speaks, the peer and its
address, the collective and its number in the group, the value seen, the value wanted,
and what to do about it.
"""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Sequence
from typing import TypeVar

_Error = TypeVar("_Error", bound="LossyError")


class LossyError(RuntimeError):
    """Base class of lossycoll's errors.

    Attributes:
        peer: The rank at fault, by its number in the group; None if none is known.
    """

    def __init__(self, message: str, *, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer

    def again(self: _Error, during: str = "") -> _Error:
        """Return a copy to raise: two threads must not raise one exception object.

        Args:
            during: The call that meets the error now. The text is extended by it, unless it names
                the call already.

        Returns:
            A copy without a traceback.
        """
        other = copy.copy(self).with_traceback(None)
        if during and during not in str(self):
            other.args = (f"{self} (met in {during})",)
        return other


class OptionError(LossyError, ValueError):
    """An option, a variable or an argument is unknown or out of range.

    Attributes:
        reason: The text without the rank, for callers that know the rank better.
    """

    def __init__(self, message: str, *, peer: int | None = None, reason: str = "") -> None:
        super().__init__(message, peer=peer)
        self.reason: str = reason or message


class RendezvousError(LossyError):
    """The ranks of a group don't meet: a rank is missing or duplicated, or options differ."""


def no_port(rank: int, world: int, address: str, ports: tuple[int, int]) -> RendezvousError:
    """The error for ``ports`` (first, last) of which none is free for TCP at ``address``."""
    where = f"rank {rank}/{world}: no free TCP port at {address} in {_range(ports)}"
    return RendezvousError(
        f"{where}: each rank of a host takes one; widen LOSSYCOLL_PORT_RANGE to at least as many "
        f"ports as a host has ranks, or free them (`ss -ltnp` names who listens)"
    )


def _range(ports: tuple[int, int]) -> str:
    count = ports[1] - ports[0] + 1
    return f"{ports[0]}-{ports[1]} ({count} port{'s' if count > 1 else ''})"


class InterfaceError(LossyError):
    """There is no usable network interface or address."""


class MismatchError(LossyError):
    """Ranks disagree about a call: its name, size, dtype or options."""


class PeerLostError(LossyError):
    """A rank died, or left the group while others still needed it."""


class LinkError(LossyError, ConnectionError):
    """A peer is alive, but its packets don't arrive."""


class NonFiniteError(LossyError, ArithmeticError):
    """A gradient holds NaN or infinity.

    Attributes:
        ranks: Ranks whose own gradients hold NaN or infinity, in ascending order.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message, peer=ranks[0] if ranks else None)
        self.ranks: tuple[int, ...] = tuple(ranks)


class TrainingError(LossyError):
    """A training script would silently make a step wrong."""


class CheckpointError(LossyError, ValueError):
    """A checkpoint doesn't fit, or isn't there."""


class OperationTimeout(LossyError, TimeoutError):
    """A rank that is alive hasn't taken part within the operation's timeout."""


class AbortedError(LossyError):
    """The group was aborted, here or on another rank."""


class UnsupportedError(LossyError, TypeError):
    """lossycoll can't serve this tensor, operation or group."""


class EngineError(LossyError):
    """The transport failed.

    Attributes:
        code: The engine's code; None if the engine had none.
        errno: The system's error number; 0 if there was none.
    """

    def __init__(
        self, message: str, *, code: int | None = None, errno: int = 0, peer: int | None = None
    ) -> None:
        super().__init__(message, peer=peer)
        self.code = code
        self.errno = errno


def no_udp_port(rank: int, world: int, address: str, ports: tuple[int, int]) -> EngineError:
    """The error for ``ports`` (first, last) of which none is free for UDP at ``address``."""
    where = f"rank {rank}/{world}: no free UDP port at {address} in {_range(ports)}"
    reason = os.strerror(errno.EADDRINUSE)
    return EngineError(
        f"{where}: {reason}; each rank of a host takes one, and another for every group with "
        f"an interface, MTU, buffers or pace of its own; widen LOSSYCOLL_PORT_RANGE",
        errno=errno.EADDRINUSE,
    )


def no_listener(
    rank: int, world: int, address: str, ports: tuple[int, int], cause: OSError
) -> EngineError:
    """The error for a process that can't listen at ``address``, for another reason than that all
    of its ``ports`` (first, last; 0: any) are taken."""
    where = f"rank {rank}/{world}: can't listen for TCP at {address}"
    if ports[0]:
        where += f" in {_range(ports)}"
    number = cause.errno or 0
    if number == errno.EADDRNOTAVAIL:
        remedy = "see `ip address`, or set LOSSYCOLL_INTERFACE to an address that this host has"
    elif number == errno.EADDRINUSE:
        remedy = "widen sysctl net.ipv4.ip_local_port_range, or set LOSSYCOLL_PORT_RANGE"
    elif number == errno.EACCES and ports[0]:
        remedy = "ports from 1024 on need no rights: raise LOSSYCOLL_PORT_RANGE"
    else:
        remedy = "see `ip address` and what this process may do (seccomp, SELinux, ulimit -a)"
    return EngineError(f"{where}: {cause.strerror or cause}; {remedy}", errno=number)


class LabError(LossyError):
    """The laboratory of bad networks can't be made, or broke."""


class LabPermissionError(LabError, PermissionError):
    """The laboratory needs rights that this process doesn't have."""


class ClosedError(LossyError):
    """The group was destroyed, or belongs to the process that this one was forked from."""
