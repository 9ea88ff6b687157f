"""Injected faults: the exact function, its statistics, and how it is asked for."""

from __future__ import annotations

import re
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossycoll.plan.faults import Inject, LinkLoss, parse
from lossycoll.plan.rng import mix, mix_array
from tests.oracle.masks import draw, duplicates, losses, lost, reorders, stream_key

U64 = 1 << 64


def test_mix_is_splitmix64() -> None:
    """The first outputs of the published generator started at 0."""
    golden = 0x9E3779B97F4A7C15
    outputs = [mix(k * golden % U64) for k in range(3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(st.lists(st.integers(0, U64 - 1)))
def test_mix_of_arrays_is_mix(words: list[int]) -> None:
    assert mix_array(np.array(words, dtype=np.uint64)).tolist() == [mix(word) for word in words]


def slowly(inject: Inject, key: int, n_packets: int) -> list[bool]:
    """The definition, one packet after the other, in plain Python."""
    out: list[bool] = []
    for k in range(n_packets):
        u = (mix(key ^ k) >> 11) * 2.0**-53
        if inject.loss >= 1:
            out.append(True)
        elif inject.burst <= 1 or k == 0:
            out.append(u < inject.loss)
        else:
            r = 1 / inject.burst
            q = inject.loss * r / (1 - inject.loss)
            out.append(u >= r if out[-1] else u < q)
    return out


@given(
    key=st.integers(0, U64 - 1),
    loss=st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.6, 1.0]),
    burst=st.sampled_from([1.0, 1.5, 2.0, 8.0, 100.0]),
    n_packets=st.integers(0, 200),
)
def test_losses_are_the_definition(key: int, loss: float, burst: float, n_packets: int) -> None:
    inject = Inject(loss=loss, burst=burst)
    assert losses(inject, key, n_packets).tolist() == slowly(inject, key, n_packets)


def test_lanes_are_the_definition() -> None:
    key = stream_key(1, 2, 3, 4, 5, 6, 7)
    inject = Inject(dup=0.4, reorder=0.4)
    for lane, found in ((1, duplicates(inject, key, 50)), (2, reorders(inject, key, 50))):
        words = [mix(key ^ (lane << 32 | k)) >> 11 for k in range(50)]
        assert found.tolist() == [word * 2.0**-53 < 0.4 for word in words]
        assert 0 < found.sum() < 50


def test_key_uses_everything_in_order() -> None:
    key = mix(9)
    for value in (1, 2, 3, 4, 5, 6):
        key = mix(key ^ value)
    assert stream_key(9, 1, 2, 3, 4, 5, 6) == key
    changed = {stream_key(*[1000 * i ^ (i == j) for i in range(7)]) for j in range(8)}
    assert len(changed) == 8


def test_lost_names_a_stream() -> None:
    inject = Inject(loss=0.5, seed=8)
    key = stream_key(8, 1, 2, 3, 4, 5, 6)
    by_name = lost(inject, 1, 2, sender=4, receiver=5, slot=3, n_packets=64, round=6)
    assert by_name.tolist() == losses(inject, key, 64).tolist()


@pytest.mark.parametrize(
    ("loss", "burst"), [(0.01, 1), (0.3, 1), (0.5, 1), (0.01, 4), (0.1, 8), (0.5, 16), (0.5, 1.5)]
)
def test_rate_and_burst_length(loss: float, burst: float) -> None:
    """Streams are independent, so standard errors come from their spread."""
    inject = Inject(loss=loss, burst=burst, seed=42)
    n = 1000
    streams = np.array([lost(inject, 0, op, 0, 1, 2, n) for op in range(300)])
    # At every packet of the stream, its start as well: the chain begins in its steady state.
    for part in (streams, streams[:, :20], streams[:, -20:]):
        rates = part.mean(axis=1)
        assert abs(rates.mean() - loss) < 4 * rates.std(ddof=1) / sqrt(len(rates))
    ends = streams[:, :-1] & ~streams[:, 1:]
    lost_before_last = streams[:, :-1].sum()
    # Each lost packet ends its burst with chance 1 / burst, on its own; single losses: 1 - loss.
    chance = 1 / burst if burst > 1 else 1 - loss
    error = sqrt(chance * (1 - chance) / lost_before_last)
    assert abs(ends.sum() / lost_before_last - chance) < 4 * error


def test_draws_are_uniform() -> None:
    u = np.concatenate([draw(stream_key(3, 0, op, 0, 1, 2, 0), 0, 1000) for op in range(100)])
    assert abs(u.mean() - 0.5) < 4 * sqrt(1 / 12 / len(u))
    assert abs((u**2).mean() - 1 / 3) < 4 * sqrt(4 / 45 / len(u))
    assert u.min() >= 0
    assert u.max() < 1


def test_parse_reads_every_part() -> None:
    asked = Inject(loss=0.1, burst=8.0, dup=0.02, reorder=0.03, seed=7)
    assert parse("loss=0.1,burst=8,seed=7,dup=0.02,reorder=0.03") == asked
    assert parse(" loss = 0.1 , seed=18446744073709551615") == Inject(loss=0.1, seed=U64 - 1)
    assert parse("") == Inject()


def test_parse_takes_bursts_that_just_fit() -> None:
    assert parse("loss=0.9,burst=9").burst == 9
    assert parse("loss=1,burst=2").loss == 1
    assert parse("burst=9,link=0-1:0.9").loss_of(0, 1) == 0.9


def test_parse_reads_links() -> None:
    found = parse("loss=0.1,link=0-1:0.3, link = 12 - 1 : 0 ,seed=7")
    assert found == Inject(loss=0.1, seed=7, links=(LinkLoss(0, 1, 0.3), LinkLoss(12, 1, 0.0)))
    assert [found.loss_of(*link) for link in ((0, 1), (1, 0), (12, 1), (2, 1))] == [
        0.3,
        0.1,
        0,
        0.1,
    ]


def test_a_link_loses_at_its_own_rate_and_the_others_as_before() -> None:
    even = parse("loss=0.1,burst=3,seed=5")
    uneven = parse("loss=0.1,burst=3,seed=5,link=2-1:0.4,link=0-1:1,link=3-1:0")
    for sender, loss in ((0, 1.0), (2, 0.4), (3, 0.0), (4, 0.1)):
        alone = parse(f"loss={loss},burst=3,seed=5")
        streams = [lost(uneven, 0, op, sender, 1, 2, 500) for op in range(60)]
        wanted = [lost(alone, 0, op, sender, 1, 2, 500) for op in range(60)]
        np.testing.assert_array_equal(streams, wanted)
        rates = np.mean(streams, axis=1)
        assert abs(rates.mean() - loss) <= 4 * rates.std(ddof=1) / sqrt(len(rates))
    # A link has a direction.
    back = lost(uneven, 0, 9, 1, 2, 2, 500)
    assert back.tolist() == lost(even, 0, 9, 1, 2, 2, 500).tolist()


def test_links_are_of_ranks_that_the_group_has() -> None:
    asked = parse("link=0-1:0.3,link=3-1:0.3")
    asked.check_world(4)
    with pytest.raises(ValueError, match=r"link=3-1:0\.3 names rank 3, wanted .* 0 to 2"):
        asked.check_world(3)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("los=0.1", "'los=0.1'"),
        ("loss=0.1,burst", "'burst'"),
        ("loss=0.1,,seed=1", "''"),
        ("loss=x", "loss is 'x', wanted a number"),
        ("loss=0.1,loss=0.2", "loss is given twice"),
        ("loss=1.5", "loss is 1.5, wanted 0 to 1"),
        ("loss=nan", "loss is nan, wanted 0 to 1"),
        ("dup=-0.1", "dup is -0.1, wanted 0 to 1"),
        ("reorder=2", "reorder is 2.0, wanted 0 to 1"),
        ("burst=0.5", "burst is 0.5, wanted a number of 1 or more"),
        ("burst=inf", "burst is inf, wanted a number of 1 or more"),
        ("loss=0.9,burst=2", "burst is 2.0, wanted at least 9 for loss 0.9"),
        ("link=0-1", "link is '0-1', wanted FROM-TO:LOSS"),
        ("link=0:0.1", "link is '0:0.1', wanted FROM-TO:LOSS"),
        ("link=-1-0:0.1", "link is '-1-0:0.1', wanted FROM-TO:LOSS"),
        ("link=0-1:x", "link is '0-1:x', wanted FROM-TO:LOSS"),
        ("link=0-1:1.5", "loss in link=0-1:1.5 is 1.5, wanted 0 to 1"),
        ("link=0-1:nan", "loss in link=0-1:nan is nan, wanted 0 to 1"),
        ("link=1-1:0.1", "link=1-1:0.1: wanted two ranks that differ"),
        ("link=0-1:0.1,link=0-1:0.2", "link=0-1 is given twice"),
        ("burst=2,link=0-1:0.9", "burst is 2.0, wanted at least 9 for loss 0.9"),
        ("seed=1.5", "seed is '1.5', wanted an integer"),
        ("seed=-1", "seed is -1, wanted an integer"),
        ("seed=18446744073709551616", "seed is 18446744073709551616, wanted"),
    ],
)
def test_parse_names_what_is_wrong(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=re.escape(part)):
        parse(text)


def test_shares_may_be_percent() -> None:
    asked = parse("loss=1%,dup=50%,reorder=0.5%,link=0-1:30%,burst=8,seed=7")
    assert asked == parse("loss=0.01,dup=0.5,reorder=0.005,link=0-1:0.3,burst=8,seed=7")
    for text in ("loss=101%", "loss=%", "loss=1%1", "burst=800%", "seed=7%"):
        with pytest.raises(ValueError, match="wanted"):
            parse(text)
