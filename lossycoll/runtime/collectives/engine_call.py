"""A call as the engine takes it. Those that come again are kept."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lossycoll.options.fields import Options
from lossycoll.plan import signature
from lossycoll.plan.codec import number_of, phases
from lossycoll.plan.sets import NO_PARITY
from lossycoll.runtime.core.call import CallKey, text_of
from lossycoll.runtime.engine.binding import DType, Encoded, EngineCall, Ready
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions

from .estimators import Means


class CacheKey(NamedTuple):
    """All that tells engine calls without data apart. Ranks compare ``call`` and ``estimator``."""

    encoded: Encoded
    call: CallKey
    estimator: str
    options: Options
    dtype: DType
    scale: float
    timeout: float
    encoding: str
    notify: bool
    waits: bool


def call_of(key: CacheKey) -> EngineCall:
    """What the engine needs besides a plan, without buffers."""
    options = key.options
    reliable = options.delivery == "reliable"
    repair = 0 if reliable or options.chooses_rounds else options.repair
    code, most_parity, missing = (NO_PARITY, 0, -1.0) if reliable else options.parity
    chooses_rounds = not reliable and options.chooses_rounds
    plan = key.encoded.plan.signature
    encodings = [number_of(one) for one in phases(key.encoding)]
    return EngineCall(
        input=0,
        output=0,
        dtype=key.dtype,
        scale=key.scale,
        signature=_signature(
            text_of(key.call),
            key.estimator,
            plan,
            reliable,
            repair,
            code.number,
            most_parity,
            _bits(missing),
            chooses_rounds,
            *encodings,
        ),
        timeout=key.timeout,
        reliable=reliable,
        repair=repair,
        code=code,
        most_parity=most_parity,
        choose_rounds=chooses_rounds,
        max_missing=missing,
        encoding=key.encoding,
        notify=key.notify,
        waits=key.waits,
        lingers=True,
        deterministic=bool(options.deterministic),
        text=text_of(key.call),
    )


def with_data(
    key: CacheKey, buffers: tuple[int, int], means: Means, blocks: Blocks | Contributions | None
) -> EngineCall:
    """For one operation only, whose buffers, weights or packets are like no other's."""
    return replace(
        call_of(key),
        input=buffers[0],
        output=buffers[1],
        weights=means.weights,
        divisor=means.divisor,
        selective=blocks is not None and blocks.selective,
        feedback=blocks is not None and blocks.feedback,
        needed=b"" if blocks is None else blocks.encoded(),
    )


@lru_cache(maxsize=256)
def ready(key: CacheKey) -> Ready:
    """Kept for the calls that come again: filling one in takes longer than sending 4 KiB."""
    return Ready.of(key.encoded, call_of(key))


def _bits(value: float) -> int:
    """All of a number that engines are told, as one that can be compared."""
    return int(np.float32(value).view(np.uint32))


@lru_cache(maxsize=256)
def _signature(call: str, estimator: str, *fields: int) -> int:
    """A plan's signature with the rest of what the ranks must agree on, 64 bits."""
    return signature(call, estimator, *fields)
