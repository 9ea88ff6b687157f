"""Floats to convert: where conversions differ, and those of training's size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SPECIAL = np.array(
    [
        0x00000000, 0x80000000,  # zeros
        0x7F800000, 0xFF800000,  # infinities
        0x7FC00000, 0xFFC00001, 0x7F800001, 0xFF812345, 0x7FBFFFFF,  # NaNs, quiet and signalling
        0x00000001, 0x807FFFFF, 0x00800000,  # the least subnormal, the largest, the least normal
        0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF,  # where bf16 becomes infinity
        0x477FE000, 0x477FEFFF, 0x477FF000, 0xC77FF001,  # where fp16 does: 65504 and 65520
        0x38800000, 0x387FFFFF, 0x33800000, 0x33000000, 0x33000001,  # fp16's subnormals
        0x3F808000, 0x3F818000, 0x3F808001, 0x3F801000, 0x3F803000, 0x3F801001,  # ties
    ],
    dtype=np.uint32,
)  # fmt: skip


def floats() -> NDArray[np.float32]:
    """Of all kinds: evenly over the patterns, of training's size, and every special one."""
    rng = np.random.default_rng(14)
    patterns = np.arange(rng.integers(40009), 1 << 32, 40009, dtype=np.uint64).astype(np.uint32)
    usual = rng.standard_normal(50_001).astype(np.float32)
    return np.concatenate([patterns.view(np.float32), usual, SPECIAL.view(np.float32)])
