"""Calls as the engine takes them, from what they mean; kept for those that come again."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from lossycoll.options.fields import Options
from lossycoll.plan import signature
from lossycoll.plan.codec import ENCODINGS
from lossycoll.runtime.core.call import CallKey, text_of
from lossycoll.runtime.engine.binding import Call, DType, Encoded, Ready
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions

from .estimators import Means


class Meaning(NamedTuple):
    """A call besides its data. ``key``, ``way``: as all ranks must mean it."""

    encoded: Encoded
    key: CallKey
    way: str
    options: Options
    dtype: DType
    scale: float
    timeout: float
    encoding: str
    notify: bool
    waits: bool


def call_of(meant: Meaning) -> Call:
    """What the engine needs besides a plan, without buffers."""
    options = meant.options
    reliable = options.delivery == "reliable"
    repair = 0 if reliable else options.repair
    fec, fec_auto = (0, False) if reliable else options.parity_sets
    plan = meant.encoded.plan.signature
    encoding = ENCODINGS.index(meant.encoding)
    return Call(
        input=0,
        output=0,
        dtype=meant.dtype,
        scale=meant.scale,
        signature=_signature(
            text_of(meant.key), meant.way, plan, reliable, repair, fec, fec_auto, encoding
        ),
        timeout=meant.timeout,
        reliable=reliable,
        repair=repair,
        fec=fec,
        fec_auto=fec_auto,
        encoding=meant.encoding,
        notify=meant.notify,
        waits=meant.waits,
    )


def with_data(
    call: Call, buffers: tuple[int, int], means: Means, blocks: Blocks | Contributions | None
) -> Call:
    return replace(
        call,
        input=buffers[0],
        output=buffers[1],
        weights=means.weights,
        divisor=means.divisor,
        selective=blocks is not None and blocks.selective,
        feedback=blocks is not None and blocks.feedback,
        needed=b"" if blocks is None else blocks.encoded(),
    )


@lru_cache(maxsize=256)
def ready(meant: Meaning) -> Ready:
    """Kept for the calls that come again: filling one in takes longer than sending 4 KiB."""
    return Ready.of(meant.encoded, call_of(meant))


@lru_cache(maxsize=256)
def _signature(call: str, way: str, *fields: int) -> int:
    """A plan's signature with the rest of what the ranks must agree on, 64 bits."""
    return signature(call, way, *fields)
