"""Calls like ones before, served by what was decided then.

After computing, the pipeline's own code and data have left the caches, and walking through them
takes longer than sending 256 KiB. So each step of Python counts here.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from lossycoll.options.fields import Options
from lossycoll.options.scopes import scope
from lossycoll.runtime.collectives.operations import Steady
from lossycoll.runtime.core.call import CallOptions, Collective

from .collectives import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER
from .description import CollectiveKind, Description, is_gathered
from .devices import ServedDevices
from .reduction import Reduction
from .tensors import DTYPES, apart, is_plain
from .work import EngineWork


class Known(NamedTuple):
    """A call that the pipeline has served."""

    asked: Options  # The group's then
    choice: CallOptions  # The call's options and encoding
    named: Collective  # The call as ranks compare it
    reduction: Reduction | None  # What it asked for; None: a copy
    harmless_overlap: int | None  # Of its description
    steady: Steady | None  # What the engine is told; None: the plan of each is another
    timeout: timedelta  # torch's option


REPEATED: Final = (ALL_REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER)
"""Kinds of calls that :class:`Repeats` serves."""
MOST_KNOWN: Final = 256
"""Kinds of calls that a group remembers."""


class Repeats:
    """Calls of one group that are like ones before. ``devices``: those that the group serves."""

    def __init__(self, devices: ServedDevices) -> None:
        self._devices = devices
        self._known: dict[tuple[object, ...], Known] = {}

    def find(
        self,
        kind: CollectiveKind,
        source: Tensor,
        target: Tensor,
        what: object,
        opts: Any,
        asked: Options,
    ) -> Known | None:
        """The call that was served before like this one; None: none was.

        ``what``: the reduction's operation, or the root. ``asked``: the group's options now.
        """
        sizes = source.numel(), target.numel()
        known = self._known.get((kind, what, opts.asyncOp, source.dtype, target.dtype, sizes))
        if known is None or known.asked is not asked or not is_plain(source):
            return None
        if known.steady is not None and known.timeout != opts.timeout:
            return None
        if profiler._is_profiler_enabled or scope() is not None:
            return None
        if target is not source and not (
            is_plain(target) and apart(source, target, known.harmless_overlap) is source
        ):
            return None
        return known

    def remember(
        self,
        call: Description,
        choice: CallOptions,
        reduction: Reduction | None,
        named: Collective,
        asked: Options,
        opts: Any,
        work: dist.Work,
    ) -> None:
        """Has :meth:`find` find it for calls like this one."""
        told = choice.options.deterministic and choice.lossy
        if type(work) is not EngineWork or work.streams is not None or told or not call.nbytes:
            return
        if len(call.reads) != 1 or len(call.writes) != 1 or is_gathered(call.kind, reduction):
            return
        source, target = call.reads[0], call.writes[0]
        if call.compared is not source or call.detail != "" or call.result is not None:
            return  # another caller's kind of call, of the same collective
        steady = work.operation.steady
        order_drawn = steady is None and call.kind is ALL_REDUCE and choice.encoding == "same"
        if not (isinstance(steady, Steady) or order_drawn) or source.is_complex():
            return
        if reduction is not None and (reduction.factor is not None or source.dtype not in DTYPES):
            return
        if not all(self._devices.takes_as_is([tensor]) for tensor in (source, target)):
            return
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        what = call.op.op if call.op is not None else call.root
        sizes = source.numel(), target.numel()
        self._known[call.kind, what, opts.asyncOp, source.dtype, target.dtype, sizes] = Known(
            asked=asked,
            choice=choice,
            named=named,
            reduction=reduction,
            harmless_overlap=call.harmless_overlap,
            steady=steady if isinstance(steady, Steady) else None,
            timeout=opts.timeout,
        )
