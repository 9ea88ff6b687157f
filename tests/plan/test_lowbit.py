"""What few bits make of floats: how far off, which groups exactly, and what an all-reduce adds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from lossycoll.plan import hierarchical, ring
from lossycoll.plan.codec import GROUPS, LOW, PLANES, LowBit, named
from lossycoll.plan.rng import mix
from tests.oracle.codec import codec_of
from tests.oracle.lowbit import decode, draws, encode, joined, split
from tests.oracle.reference_executor import execute
from tests.support.plan_checks import nothing
from tests.support.sampling import pairs

ELEMENTS = 262_144
Floats = NDArray[np.float32]


def normal(seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal(ELEMENTS).astype(np.float32)


def laplace() -> Floats:
    return np.random.default_rng(2).laplace(size=ELEMENTS).astype(np.float32)


def outliers() -> Floats:
    """One channel of a hundred is twenty times as large."""
    x = normal()
    x[::100] *= 20
    return x


def decibels(x: Floats, got: Floats) -> float:
    """The power of x over that of the error."""
    wide = x.astype(np.float64)
    return float(10 * np.log10((wide**2).sum() / ((wide - got) ** 2).sum()))


def there_and_back(x: Floats, how: LowBit) -> Floats:
    return decode(how, encode(how, x), len(x))


EXPECTED = {
    (normal, 128, 0): (44.6, 32.5, 26.3, 20.0, 13.4, 6.0),
    (normal, 32, 0): (46.7, 34.6, 28.4, 22.1, 15.5, 8.1),
    (normal, 32, 1): (49.0, 36.9, 30.7, 24.4, 17.8, 10.4),
    (laplace, 128, 0): (42.3, 30.2, 24.0, 17.7, 11.1, 3.6),
    (laplace, 32, 0): (45.3, 33.2, 27.0, 20.7, 14.1, 6.8),
    (laplace, 32, 1): (48.8, 36.7, 30.5, 24.2, 17.6, 10.2),
    (outliers, 128, 0): (37.8, 25.7, 19.5, 13.2, 5.8, -0.3),
    (outliers, 32, 0): (44.0, 31.9, 25.7, 19.2, 12.1, 7.0),
    (outliers, 32, 1): (55.9, 43.7, 37.6, 31.3, 24.6, 17.2),
}
"""dB by draw, group and spikes, for 8, 6, 5, 4, 3, 2 bits: of grids whose ends are exact."""


@pytest.mark.parametrize(("draw", "group", "spikes"), EXPECTED)
def test_what_a_grid_adds(draw: Callable[[], Floats], group: int, spikes: int) -> None:
    x = draw()
    apart = 0.35 if draw is outliers else 0.3  # it matters in which groups they are
    found = [decibels(x, there_and_back(x, LowBit(b, group, bool(spikes)))) for b in PLANES]
    np.testing.assert_allclose(found, EXPECTED[draw, group, spikes], atol=apart)


@pytest.mark.parametrize("bits", PLANES)
def test_spikes_save_groups_with_outliers(bits: int) -> None:
    x = outliers()
    plain, kept = (decibels(x, there_and_back(x, LowBit(bits, 32, on))) for on in (False, True))
    assert kept > plain + 8
    x = normal()
    plain, kept = (decibels(x, there_and_back(x, LowBit(bits, 32, on))) for on in (False, True))
    assert kept > plain + 2


@pytest.mark.parametrize("bits", PLANES)
def test_indices_are_packed_and_unpacked(bits: int) -> None:
    rng = np.random.default_rng(4)
    for n in (*range(1, 70), 1001):
        indices = rng.integers(0, 1 << bits, n, np.uint8)
        planes = split(indices, bits)
        assert [len(plane) for plane in planes] == [-(-n * w // 8) for w in PLANES[bits]]
        data = np.concatenate([*planes, np.zeros(3, np.uint8)])
        back, end = joined(data, bits, n)
        np.testing.assert_array_equal(back, indices)
        assert end == len(data) - 3


SIZES = (1e-44, 1e-40, 1e-30, 1.0, 65504.0, 1e30, 3.4e38)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", PLANES)
def test_no_size_is_too_large_or_too_small(bits: int, size: float) -> None:
    rng = np.random.default_rng(5)
    for group in GROUPS:
        for n in (1, 2, 31, 129, 1000):
            x = (rng.uniform(-1, 1, n) * size).astype(np.float32)
            got = there_and_back(x, LowBit(bits, group)).astype(np.float64)
            width = np.ptp(x.astype(np.float64))
            least = max(float(np.abs(x).max()) * 2.0**-14, 2.0**-140)
            half = max(width / ((1 << bits) - 1) / 2, least)
            assert (np.abs(got - x) <= half * 1.02).all()


@pytest.mark.parametrize(("bits", "size"), list(pairs(PLANES, SIZES)))
def test_rounded_at_random_the_mean_is_the_element(bits: int, size: float) -> None:
    """But for a unit, by which an end may lie off its grid, and draws too rare to be counted on."""
    how, times = LowBit(bits, 32, stochastic=True), 400
    x = (np.random.default_rng(7).uniform(-1, 1, 96) * size).astype(np.float32)
    got = np.stack([decode(how, encode(how, x, mix(seed)), len(x)) for seed in range(times)])
    off = got.astype(np.float64) - x
    error = np.sqrt((off**2).sum(axis=0)) / times
    rare = 10 * max(2 * size / how.levels, 2.0**-139) / times
    unit = max(size * 2.0**-14, 2.0**-139)
    assert (np.abs(off.mean(axis=0)) <= 5 * error + rare + unit).all()
    if size > 1e-35:  # there grids are not too coarse
        assert (np.ptp(got, axis=0) > 0).sum() > 60, "nothing was drawn"


def test_what_is_drawn_is_even() -> None:
    rows = np.concatenate([draws(mix(seed), (8, 128)).reshape(-1) for seed in range(256)])
    assert -0.5 < rows.min() < -0.4999
    assert 0.4999 < rows.max() < 0.5
    counts = np.histogram(rows, bins=64, range=(-0.5, 0.5))[0]
    each = len(rows) / 64
    assert (((counts - each) ** 2).sum() / each) < 110, "chi-square of 63 degrees of freedom"
    neighbours = np.corrcoef(rows[:-1], rows[1:])[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(len(rows))


@pytest.mark.parametrize("spikes", [False, True])
@pytest.mark.parametrize("bits", PLANES)
def test_groups_of_one_number_are_exact(bits: int, spikes: bool) -> None:
    for number in (0.0, -0.1, 1e-45, 3.4028235e38, 1 / 3):
        x = np.full(77, number, np.float32)
        np.testing.assert_array_equal(there_and_back(x, LowBit(bits, 32, spikes)), x)


@pytest.mark.parametrize("spikes", [False, True])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_group_with_a_nan_or_an_infinity_is_nan(number: float, spikes: bool) -> None:
    x = normal()[:96]
    x[40] = number
    got = there_and_back(x, LowBit(4, 32, spikes))
    assert np.isnan(got[32:64]).all()
    assert np.isfinite(got[:32]).all()
    assert np.isfinite(got[64:]).all()


def mean_of(world: int, encoding: str, build: object) -> tuple[float, int]:
    """dB of an all-reduce of independent inputs, and how many ranks have another result."""
    count = 1 << 15
    inputs = [normal(10 + r)[:count] for r in range(world)]
    exact = np.mean([x.astype(np.float64) for x in inputs], axis=0)
    plans = [build(world, r, count, 1024) for r in range(world)]  # type: ignore[operator]
    outputs = [x.copy() for x in inputs]
    execute(plans, inputs, outputs, "f32", 1.0, nothing, 0, encoding=encoding)
    error = outputs[0] - exact
    differ = sum(out.tobytes() != outputs[0].tobytes() for out in outputs)
    return float(10 * np.log10((exact**2).sum() / (error**2).sum())), differ


@pytest.mark.parametrize(
    ("encoding", "wanted"), [("int8", 41.6), ("int5", 23.3), ("int4", 17.0), ("int3", 10.3)]
)
def test_an_all_reduce_encodes_twice_whatever_the_world(encoding: str, wanted: float) -> None:
    """``wanted``: if all contributions were encoded. An owner's own is not, and means are."""
    for world in (2, 4, 8):
        found, differ = mean_of(world, encoding, hierarchical.all_reduce)
        spared = 10 * np.log10(2 / ((world - 1) / world + 1))
        assert found == pytest.approx(wanted + spared, abs=0.3)
        assert differ == 0


def test_a_ring_loses_more_with_each_rank() -> None:
    found = [mean_of(world, "int4", ring.all_reduce)[0] for world in (2, 4, 8)]
    assert found[0] > found[1] + 1 > found[2] + 2


def test_bits_on_the_wire() -> None:
    for name, bits in LOW.items():
        assert codec_of(name, "f32").wire_bytes(1024) * 8 / 1024 == bits + 40 / 128
        small = codec_of(named(name, 32, 1), "f32")
        assert small.wire_bytes(1024) * 8 / 1024 == bits + (40 + 64) / 32
