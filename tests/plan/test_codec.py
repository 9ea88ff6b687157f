"""Codecs in numpy and in C: the same bytes, and the elements that their types define."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from lossycoll._native import ffi, lib

from lossycoll.plan.codec import ENCODINGS, GROUPS, LOW, ROUNDINGS, Bytes, named, number_of
from tests.oracle.codec import WIRE_TYPES, Array, Codec, codec_of
from tests.support.floats import floats
from tests.support.network import DTYPES

ROUNDED = ("bf16", "fp16")
"""Those that round to the nearest float of two bytes."""
ENCODED = (
    *ROUNDED,
    *(
        named(name, group, spikes, rounding)
        for name in LOW
        for group in GROUPS
        for spikes in (0, 1)
        for rounding in ROUNDINGS
    ),
)
SIMD = (0, 1)
SEED = 0x0123456789ABCDEF


def in_c(made: Codec, x: Array, simd: int) -> Bytes:
    number, dtype = number_of(made.encoding), DTYPES[made.kind.name]
    out = np.full(lib.lc_encoding_bytes(number, dtype, len(x)), 0xA5, np.uint8)
    source, target = ffi.from_buffer(np.ascontiguousarray(x)), ffi.from_buffer(out)
    assert lib.lc_encode(number, dtype, simd, target, source, len(x), SEED) == lib.LC_OK
    return out


def back_in_c(made: Codec, data: Bytes, n: int, simd: int) -> Array:
    number, dtype = number_of(made.encoding), DTYPES[made.kind.name]
    out = np.empty(n, made.kind.wire)
    source, target = ffi.from_buffer(data), ffi.from_buffer(out)
    assert lib.lc_decode(number, dtype, simd, target, source, n) == lib.LC_OK
    return out


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("encoding", ENCODED)
def test_c_and_numpy_encode_alike(encoding: str, simd: int) -> None:
    made, x = codec_of(encoding, "f32"), floats()
    data = made.encode(x, SEED)
    assert len(data) == made.wire_bytes(len(x))
    np.testing.assert_array_equal(in_c(made, x, simd), data)


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("encoding", ENCODED)
def test_c_and_numpy_decode_alike(encoding: str, simd: int) -> None:
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.uint8)
    made, n = codec_of(encoding, "f32"), 1 << 16
    if encoding not in ROUNDED:  # any bytes are as good, a grid that no group has as well
        every = np.random.default_rng(17).integers(0, 256, made.wire_bytes(n), np.uint8)
    x = made.decode(every, n)
    assert x.dtype == np.float32
    np.testing.assert_array_equal(
        back_in_c(made, every, n, simd).view(np.uint32), x.view(np.uint32)
    )


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("encoding", ENCODED)
def test_sums_are_taken_in_float32(encoding: str, simd: int) -> None:
    made = codec_of(encoding, "f32")
    number = number_of(encoding)
    rng = np.random.default_rng(15)
    own, x = rng.standard_normal((2, 1001)).astype(np.float32) * np.float32(100)
    data = made.encode(x)
    for weight, alone in itertools.product((1.0, 1 / 0.7), (True, False)):
        acc = np.empty_like(own)
        code = lib.lc_decode_add(
            number,
            DTYPES["f32"],
            simd,
            ffi.from_buffer(acc),
            ffi.NULL if alone else ffi.from_buffer(own),
            ffi.from_buffer(data),
            weight,
            len(own),
        )
        assert code == lib.LC_OK
        part = made.decode(data, len(x)) * np.float32(weight)
        np.testing.assert_array_equal(acc, part if alone else own + part)


@pytest.mark.parametrize("encoding", ROUNDED)
def test_to_the_nearest(encoding: str) -> None:
    """At most half a step away, with specials as IEEE 754 has them; numpy knows float16."""
    made, x = codec_of(encoding, "f32"), floats()
    with np.errstate(over="ignore", invalid="ignore"):
        got = made.decode(made.encode(x), len(x))
        if encoding == "fp16":
            np.testing.assert_array_equal(got, x.astype(np.float16).astype(np.float32))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
        inside = np.isfinite(got)
        step = np.maximum(np.abs(x[inside]) * np.float32(2.0**-8), np.float32(2.0**-25))
        assert (np.abs(got[inside] - x[inside]) <= step).all()
        gone = np.isinf(got) & np.isfinite(x)
        least = 65520.0 if encoding == "fp16" else float(np.uint32(0x7F7F8000).view(np.float32))
        assert gone.sum() > 0
        np.testing.assert_array_equal(gone, np.isfinite(x) & (np.abs(x) >= least))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


@pytest.mark.parametrize("encoding", ENCODED)
def test_what_was_decoded_stays_as_it_is(encoding: str) -> None:
    """So whoever stores what it has sent can send it on, and a host's ranks get what others get."""
    made, n = codec_of(encoding, "f32"), len(floats())
    once = made.decode(made.encode(floats(), SEED), n)
    np.testing.assert_array_equal(
        made.decode(made.encode(once, SEED + 1), n).view(np.uint32), once.view(np.uint32)
    )


@pytest.mark.parametrize("dtype", WIRE_TYPES)
def test_same_changes_nothing(dtype: str) -> None:
    made = codec_of("same", dtype)
    assert made.same
    rng = np.random.default_rng(16)
    x = rng.integers(0, 256, 33 * made.kind.wire.itemsize, np.uint8).view(made.kind.wire)
    data = made.encode(x)
    assert data.tobytes() == x.tobytes() == made.decode(data, len(x)).tobytes()
    for simd in SIMD:
        assert in_c(made, x, simd).tobytes() == x.tobytes()
        assert back_in_c(made, data, len(x), simd).tobytes() == x.tobytes()


@pytest.mark.parametrize("payload", [0, 1, 7, 8, 64, 1408, 8960, 65535])
def test_c_and_numpy_fill_packets_alike(payload: int) -> None:
    for encoding, dtype in [("same", name) for name in WIRE_TYPES] + [(e, "f32") for e in ENCODED]:
        made, number = codec_of(encoding, dtype), number_of(encoding)
        fit = made.elements(payload)
        group = made.low.group if made.low else 1
        more = fit + (group if fit >= group else 1)
        assert made.wire_bytes(fit) <= payload < made.wire_bytes(more)
        assert fit <= group or fit % group == 0, "packets of several sizes have the same groups"
        assert lib.lc_encoding_elements(number, DTYPES[dtype], payload) == fit
        assert lib.lc_encoding_bytes(number, DTYPES[dtype], fit) == made.wire_bytes(fit)


def test_what_there_is_not() -> None:
    for name in (
        "int9",
        "int8/64",
        "int8/128",
        "bf16/32",
        "bf16+stochastic",
        "int8+stochastic+spikes",
    ):
        with pytest.raises(
            ValueError, match=f"encoding is {re.escape(repr(name))}, wanted one of same, bf16"
        ):
            codec_of(name, "f32")
    assert lib.lc_encoding_elements(ENCODINGS.index("bf16") | 16, DTYPES["f32"], 1408) == 0
    for dtype in set(WIRE_TYPES) - {"f32"}:
        with pytest.raises(ValueError, match=f"encoding is 'bf16' for {dtype}, wanted same"):
            codec_of("bf16", dtype)
        assert lib.lc_encoding_elements(1, DTYPES[dtype], 1408) == 0
        nothing = (ffi.NULL, ffi.NULL, 0)
        assert lib.lc_encode(1, DTYPES[dtype], 1, *nothing, 0) == lib.LC_E_ARGUMENT
