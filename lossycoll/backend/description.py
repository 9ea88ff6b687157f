"""A collective as data: what one call reads, writes, compares and needs.

:class:`CollectiveKind` is what all calls of a collective have in common, a row of the table in
``collectives.py``. :class:`Description` is one call: ``process_group.py`` builds it and
``dispatch.py`` runs it. To add a collective, write a kind with its ``submit`` and describe its
calls; ``LossyProcessGroup.run`` (``extensions.py``) takes the description.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lossycoll.devices.registry import is_served
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.core.call import LONGEST, CallOptions, Collective, Observer, Operation
from lossycoll.runtime.engine.binding import DType
from lossycoll.runtime.world.group_state import Health

from .reduction import Reduction
from .tensors import DTYPES, address
from .work import EngineWork

NONE: Final = timedelta(0)


class Loss(Enum):
    """Condition under which packets of a collective may be lost."""

    NEVER = auto()
    REDUCTION = auto()
    """Sums and averages of floats of ``lossy_min_bytes`` or more, if the delivery is lossy.
    """
    COPY = auto()
    """The same for floats that are copied, but only inside ``with lossycoll.lossy():``."""
    DELIVERY = auto()
    """Wherever the delivery is lossy: the caller learns what became of each packet."""


class Rounding(Enum):
    """Points at which floats of a collective are rounded in transit (option ``wire``)."""

    NEVER = auto()
    GROUP = auto()
    """At the wish of the group or the scope around the call, from ``lossy_min_bytes`` on."""
    SCOPE = auto()
    """The same, but only as a scope asks, not the group: what one rank hands out, such as a model's
    parameters, stays exact unless the caller of this very collective wants it otherwise."""
    CALL = auto()
    """As ``Description.encoding`` says, at any size."""


class Filled(Enum):
    """Ranks whose tensors a collective fills."""

    ALL = auto()
    ROOT = auto()
    OTHERS = auto()
    """All but the root's."""


class Staged(NamedTuple):
    """The caller's tensors as buffers of one operation."""

    source: Tensor  # What is read; contiguous
    target: Tensor  # What is written; contiguous. May be ``source``.
    # Brings the result from ``target`` to the caller's tensors; None if it is there
    epilogue: Callable[[], None] | None = None
    # The same, for what is reduced from the contributions of the ranks that it gets
    among: Callable[[Sequence[int]], None] | None = None


class Submission(NamedTuple):
    """Argument of ``submit``: a checked, numbered and staged call.

    Attributes:
        endpoint: Endpoint that runs operations; ``submit`` calls one or several of its methods.
        call: The numbered call, as all ranks must issue it.
        description: Description of the call.
        source: Contiguous buffer to read.
        target: Contiguous buffer to write; it may be ``source``.
        call_options: Options, timeout, and actions at the operation's end.
        health: The group's state, for errors that ``submit`` finds.
    """

    endpoint: Endpoint
    call: Collective
    description: Description
    source: Tensor
    target: Tensor
    call_options: CallOptions
    health: Health

    @property
    def buffers(self) -> tuple[int, int]:
        """The addresses of both buffers."""
        return address(self.source), address(self.target)

    @property
    def dtype(self) -> DType:
        """The engine's dtype of both buffers."""
        return DTYPES[self.target.dtype]

    @property
    def root(self) -> int:
        """Root of the call."""
        assert self.description.root is not None
        return self.description.root


# Makes buffers of a call's tensors. True: elements may stay as they are, since their packets may be
# lost.
Stage = Callable[["Description", "Reduction | None", bool], Staged]
Submit = Callable[[Submission], "Operation | tuple[Operation, ...]"]


@dataclass(frozen=True, eq=False)
class CollectiveKind:
    """Properties shared by all calls of one collective.

    Attributes:
        name: Name in errors, in logs, and in the calls that ranks compare.
        loss: Condition under which its packets may be lost.
        stage: Function that makes buffers from tensors; ``staging.py`` has the choices.
        submit: Function that submits the call to the engine. None if contributions are always
            gathered.
        gathering: For reductions, gathering of the contributions for a reduction outside the
            engine. None if there is none.
        rounding: Condition under which packets carry rounded floats.
        empty_is_barrier: Whether a call without elements becomes a barrier. Otherwise ``submit``
            runs, since only this rank may know that it has nothing to send or receive.
        work: Class of the work that torch gets.
        operations: Number of operations that ``submit`` submits.
        divides: Whether a call with one buffer equals calls with its parts.
        spoils: Whether a failed call's outputs on a device are filled with one bits, as sums are.
        writes_source: Whether the engine may also write to the source.
        filled: Ranks whose tensors are filled, if there is a root.
    """

    name: str
    loss: Loss
    stage: Stage
    submit: Submit | None = None
    gathering: Submit | None = None
    rounding: Rounding = Rounding.NEVER
    empty_is_barrier: bool = True
    work: type[EngineWork] = EngineWork
    operations: int = 1
    divides: bool = False
    spoils: bool = False
    writes_source: bool = False
    filled: Filled = Filled.ALL


class Splits(NamedTuple):
    """Bytes that this rank sends to each rank, and expects from each."""

    send: Sequence[int]  # Of the caller's tensors, by rank
    receive: Sequence[int]  # The same
    factor: int = 1  # How many bytes of the buffers stand for one of these


class Description(NamedTuple):
    """Call of a collective at one rank.

    It is a named tuple, since a frozen dataclass takes two microseconds to make.

    Attributes:
        kind: Kind of collective.
        reads: The tensors that this rank contributes.
        writes: The tensors that are filled, and the work's result.
        nbytes: Bytes of the whole call, the same on all ranks. They decide whether the call is
            large enough for lossy delivery. 0: nothing moves.
        compared: Tensor whose dtype and number of elements all ranks must agree on.
        detail: Other values that ranks must agree on, part of the call's text, where ``op``,
            ``root`` and ``sizes`` don't say all.
        op: torch's ReduceOp, for reductions.
        root: Rank that sends or collects the data, if there is one.
        sizes: Number of elements of each rank's part, if parts differ.
        splits: Sizes by rank, if ranks don't know each other's sizes.
        harmless_overlap: Distance in bytes from source to target at which both may share memory,
            since each element is then read before it is replaced.
        argument: Argument for ``submit`` alone.
        result: The work's result, if ``submit`` fills other tensors than ``writes``.
        encoding: Encoding of float32 in packets, a name from plan.codec; for kinds whose callers
            choose it.
    """

    kind: CollectiveKind
    reads: list[Tensor]
    writes: list[Tensor]
    nbytes: int = 0
    compared: Tensor | None = None
    detail: object = ""
    op: Any = None
    root: int | None = None
    sizes: tuple[int, ...] | None = None
    splits: Splits | None = None
    harmless_overlap: int | None = None
    argument: Any = None
    result: list[Tensor] | None = None
    encoding: str = "same"

    @property
    def dtype(self) -> torch.dtype:
        """The tensors' dtype."""
        return (self.reads or self.writes)[0].dtype

    @property
    def on_device(self) -> bool:
        """True if the tensors lie on a device; all of them do, or none (devices.ServedDevices)."""
        tensors = self.reads or self.writes
        return bool(tensors) and is_served(tensors[0])

    @property
    def agreed(self) -> object:
        """What ranks must agree on besides what is ``compared``."""
        op = None if self.op is None else self.op.op
        if self.detail != "" or (op, self.root, self.sizes) == (None, None, None):
            return self.detail
        if self.sizes is not None:
            how = "" if op is None else f" {op.name} of"
            return f"{self.dtype}{how} {list(self.sizes)}"
        if self.root is None:
            return op
        way = f"{'to' if self.kind.filled is Filled.ROOT else 'from'} {self.root}"
        return way if op is None else f"{op.name} {way}"

    @property
    def filled(self) -> list[Tensor]:
        """The work's result."""
        return self.writes if self.result is None else self.result


def is_gathered(kind: CollectiveKind, reduction: Reduction | None) -> bool:
    """True if the engine gathers contributions and ranks reduce them: what it can't add."""
    return reduction is not None and not (reduction.native and kind.submit)


def call_options(
    choice: CallOptions,
    opts: Any,
    staged: Staged,
    reduction: Reduction | None,
    observe: Observer | None = None,
) -> CallOptions:
    """Options of a call with torch's ``opts``: ``choice``, and what its buffers ask for."""
    timeout = opts.timeout
    # Not by _replace, which takes three calls of Python.
    return CallOptions(
        options=choice.options,
        encoding=choice.encoding,
        mean=reduction is None or reduction.mean,
        timeout=min(timeout, LONGEST).total_seconds() if timeout > NONE else None,
        keep=(staged.source, staged.target),
        epilogue=staged.epilogue,
        among=staged.among,
        future=opts.asyncOp,
        observe=observe,
    )
