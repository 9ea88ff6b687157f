"""What dividing by the completed micro-batches is for: no step gets shorter."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import dropcompute_checks as checks


def test_the_divisor_of_completed_micro_batches_costs_no_steps() -> None:
    clean = []
    excess: dict[tuple[float | None, str], list[float]] = {}
    for seed in range(5):
        variants = {v: checks.toy(*v, seed=seed) for v in checks.TOY_VARIANTS}
        without = variants[None, "completed"]
        assert without["losses"] == pytest.approx(variants[None, "fixed"]["losses"])
        assert without["seconds"] == pytest.approx(3321, rel=0.03)
        clean.append(without["loss"])
        for threshold, dropped, seconds in ((18.0, 0.059, 2700), (17.0, 0.097, 2550)):
            for divisor in ("completed", "fixed"):
                row = variants[threshold, divisor]
                assert row["drop_rate"] == pytest.approx(dropped, abs=0.003)
                assert row["seconds"] == pytest.approx(seconds, rel=0.002)
                excess.setdefault((threshold, divisor), []).append(row["loss"] - without["loss"])
        fixed, completed = (
            [excess[t, d][-1] for t in (18.0, 17.0)] for d in ("fixed", "completed")
        )
        assert fixed[1] > fixed[0] > 4 * max(map(abs, completed))
    # Elsewhere, with data of its own: 0.1909, and 0.0017 and 0.0029 more with the fixed divisor.
    assert np.mean(clean) == pytest.approx(0.1909, abs=0.02)
    assert np.mean(excess[18.0, "fixed"]) == pytest.approx(0.0017, abs=0.0004)
    assert np.mean(excess[17.0, "fixed"]) == pytest.approx(0.0029, abs=0.0006)
