"""Packets of floats in few bits, encoded and decoded on a GPU, by Triton: docs/wire.md has their
format.

native/lowbit.c is the same to the bit. This module imports Triton, so
import it only where that is there.

What keeps a GPU to the bit: kernels are launched with ``enable_fp_fusion=False``, since a product
and a difference that are fused are rounded once instead of twice; quotients are those of IEEE 754
(``div_rn``: Triton's ``/`` is up to 2 ulp off); denormals aren't flushed, as a test reads in the
code that is made; and NaNs and infinities are found in integers, so that none is compared. Triton
3.4 does flush in ``div_rn``, where it is of no account: a quotient here, and what it is of, is 0 or
2^-17 at least.

Long because all that is compiled into kernels is together. What a function here isn't said to take
as a number is a block of them.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossycoll.plan.codec import GROUPS, PLANES, LowBit

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

ENCODED_AT_ONCE: Final = {128: 512, 32: 256}
"""By size of a group: elements of one program; whole groups, of which every plane has whole bytes.
The grids of its groups are in the registers of all of its threads, hence fewer of small groups."""
DECODED_AT_ONCE: Final = {128: 1024, 32: 1024}
"""The same, of decoding."""
WARPS: Final = 1
"""Warps of a program. Of several each would work out the grids of all groups."""
MOST_CHUNKS: Final = 65535
"""Most chunks of a packet: the largest second dimension of a launch."""
_FIELDS: Final = 3
"""Columns of a packet's description."""
_POINTERS: Final = ("values", "packets", "data")
"""Arguments of kernels: a packet may lie anywhere, so that their alignment is of no use."""


def encode(
    values: Tensor,
    packets: Tensor,
    to_bytes: Tensor,
    how: LowBit,
    *,
    most_elements: int,
    key: int = 0,
    counter: int = 0,
) -> Tensor:
    """Queues the encoding of packets on the current stream, each by itself.

    What the descriptions of packets say isn't checked: they lie on the device. A packet that goes
    beyond a tensor reads or writes beyond it.

    ``packets``: by packet: its first element in ``values``, how many it has, and its first byte in
    ``to_bytes``; int64, shape (packets, 3), contiguous. Bytes of packets don't overlap. A first
    byte may lie anywhere. ``key``: 32 bits of what is drawn, rounding at random: the upper half of
    the seed of lc_encode. ``counter``: the counter of the first
    of ``values``. Others count from there, in 32 bits.
    """
    _check(values, packets, to_bytes, how)
    nan_groups = torch.zeros(1, dtype=torch.int32, device=values.device)
    chunk = ENCODED_AT_ONCE[how.group]
    grid = _launch_of(packets, most_elements, chunk)
    if grid:
        with _device_of(values):
            _encode[grid](
                *(values, packets, to_bytes, nan_groups, _signed(counter), _signed(key)),
                **_constants(how, chunk),
                STOCHASTIC=how.stochastic,
            )
    return nan_groups


def decode(
    from_bytes: Tensor,
    packets: Tensor,
    to_values: Tensor,
    how: LowBit,
    *,
    most_elements: int,
) -> None:
    """Queues the decoding of packets on the current stream.

    Whatever stands in the bytes, only the elements of packets are written. What ``packets`` says
    isn't checked, as in :func:`encode`.

    ``from_bytes``: bytes of all packets; uint8, contiguous.
    """
    _check(to_values, packets, from_bytes, how)
    chunk = DECODED_AT_ONCE[how.group]
    grid = _launch_of(packets, most_elements, chunk)
    if grid:
        with _device_of(to_values):
            _decode[grid](from_bytes, packets, to_values, **_constants(how, chunk))


def _check(values: Tensor, packets: Tensor, data: Tensor, how: LowBit) -> None:
    wanted = (("values", values, torch.float32), ("bytes", data, torch.uint8))
    for name, tensor, dtype in (*wanted, ("packets", packets, torch.int64)):
        if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device != values.device:
            raise ValueError(
                f"{name}: {tensor.dtype} on {tensor.device}, contiguous: {tensor.is_contiguous()}; "
                f"wanted contiguous {dtype} on {values.device}"
            )
    if packets.dim() != 2 or packets.shape[1] != _FIELDS:
        raise ValueError(f"packets have the shape {tuple(packets.shape)}, wanted (packets, 3)")
    if how.bits not in PLANES or how.group not in GROUPS:
        raise ValueError(
            f"{how.bits} bits in groups of {how.group}, wanted one of {tuple(PLANES)} in groups of "
            f"one of {GROUPS}"
        )


def _launch_of(packets: Tensor, most_elements: int, chunk: int) -> tuple[int, int] | None:
    """A program for each chunk that a packet may have; None: there is none."""
    most = chunk * MOST_CHUNKS
    if not 0 <= most_elements <= most:
        raise ValueError(
            f"{most_elements} elements in a packet, wanted 0 to {most}: make more packets of them"
        )
    chunks = -(-most_elements // chunk)
    return (len(packets), chunks) if len(packets) and chunks else None


def _constants(how: LowBit, chunk: int) -> dict[str, Any]:
    """Constants for which a kernel is compiled, and its launch."""
    return {
        "BITS": how.bits,
        "GROUP": how.group,
        "SPIKES": how.spikes,
        "CHUNK": chunk,
        "num_warps": WARPS,
        "enable_fp_fusion": False,
    }


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device. The CPU's tensors are its interpreter's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _signed(word: int) -> int:
    """32 bits as an int32: a kernel for each way to pass an argument would be compiled anew."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


# ---- floats ----


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def in_order(bits):
    """Integers in the order of the floats of these bits, NaNs outermost; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def nearest(x):
    """To whole numbers, halves to even; below 2^22."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def power_of_two(power):
    """2^power, from -149 to 127."""
    denormal = 1 << tl.maximum(power + 149, 0)
    return float_of(tl.where(power < -126, denormal, (power + 127) << 23))


@triton.jit
def cut_down(x):
    """The three bytes of a spike: x rounded down, if it isn't -0; nothing becomes infinite."""
    bits = bits_of(x)
    bits += tl.where(bits < 0, 255, 0)
    return tl.where((bits & INFINITE) == INFINITE, LARGEST_CUT, (bits >> 8) & 0xFFFFFF)


@triton.jit
def cut_up(x):
    negative = cut_down(tl.where(x == 0.0, 0.0, -x))
    return tl.where(negative == 0, 0, negative ^ 0x800000)


@triton.jit
def draw(counters, key):
    """One of 2^14 numbers for each counter, evenly between -1/2 and 1/2; both are uint32."""
    w = (counters ^ (counters >> 16)) * 0x7FEB352D
    w ^= key
    w = (w ^ (w >> 15)) * 0x846CA68B
    w = (w ^ (w >> 16)) * 0x9E3779B9
    whole = (w >> 18).to(tl.int32).to(tl.float32)
    return whole * 0.00006103515625 + -0.499969482421875  # 2^-14, and 2^-15 - 1/2


# ---- layout ----


@triton.jit
def plane_bytes(n, WIDTH: tl.constexpr):
    return (n * WIDTH + 7) >> 3


@triton.jit
def planes_bytes(n, BITS: tl.constexpr):
    """Bytes of a wide plane, and of one of the bits that are left, if any."""
    WIDE: tl.constexpr = 8 if BITS == 8 else (4 if BITS >= 4 else 2)
    return plane_bytes(n, WIDE) + plane_bytes(n, BITS - WIDE)


@triton.jit
def put_plane(plane, indices, at, n, WIDTH: tl.constexpr, SHIFT: tl.constexpr, CHUNK: tl.constexpr):
    """Some bits of each index of a chunk. Indices beyond the packet are 0."""
    PER: tl.constexpr = 8 // WIDTH
    parts = (tl.reshape(indices, (CHUNK // PER, PER)) >> SHIFT) & ((1 << WIDTH) - 1)
    packed = tl.sum(parts << (tl.arange(0, PER) * WIDTH)[None, :], axis=1)
    byte = at // PER + tl.arange(0, CHUNK // PER)
    tl.store(plane + byte, packed.to(tl.uint8), mask=byte < plane_bytes(n, WIDTH))


@triton.jit
def put_planes(to, indices, at, n, BITS: tl.constexpr, CHUNK: tl.constexpr):
    WIDE: tl.constexpr = 8 if BITS == 8 else (4 if BITS >= 4 else 2)
    REST: tl.constexpr = BITS - WIDE
    put_plane(to, indices, at, n, WIDE, 0, CHUNK)
    if REST:
        put_plane(to + plane_bytes(n, WIDE), indices, at, n, REST, WIDE, CHUNK)


@triton.jit
def get_plane(plane, place, inside, WIDTH: tl.constexpr):
    """Elements of one byte load it each: neighbours share the transaction, and nothing has to move
    between threads."""
    bit = place * WIDTH
    byte = tl.load(plane + (bit >> 3), mask=inside, other=0).to(tl.int32)
    return (byte >> (bit & 7)) & ((1 << WIDTH) - 1)


@triton.jit
def get_planes(source, place, inside, n, BITS: tl.constexpr):
    WIDE: tl.constexpr = 8 if BITS == 8 else (4 if BITS >= 4 else 2)
    REST: tl.constexpr = BITS - WIDE
    indices = get_plane(source, place, inside, WIDE)
    if REST:
        indices |= get_plane(source + plane_bytes(n, WIDE), place, inside, REST) << WIDE
    return indices


@triton.jit
def put_bytes(to, i, number, live, BYTES: tl.constexpr):
    """The low bytes of numbers i; nothing is aligned."""
    for k in tl.static_range(BYTES):
        tl.store(to + BYTES * i + k, (number >> (8 * k)).to(tl.uint8), mask=live)


@triton.jit
def get_bytes(source, i, live, BYTES: tl.constexpr):
    """Numbers i, of so many bytes, not negative."""
    number = tl.load(source + BYTES * i, mask=live, other=0).to(tl.int32)
    for k in tl.static_range(1, BYTES):
        byte = tl.load(source + BYTES * i + k, mask=live, other=0).to(tl.int32)
        number |= byte << (8 * k)
    return number


# ---- encode ----


@triton.jit
def _ends(ordered, members):
    """The least and the greatest of each group; without members the least is beyond the other."""
    low = tl.min(tl.where(members, ordered, GREATEST_INT), axis=1)
    high = tl.max(tl.where(members, ordered, LEAST_INT), axis=1)
    return low, high


@triton.jit
def _number(ordered, usable):
    """The floats of these integers, with no negative zero; 0 where they aren't usable."""
    x = float_of(in_order(tl.where(usable, ordered, 0)))
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def _place_of(x, value, place, members, apart):
    """Place of the first element of each group that equals its value."""
    is_it = members & (x == value[:, None])
    first = tl.min(tl.where(is_it, place, NO_PLACE), axis=1)
    return tl.where(apart, first, NO_PLACE)


@triton.jit
def _put_spikes(to, groups, g, x, low, high, usable, place, members):
    """Writes the spikes of a chunk's groups. Returns the members that are left: an element that
    stands for a spike is one of them, so it changes no range."""
    lowest, highest = _number(low, usable), _number(high, usable)
    apart = lowest != highest
    low_place = _place_of(x, lowest, place, members, apart)
    high_place = _place_of(x, highest, place, members, apart)
    live = g < groups
    put_bytes(to, g, tl.where(apart, cut_down(lowest), 0), live, 3)
    put_bytes(to + 3 * groups, g, tl.where(apart, cut_up(highest), 0), live, 3)
    put_bytes(to + 6 * groups, g, low_place, live, 1)
    put_bytes(to + 7 * groups, g, high_place, live, 1)
    return members & (place != low_place[:, None]) & (place != high_place[:, None])


@triton.jit
def _step_of(anchor, other, BITS: tl.constexpr):
    """The last index is at the other end, but no farther from zero than the anchor."""
    LEVELS: tl.constexpr = (1 << BITS) - 1
    most = (anchor.to(tl.int32) << BITS) // LEVELS
    levels = tl.full(anchor.shape, LEVELS, tl.float32)
    wanted = nearest(tl.div_rn((anchor - other) * (1 << (BITS - 1)), levels)).to(tl.int32)
    return tl.minimum(wanted, most)


@triton.jit
def _grid_of_ends(far, other, sign, BITS: tl.constexpr):
    """Grids of groups: exponent, both factors to units, the anchor without sign, step, and whether
    the grid goes on beyond the group, as a step is two units at least."""
    LEAST: tl.constexpr = 1 << BITS
    exponent = tl.maximum(bits_of(far * sign) >> 23, 1)
    power = TOP - exponent
    first_power = tl.minimum(power, 127)
    first = power_of_two(first_power)
    second = power_of_two(power - first_power)  # one factor may be beyond float32
    near = nearest(far * sign * first * second)
    anchor = tl.where(near < MOST, near, MOST)
    step = _step_of(anchor, other * sign * first * second, BITS)
    return exponent, first, second, anchor, tl.maximum(step, LEAST), step < LEAST


@triton.jit
def _places(x, first, second, anchor, inverse, BITS: tl.constexpr):
    """Places of elements on the grid, not rounded yet. All but x are of groups."""
    most = ((1 << BITS) - 1) * 1.0
    t = (anchor[:, None] - x * first[:, None] * second[:, None]) * inverse[:, None]
    t = tl.where(t > 0.0, t, 0.0)
    return tl.where(t < most, t, most)


@triton.jit
def _encode_groups(
    x, low, high, special, counters, key, BITS: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """Indices, and by group anchor, step and exponent; low and high are of :func:`_ends`."""
    usable = (low <= high) & ~special
    low, high = _number(low, usable), _number(high, usable)
    is_float = low == high
    upper = high >= -low
    sign = tl.where(upper, 1.0, -1.0)
    far, other = tl.where(upper, high, low), tl.where(upper, low, high)
    exponent, first, second, anchor, step, coarse = _grid_of_ends(far, other, sign, BITS)
    anchor *= sign
    half = tl.full(step.shape, 1 << (BITS - 1), tl.float32)
    inverse = sign * tl.div_rn(half, step.to(tl.float32))
    t = _places(x, first, second, anchor, inverse, BITS)
    if STOCHASTIC:  # ends stay ends: then what a group is decoded to has the same grid
        drawn = tl.where(x == far[:, None], 0.0, t)
        drawn = tl.where(x == other[:, None], ((1 << BITS) - 1) * 1.0, drawn)
        t = tl.where(coarse[:, None], t, drawn + draw(counters, key))
    indices = tl.where(is_float[:, None], 0, bits_of(t + ROUNDER) & 255)
    alone = tl.where(special, NOT_A_NUMBER, bits_of(low))
    return (
        indices,
        tl.where(is_float, alone >> 16, anchor.to(tl.int32)),
        tl.where(is_float, alone, step),
        tl.where(is_float, CONSTANT, exponent),
    )


@triton.jit(do_not_specialize=["counter", "key"], do_not_specialize_on_alignment=_POINTERS)
def _encode(
    values,
    packets,
    data,
    nan_groups,
    counter,
    key,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPIKES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of one packet; a row is a group."""
    packet = packets + 3 * tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK
    n = tl.load(packet + 1).to(tl.int32)
    if at >= n:
        return
    from_element, to = tl.load(packet), data + tl.load(packet + 2)
    rows = tl.arange(0, CHUNK // GROUP)
    place = tl.arange(0, GROUP)[None, :]
    within = at + rows[:, None] * GROUP + place
    members = within < n
    x = tl.load(values + from_element + within, mask=members, other=0.0)
    ordered = in_order(bits_of(x))
    low, high = _ends(ordered, members)
    special = (high >= INFINITE) | (low <= MINUS_INFINITE)
    g, groups = at // GROUP + rows, (n + GROUP - 1) // GROUP
    headers = to + planes_bytes(n, BITS)
    if SPIKES:
        usable = (low <= high) & ~special
        spikes = headers + 5 * groups
        members = _put_spikes(spikes, groups, g, x, low, high, usable, place, members)
        low, high = _ends(ordered, members)
    counters = (from_element + within + counter).to(tl.uint32)
    indices, anchor, step, exponent = _encode_groups(
        x, low, high, special, counters, key.to(tl.uint32), BITS, STOCHASTIC
    )
    put_planes(to, tl.where(members, indices, 0), at, n, BITS, CHUNK)
    put_bytes(headers, g, anchor, g < groups, 2)
    put_bytes(headers + 2 * groups, g, step, g < groups, 2)
    put_bytes(headers + 4 * groups, g, exponent, g < groups, 1)
    found = tl.sum(special.to(tl.int32))
    if found > 0:
        tl.atomic_add(nan_groups, found)


# ---- decode ----


@triton.jit
def _decode_groups(indices, anchor, step, exponent, BITS: tl.constexpr):
    """Values that indices stand for; the others are of groups, and may be anything."""
    unit = power_of_two(exponent - TOP)
    signed = (anchor << 16) >> 16
    part = 2.0 / (1 << BITS)
    factor = step.to(tl.float32) * tl.where(signed < 0, -part, part)
    from_anchor = indices.to(tl.float32) * factor[:, None]
    on_grid = (signed.to(tl.float32)[:, None] - from_anchor) * unit[:, None]
    alone = (anchor << 16) | step  # as an integer: a NaN keeps its bits
    is_float = exponent == CONSTANT
    return float_of(tl.where(is_float[:, None], alone[:, None], bits_of(on_grid)))


@triton.jit
def _with_spikes(source, groups, g, x, place):
    """Decoded groups with their spikes. A grid may end beyond them, but no element does."""
    live = g < groups
    low = float_of(get_bytes(source, g, live, 3) << 8)[:, None]
    high = float_of(get_bytes(source + 3 * groups, g, live, 3) << 8)[:, None]
    low_place = get_bytes(source + 6 * groups, g, live, 1)[:, None]
    high_place = get_bytes(source + 7 * groups, g, live, 1)[:, None]
    held = tl.where(x < low, low, x)
    held = tl.where(held > high, high, held)
    held = tl.where(place == low_place, low, held)
    held = tl.where(place == high_place, high, held)  # one beyond the group is nobody's
    return tl.where(low_place == NO_PLACE, x, held)


@triton.jit(do_not_specialize_on_alignment=_POINTERS)
def _decode(
    data,
    packets,
    values,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPIKES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of one packet; a row is a group."""
    packet = packets + 3 * tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK
    n = tl.load(packet + 1).to(tl.int32)
    if at >= n:
        return
    to, source = values + tl.load(packet), data + tl.load(packet + 2)
    rows = tl.arange(0, CHUNK // GROUP)
    place = tl.arange(0, GROUP)[None, :]
    within = at + rows[:, None] * GROUP + place
    g, groups = at // GROUP + rows, (n + GROUP - 1) // GROUP
    headers = source + planes_bytes(n, BITS)
    indices = get_planes(source, within, within < n, n, BITS)
    x = _decode_groups(
        indices,
        get_bytes(headers, g, g < groups, 2),
        get_bytes(headers + 2 * groups, g, g < groups, 2),
        get_bytes(headers + 4 * groups, g, g < groups, 1),
        BITS,
    )
    if SPIKES:
        x = _with_spikes(headers + 5 * groups, groups, g, x, place)
    tl.store(to + within, x, mask=within < n)
