"""The name by which an error's type travels to the other ranks of a group.

Names are written out, and stay when a class is renamed: they are part of the protocol
(docs/control-messages.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lossycoll import errors

KINDS: Final[Mapping[str, type[errors.LossyError]]] = {
    "OptionError": errors.OptionError,
    "RendezvousError": errors.RendezvousError,
    "InterfaceError": errors.InterfaceError,
    "MismatchError": errors.MismatchError,
    "PeerLostError": errors.PeerLostError,
    "LinkError": errors.LinkError,
    "NonFiniteError": errors.NonFiniteError,
    "TrainingError": errors.TrainingError,
    "CheckpointError": errors.CheckpointError,
    "OperationTimeout": errors.OperationTimeout,
    "AbortedError": errors.AbortedError,
    "UnsupportedError": errors.UnsupportedError,
    "EngineError": errors.EngineError,
    "LabError": errors.LabError,
    "LabPermissionError": errors.LabPermissionError,
    "ClosedError": errors.ClosedError,
    "LossyError": errors.LossyError,
}
"""Error types, by their name on the wire."""
SHARED: Final = frozenset(
    {
        errors.LinkError,
        errors.MismatchError,
        errors.OperationTimeout,
        errors.PeerLostError,
        errors.RendezvousError,
    }
)
"""Errors that are of the same type on all ranks, whoever finds them."""
UNMAKEABLE: Final = (errors.OptionError, errors.InterfaceError)
"""Errors that keep one rank from making a group: the others can't meet it."""
OTHER: Final = "Exception"
"""Errors that aren't of lossycoll."""

_NAMES: Final[Mapping[type, str]] = {cls: name for name, cls in KINDS.items()}


def kind_of(error: BaseException) -> str:
    """The name under which other ranks hear of ``error``: of its type, or of the nearest base."""
    return next((_NAMES[cls] for cls in type(error).__mro__ if cls in _NAMES), OTHER)


def kind_of_unmade(error: BaseException) -> str:
    """The same of an error by which this rank can't make a group."""
    return _NAMES[errors.RendezvousError] if isinstance(error, UNMAKEABLE) else kind_of(error)


def type_for(kind: str) -> type[errors.LossyError]:
    """Type of the error to raise where another rank has ended the group by one of ``kind``."""
    found = KINDS.get(kind, errors.AbortedError)
    return found if found in SHARED else errors.AbortedError
