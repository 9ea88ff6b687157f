"""Means by weight over packets of few bits: rounds of peers over loopback, and the numpy twin."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from lossycoll.errors import EngineError, RendezvousError
from lossycoll.options.fields import Options
from lossycoll.plan import owners
from lossycoll.plan.codec import Floats, elements_of, named
from lossycoll.runtime.swarm import means
from lossycoll.runtime.swarm.means import MeanEncoding, MeanRound, rates, shares
from lossycoll.runtime.swarm.member import SwarmMember
from lossycoll.runtime.swarm.protocol import Member
from tests.oracle.reference_executor import execute
from tests.runtime.swarm.test_member import SCHEMA, directory, together
from tests.support.oracle_checks import rounded_elements

WEIGHTS = [1.0, 0.5, 0.25, 0.5]
"""Dyadic, so that sums are exact in any order."""
WIRES = ("same", "bf16", "fp16", "int8", "int5", "int4", "int4/int8", "int2")


def peers(stack: ExitStack, wire: str, count: int = 4, **options: Any) -> list[SwarmMember]:
    place = directory(stack, None)
    made = []
    for number in range(count):
        how = Options(link="udp", **options)
        one = SwarmMember([place], name=str(number), options=how, rate=1 + number % 2)
        stack.callback(one.close)
        one.averages(SCHEMA, wire=wire)
        made.append(one)
    return made


def assert_equal_bits(values: Sequence[Floats]) -> None:
    for one in values[1:]:
        np.testing.assert_array_equal(one.view(np.uint32), values[0].view(np.uint32))


@pytest.mark.parametrize("wire", ["bf16", "int5", "int4", "int4/int8", "int3"])
def test_a_round_is_the_twins_to_the_bit(wire: str, stack: ExitStack) -> None:
    """Of any size, and with links of which every other one is twice as fast."""
    members = peers(stack, wire, wire_group=32)
    rng = np.random.default_rng(4)
    encoding = named(wire, 32)
    each = elements_of(encoding, "f32", members[0]._payload)
    for count in (1, 31, each - 1, each + 1, 4 * each, 9 * each + 5):
        for one in members:
            one.means.owed = np.zeros(0, np.float32)
        values = [rounded_elements("f32", count, rng) for _ in members]
        sent = [x.copy() for x in values]
        reports = together(members, values, WEIGHTS)
        ranks = list(reports[0].members)
        want = [sent[peer] for peer in ranks]
        lengths = owners.owned(count, each, [(1, 2, 1, 2)[peer] for peer in ranks])
        execute(
            [owners.all_reduce(4, r, lengths, (True,) * 4, each) for r in range(4)],
            want,
            want,
            "f32",
            1.0,
            lambda sender, receiver, slot, n, round: np.zeros(n, np.bool_),
            0,
            weights=np.tile([WEIGHTS[peer] for peer in ranks], (4, 1)),
            divisor=0.0,
            encoding=encoding,
        )
        assert {(one.failure, one.kept) for one in reports} == {("", 0.0)}
        for got, exact in zip(values, sent, strict=True):
            np.testing.assert_array_equal(got, exact, f"{wire} {count}")


@pytest.mark.parametrize(
    ("wire", "least"),
    [("bf16", 48), ("fp16", 66), ("int8", 40), ("int6", 28), ("int4", 15), ("int4/int8", 17)],
)
def test_how_far_a_mean_is_off(wire: str, least: float, stack: ExitStack) -> None:
    """In dB, of independent normal values: docs/wire.md has what an all-reduce of many loses."""
    members = peers(stack, wire)
    rng = np.random.default_rng(5)
    weights = [0.3, 7.0, 0.0, 2.2]
    values = [rng.standard_normal(50_001).astype(np.float32) for _ in members]
    exact = np.average(np.array(values, np.float64), axis=0, weights=weights)
    together(members, values, weights)
    assert_equal_bits(values)
    off = float(np.square(values[0] - exact).mean() / np.square(exact).mean())
    assert -10 * np.log10(off) > least


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("loss", [0.0, 0.1, 0.3])
def test_weights_are_exact_whatever_is_lost(wire: str, loss: float, stack: ExitStack) -> None:
    """Values that every encoding holds: each becomes the mean of those of some peers."""
    members = peers(stack, wire, inject=f"loss={loss},seed=5", repair=0)
    weights = [1.0, 3.0, 0.7, 2.0]
    some = [s for n in range(1, 5) for s in combinations(range(4), n)]
    means = {np.average([1.0 + i for i in s], weights=[weights[i] for i in s]) for s in some}
    seen: set[float] = set()
    count = 60 * members[0].means.per_packet + 7
    # Groups of one value travel as it is; bf16 and fp16 round the mean, and nothing else.
    near = {"bf16": 2.0**-8, "fp16": 2.0**-11}.get(wire, 1e-6)
    for _ in range(3):
        values = [np.full(count, 1.0 + peer, np.float32) for peer in range(4)]
        reports = together(members, values, weights)
        found = np.unique(values)
        for value in found:
            assert min(abs(value - mean) / mean for mean in means) < near, value
        seen |= {float(value) for value in found}
        if not loss:
            assert_equal_bits(values)
            assert {one.contributions for one in reports} == {4.0}
        for one in members:
            one.means.owed = np.zeros(0, np.float32)
    assert (len(seen) > 6) == bool(loss), "the fault did not happen"


@pytest.mark.parametrize("wire", ["same", "bf16", "int8", "int4/int8"])
def test_values_that_cannot_be_cost_their_packets(wire: str, stack: ExitStack) -> None:
    """In this round, and nothing in the next."""
    members = peers(stack, wire, 2)
    each = members[0].means.per_packet
    values = [np.full(40 * each + 3, 1.0, np.float32), np.full(40 * each + 3, 3.0, np.float32)]
    values[1][5 * each + 7] = np.nan
    values[1][30 * each] = np.inf
    reports = together(members, values)
    for one, own in zip(values, (1.0, 3.0), strict=True):
        for packet, part in enumerate(np.split(one, range(each, len(one), each))):
            wanted = own if packet in (5, 30) else 2.0
            assert (part[np.isfinite(part)] == wanted).all()
    assert [one.kept for one in reports] == pytest.approx([2 * each / len(values[0])] * 2)
    values = [np.full(40 * each + 3, 1.0, np.float32), np.full(40 * each + 3, 3.0, np.float32)]
    assert {one.kept for one in together(members, values)} == {0.0}
    assert (values[0] == 2.0).all()


@pytest.mark.parametrize(
    ("wire", "count"), [("int8", 3), ("int8", 8), ("int4/int8", 4), ("bf16", 3)]
)
def test_small_steps_add_up(wire: str, count: int, stack: ExitStack) -> None:
    """Peers move by a tenth of a grid's step in each round. What is rounded off isn't lost, and
    doesn't add up. Without memory all of it is taken back, round for round."""
    rng = np.random.default_rng(6)
    begin = 2 + rng.random(128 * 40, np.float32)
    begin[::128], begin[1::128] = 4.0, -4.0  # the grid's ends
    if wire == "int4/int8":  # larger steps, and all of them are to stay between the ends
        begin -= 4 * (np.arange(128 * 40) % 128 > 1)
    moves = (np.arange(128 * 40) % 128 > 1).astype(np.float32)
    step = {"int8": 8 / 255, "int4/int8": 8 / 15, "bf16": 2.0**-6}[wire]
    off = {}
    for remembers in (True, False):
        members = peers(stack, wire, count)
        values = [begin.copy() for _ in members]
        errors = []
        for number in range(1, 61):
            for i, one in enumerate(members):
                if not remembers:
                    one.means.owed = np.zeros(0, np.float32)
                values[i] += np.float32(step / 10) * moves
            together(members, values)
            assert_equal_bits(values)
            errors.append((values[0] - begin - number * step / 10 * moves) / step)
        off[remembers] = float(np.abs(errors[-1]).mean())
        if remembers:
            worst = [float(np.abs(error).max()) for error in errors]
            assert max(worst) < 2 * count + 2, worst
            assert max(worst[40:]) < 1.5 * max(worst[:20]), "it adds up"
            # Over some rounds a value is where it belongs.
            assert float(np.abs(np.mean(errors[20:], axis=0)).mean()) < 0.6
        for one in members:
            one.close()
    assert off[True] < 2
    assert off[False] > 5, "the fault did not happen"


@pytest.mark.parametrize("wire", ["int2", "int3", "int4"])
def test_what_is_owed_makes_no_grid_coarser(wire: str, stack: ExitStack) -> None:
    """Without an end: with so few bits each round's error would feed the next."""
    members = peers(stack, wire, inject="loss=0.1,seed=4", repair=0)
    begin = np.random.default_rng(1).standard_normal(20_000).astype(np.float32)
    values, missed = [begin.copy() for _ in members], 0
    for _ in range(30):
        reports = together(members, values, WEIGHTS)
        missed += sum(one.contributions < 4 for one in reports)
    assert missed > 10, "the fault did not happen"
    for one, value in zip(members, values, strict=True):
        # An end of a grid is rounded, to a 2^14th.
        assert float(np.abs(value).max()) < 1.01 * float(np.abs(begin).max())
        assert float(np.abs(one.means.owed).max()) < 2 * float(np.ptp(begin))


def test_those_that_bring_nothing_get_the_same(stack: ExitStack) -> None:
    """A newcomer's values may be anything; and one that counts may be alone with them."""
    members = peers(stack, "int8", 3)
    values = [np.full(3000, np.nan, np.float32), np.linspace(-3, 5, 3000, dtype=np.float32)]
    values.append(np.full(3000, np.inf, np.float32))
    exact = values[1].copy()
    together(members, values, [0.0, 2.0, 0.0])
    assert_equal_bits(values)
    np.testing.assert_allclose(values[0], exact, rtol=0, atol=8 / 255)


def test_other_wires_are_refused(stack: ExitStack) -> None:
    place = directory(stack, None)
    first, second = (SwarmMember([place], name=name) for name in "ab")
    stack.callback(first.close)
    stack.callback(second.close)
    first.averages(SCHEMA, wire="int8")
    for wire in (None, "int4", "int8/int4", "bf16"):
        own = f"{named(wire, 128)} everywhere" if wire else "same"
        said = f"your packets carry '{own}', and those of 'a' 'int8 everywhere'"
        with pytest.raises(RendezvousError, match=said):
            second.averages(SCHEMA, wire=wire)
    second.averages(SCHEMA, wire="int8")
    given = SwarmMember([place], name="c", options=Options(link="udp", wire="int4", wire_group=32))
    stack.callback(given.close)
    with pytest.raises(
        RendezvousError, match="your packets carry 'int4/32 everywhere', and those of 'a'"
    ):
        given.averages(SCHEMA, wire="int8")


def member(weight: float, rate: int = 0) -> Member:
    return Member(0, "127.0.0.1", 4711, "ab" * 16, weight, rate)


def test_what_members_count_and_own() -> None:
    assert shares([member(1.0), member(4.0), member(0.0)]) == (0.25, 1.0, 0.0)
    assert shares([member(1e6), member(1e-4)]) == (1.0, 0.0), "less than a float can tell"
    assert shares([member(5e-324)]) == (1.0,)
    with pytest.raises(EngineError, match="a group of which nobody has a weight"):
        shares([member(0.0), member(0.0)])
    some = [member(1.0, 30), member(1.0, 7), member(0.0, 9)]
    assert rates(some, (1.0, 1.0, 0.0)) == (30, 7, 0)
    assert rates([*some, member(1.0)], (1.0, 1.0, 0.0, 1.0)) == (1, 1, 0, 1), "one has said none"
    assert rates([*some, member(0.0)], (1.0, 1.0, 0.0, 0.0)) == (30, 7, 0, 0)


@pytest.mark.parametrize("wire", ["int2", "int4"])
def test_what_means_lose_is_made_up_for(wire: str, stack: ExitStack) -> None:
    """Also if a mean's owner counts for a small part of it, and whoever owns it in each round."""
    members = peers(stack, wire, 4)
    rng = np.random.default_rng(6)
    values = [rng.standard_normal(8_000).astype(np.float32) for _ in members]
    exact = np.average(values, axis=0, weights=WEIGHTS)
    total, off = np.zeros(8_000), []
    for _ in range(30):
        means = [one.copy() for one in values]
        together(members, means, WEIGHTS)
        total += means[0]
        off.append(float(np.abs(means[0] - exact).mean()))
    # Of int2 and a quarter of the grid's largest index a third would remain.
    assert float(np.abs(total / 30 - exact).mean()) < off[0] / 8


@pytest.mark.parametrize("encoding", ["same", "int8+stochastic"])
def test_what_remembers_nothing(encoding: str) -> None:
    assert not MeanEncoding(encoding, 1400).remembers


@pytest.mark.parametrize("wire", ["int4", "bf16"])
def test_values_are_rounded_alike_in_blocks_of_any_size(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(8).standard_normal(100_003).astype(np.float32)
    found = []
    for block in (1, 5_000, 1 << 20):
        monkeypatch.setattr(means, "BLOCK", block)
        encoding = MeanEncoding(named(wire, 32), 1400)
        for scale in (1.0, 0.5):  # the second time something is owed
            one = MeanRound(encoding, [member(1.0), member(0.5)], 1, np.float32(scale) * values)
            one._remember()
        found.append([one.buffer, encoding.owed])
    for others in found[1:]:
        assert_equal_bits([others[0], found[0][0]])
        assert_equal_bits([others[1], found[0][1]])
    assert np.abs(found[0][1]).max() > 0
