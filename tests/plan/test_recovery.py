"""What a code leaves, against its formula and against drawn losses; and what is chosen for whom."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lossycoll.plan.faults import Inject
from lossycoll.plan.sets import Code
from tests.oracle.masks import lost
from tests.oracle.parity import shape_of
from tests.oracle.recovery import Ask, Means, choose, left


@pytest.mark.parametrize("loss", [0.01, 0.1, 0.2, 0.4])
@pytest.mark.parametrize(("k", "m"), [(1, 1), (12, 4), (64, 25), (224, 32)])
def test_single_losses_have_a_formula(loss: float, k: int, m: int) -> None:
    """A lost packet stays missing if m or more of the others of its set are lost."""
    others = k + m - 1
    fewer = sum(math.comb(others, i) * loss**i * (1 - loss) ** (others - i) for i in range(m))
    want = loss * (1 - fewer)
    assert left(loss, 1.0, k, m) == pytest.approx(want, rel=1e-6, abs=1e-12)
    assert left(loss, 1.0, k, m, sets=7) == pytest.approx(want, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("n", "code", "loss", "burst"),
    [
        (60, Code(64, 12), 0.1, 1.0),
        (192, Code(96, 55), 0.2, 8.0),
        (24, Code(24, 12), 0.2, 8.0),
        (1000, Code(64, 24), 0.2, 4.0),
    ],
)
def test_drawn_losses_leave_as_much(n: int, code: Code, loss: float, burst: float) -> None:
    """Of the losses that injection draws, by stream; the distance is in standard errors."""
    shape = shape_of(code, n)
    none = np.zeros(n, bool)
    parity, shares = len(shape.of_parity), []
    for op in range(200_000 // n):
        gone = lost(Inject(loss=loss, burst=burst, seed=5), 0, op, 0, 1, 0, n + parity)
        back = shape.recover(gone[:n], none, ~gone[n:])
        shares.append((gone[:n] & ~back).mean())
    columns = int(np.bincount(shape.of_data)[0])
    sets = -(-min(n, 1024) // code.size)
    want = left(loss, burst, columns, code.rows, sets)
    error = np.std(shares) / math.sqrt(len(shares))
    assert abs(np.mean(shares) - want) < 4 * error
    assert np.mean(shares) < 0.7 * loss  # parity did something


def test_nothing_is_done_where_no_more_is_lost_than_wanted() -> None:
    assert choose(Ask(85, loss=0.01)) == Means(expected=0.01)
    assert choose(Ask(85, loss=0.0109)).code == Code()
    assert choose(Ask(85, loss=0.0, max_missing=0.0)) == Means()
    assert choose(Ask(0, loss=0.5)) == Means()


def test_parity_on_long_paths_resending_on_short_ones() -> None:
    stream = Ask(2979, 1448, loss=0.05)
    far = choose(stream)
    assert far.code.rows
    assert not far.rounds
    assert far.expected <= 0.01
    assert far.seconds < 0.15 * (2979 * 1448 / 125e6 + 0.01)
    near = choose(Ask(74500, loss=0.05, rtt_s=0.0002, rate=1.25e9, row_rate=8e9))
    assert (near.code, near.rounds) == (Code(), 1)


def test_a_dial_that_cannot_be_met_gets_the_best_there_is() -> None:
    means = choose(Ask(2979, loss=0.9))  # where twice the bytes would bring back a tenth
    assert (means.code, means.rounds) == (Code(), 3)
    assert means.expected == pytest.approx(0.9**4)
    assert choose(Ask(2979, loss=0.9, rounds=0)) == Means(expected=0.9)
    half = choose(Ask(2979, loss=0.5, rounds=0))
    assert 2700 < len(shape_of(half.code, 2979).of_parity) <= 2979
    assert half.expected < 0.3


def test_given_means_are_kept() -> None:
    given = choose(Ask(500, loss=0.2, code=Code(64, 6), rounds=2))
    assert (given.code, given.rounds) == (Code(64, 6), 2)
    assert choose(Ask(500, loss=0.2, rounds=0)).rounds == 0
    assert choose(Ask(500, loss=0.2, code=Code())).rounds == 2
    assert choose(Ask(20, loss=0.2, code=Code(64, 6), rounds=0)).code == Code(24, 2)


def test_more_loss_and_a_stricter_dial_never_need_less() -> None:
    """Of parity alone, a stream of a hundred packets."""

    def share(loss: float, dial: float) -> float:
        code = choose(Ask(100, loss=loss, max_missing=dial, rounds=0)).code
        return len(shape_of(code, 100).of_parity) / 100

    by_loss = [share(loss, 0.01) for loss in (0.005, 0.02, 0.05, 0.1, 0.15, 0.2)]
    assert by_loss == sorted(by_loss)
    by_dial = [share(0.1, dial) for dial in (0.1, 0.03, 0.01, 0.003, 0.001)]
    assert by_dial == sorted(by_dial)
    assert by_loss[0] == by_dial[0] == 0 < by_dial[1]


def test_parity_keeps_to_its_cap() -> None:
    for loss, most in ((0.1, 0.5), (0.2, 0.55), (0.5, 1.0)):
        for n in (10, 24, 100, 3000):
            code = choose(Ask(n, loss=loss, burst=16, rounds=0, max_missing=0.001)).code
            assert len(shape_of(code, n).of_parity) <= most * n * 1.001
            assert n < 100 or code.rows
    assert len(shape_of(choose(Ask(100, loss=0.3, most=16)).code, 100).of_parity) <= 25


def test_a_choice_stays_while_estimates_waver() -> None:
    """The measured loss of a path at the dial, 8,192 packets a time."""
    rng = np.random.default_rng(3)
    means, changes = None, 0
    for _ in range(100):
        loss = rng.binomial(8192, 0.01) / 8192
        now = choose(Ask(85, loss=loss, last=means))
        changes += means is not None and (now.code, now.rounds) != (means.code, means.rounds)
        means = now
    assert changes <= 2
    left_alone = choose(Ask(85, loss=0.012, last=Means()))
    assert left_alone.code == Code() != choose(Ask(85, loss=0.012)).code
