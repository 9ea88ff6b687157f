"""Parts of kernels for packets of few bits: floats by their bits, planes and headers.

As lowbit_kernels.py, which puts them together, this imports Triton. Functions here are compiled
into kernels; what isn't said to be a number is a block of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A kernel can read constants of this kind alone. native/lowbit.h says what they are.
CONSTANT = tl.constexpr(255)
MOST = tl.constexpr(32767.0)
TOP = tl.constexpr(141)
NO_PLACE = tl.constexpr(255)
NOT_A_NUMBER = tl.constexpr(0x7FC00000)
INFINITE = tl.constexpr(0x7F800000)
MINUS_INFINITE = tl.constexpr(-0x7F800001)  # where in_order puts the negative infinity
LEAST_INT = tl.constexpr(-0x80000000)
GREATEST_INT = tl.constexpr(0x7FFFFFFF)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: the adder rounds to whole numbers
LARGEST_CUT = tl.constexpr(0xFF7FFF)  # the three bytes of the least float that a spike can be


# ---- floats ----


@triton.jit
def bits_of(x: tl.tensor) -> tl.tensor:
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def in_order(bits: tl.tensor) -> tl.tensor:
    """Integers in the order of the floats that have these bits: NaNs lie beyond the infinities, and
    -0 before 0. What it makes of its result is the bits."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def nearest(x: tl.tensor) -> tl.tensor:
    """To whole numbers, halves to even; below 2^22."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def power_of_two(power: tl.tensor) -> tl.tensor:
    """2^power, from -149 to 127."""
    denormal = 1 << tl.maximum(power + 149, 0)
    return float_of(tl.where(power < -126, denormal, (power + 127) << 23))


@triton.jit
def cut_down(x: tl.tensor) -> tl.tensor:
    """The three bytes of a spike: x rounded down, if it isn't -0; nothing becomes infinite."""
    bits = bits_of(x)
    bits += tl.where(bits < 0, 255, 0)
    return tl.where((bits & INFINITE) == INFINITE, LARGEST_CUT, (bits >> 8) & 0xFFFFFF)


@triton.jit
def cut_up(x: tl.tensor) -> tl.tensor:
    negative = cut_down(tl.where(x == 0.0, 0.0, -x))
    return tl.where(negative == 0, 0, negative ^ 0x800000)


@triton.jit
def draw(counters: tl.tensor, key: tl.tensor) -> tl.tensor:
    """One of 2^14 numbers for each counter, evenly between -1/2 and 1/2; both are uint32."""
    w = (counters ^ (counters >> 16)) * 0x7FEB352D
    w ^= key
    w = (w ^ (w >> 15)) * 0x846CA68B
    w = (w ^ (w >> 16)) * 0x9E3779B9
    whole = (w >> 18).to(tl.int32).to(tl.float32)
    return whole * 0.00006103515625 + -0.499969482421875  # 2^-14, and 2^-15 - 1/2


# ---- layout ----


@triton.jit
def plane_bytes(n: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    return (n * WIDTH + 7) >> 3


@triton.jit
def planes_bytes(n: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    if BITS == 6:
        total = plane_bytes(n, 4) + plane_bytes(n, 2)
    elif BITS == 5:
        total = plane_bytes(n, 4) + plane_bytes(n, 1)
    elif BITS == 3:
        total = plane_bytes(n, 2) + plane_bytes(n, 1)
    else:
        total = plane_bytes(n, BITS)
    return total


@triton.jit
def put_plane(
    plane: tl.tensor,
    indices: tl.tensor,
    at: tl.tensor,
    n: tl.tensor,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Some bits of each index of a chunk. Indices beyond the packet are 0."""
    PER: tl.constexpr = 8 // WIDTH
    parts = (tl.reshape(indices, (CHUNK // PER, PER)) >> SHIFT) & ((1 << WIDTH) - 1)
    packed = tl.sum(parts << (tl.arange(0, PER) * WIDTH)[None, :], axis=1)
    byte = at // PER + tl.arange(0, CHUNK // PER)
    tl.store(plane + byte, packed.to(tl.uint8), mask=byte < plane_bytes(n, WIDTH))


@triton.jit
def put_planes(
    to: tl.tensor,
    indices: tl.tensor,
    at: tl.tensor,
    n: tl.tensor,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    if BITS == 8:
        put_plane(to, indices, at, n, 8, 0, CHUNK)
    elif BITS >= 4:
        put_plane(to, indices, at, n, 4, 0, CHUNK)
        if BITS == 6:
            put_plane(to + plane_bytes(n, 4), indices, at, n, 2, 4, CHUNK)
        elif BITS == 5:
            put_plane(to + plane_bytes(n, 4), indices, at, n, 1, 4, CHUNK)
    else:
        put_plane(to, indices, at, n, 2, 0, CHUNK)
        if BITS == 3:
            put_plane(to + plane_bytes(n, 2), indices, at, n, 1, 2, CHUNK)


@triton.jit
def get_plane(
    plane: tl.tensor, place: tl.tensor, inside: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """Elements of one byte load it each: neighbours share the transaction, and nothing has to move
    between threads."""
    bit = place * WIDTH
    byte = tl.load(plane + (bit >> 3), mask=inside, other=0).to(tl.int32)
    return (byte >> (bit & 7)) & ((1 << WIDTH) - 1)


@triton.jit
def get_planes(
    source: tl.tensor, place: tl.tensor, inside: tl.tensor, n: tl.tensor, BITS: tl.constexpr
) -> tl.tensor:
    if BITS == 8:
        indices = get_plane(source, place, inside, 8)
    elif BITS >= 4:
        indices = get_plane(source, place, inside, 4)
        if BITS == 6:
            indices |= get_plane(source + plane_bytes(n, 4), place, inside, 2) << 4
        elif BITS == 5:
            indices |= get_plane(source + plane_bytes(n, 4), place, inside, 1) << 4
    else:
        indices = get_plane(source, place, inside, 2)
        if BITS == 3:
            indices |= get_plane(source + plane_bytes(n, 2), place, inside, 1) << 2
    return indices


@triton.jit
def put_bytes(
    to: tl.tensor, i: tl.tensor, number: tl.tensor, live: tl.tensor, BYTES: tl.constexpr
) -> None:
    """The low bytes of numbers i; nothing is aligned."""
    for k in tl.static_range(BYTES):
        tl.store(to + BYTES * i + k, (number >> (8 * k)).to(tl.uint8), mask=live)


@triton.jit
def get_bytes(source: tl.tensor, i: tl.tensor, live: tl.tensor, BYTES: tl.constexpr) -> tl.tensor:
    """Numbers i, of so many bytes, not negative."""
    number = tl.load(source + BYTES * i, mask=live, other=0).to(tl.int32)
    for k in tl.static_range(1, BYTES):
        byte = tl.load(source + BYTES * i + k, mask=live, other=0).to(tl.int32)
        number |= byte << (8 * k)
    return number
