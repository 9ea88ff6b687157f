"""A call as the engine takes it. Those that come again are kept."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np

from lossycoll.options.fields import Options
from lossycoll.plan import Delivery, signature
from lossycoll.plan.codec import number_of, phases
from lossycoll.runtime.core.call import CallKey, text_of
from lossycoll.runtime.engine.binding import DType, Encoded, EngineCall, Ready
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions

from .estimators import Means

RELIABLE: Final = Delivery(reliable=True)


@lru_cache(maxsize=64)
def lossy_delivery(options: Options) -> Delivery:
    """The lossy delivery that the options ask for."""
    code, most_parity, missing = options.parity
    chooses = options.chooses_rounds
    return Delivery(False, 0 if chooses else options.repair, code, most_parity, chooses, missing)


Key = tuple[Encoded, CallKey, str, Options, DType, float, float, str, bool, bool]
"""All that tells engine calls without data apart: plan, call, estimator, options, dtype, scale,
timeout in seconds, encoding, notify, waits. Ranks compare the call and the estimator."""


def call_of(key: Key) -> EngineCall:
    """Parameters for the engine besides a plan, without buffers."""
    encoded, call, estimator, options, dtype, scale, timeout, encoding, notify, waits = key
    reliable = options.delivery == "reliable"
    how, text = RELIABLE if reliable else lossy_delivery(options), text_of(call)
    return EngineCall(
        *(0, 0, dtype, scale),
        _signature(
            *(text, estimator, encoded.plan.signature, how.reliable, how.repair),
            *(how.code.number, how.most_parity, _bits(how.max_missing), how.choose_rounds),
            *map(number_of, phases(encoding)),
        ),
        timeout,
        how,
        encoding=encoding,
        notify=notify,
        waits=waits,
        lingers=True,
        deterministic=bool(options.deterministic),
        text=text,
    )


def with_data(
    key: Key, buffers: tuple[int, int], means: Means, blocks: Blocks | Contributions | None
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
def ready(key: Key) -> Ready:
    """Kept for the calls that come again: filling one in takes longer than sending 4 KiB."""
    return Ready.of(key[0], call_of(key))


def _bits(value: float) -> int:
    """All of a number that engines are told, as one that can be compared."""
    return int(np.float32(value).view(np.uint32))


@lru_cache(maxsize=256)
def _signature(call: str, estimator: str, *fields: int) -> int:
    """A plan's signature with the rest of what the ranks must agree on, 64 bits."""
    return signature(call, estimator, *fields)
