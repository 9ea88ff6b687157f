"""The study of phases loses packets in the third that a run names, and compares runs of a seed."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest

from benchmarks.common.results import Result
from benchmarks.studies.phases import study
from benchmarks.studies.phases.study import ALL, COSINE, NONE, RELIABLE, THIRDS, Run

RUN = Run("digits", COSINE, "sharded", "last", 1)


def test_each_third_is_a_third() -> None:
    for at, third in enumerate(THIRDS):
        lossy = [replace(RUN, lost=third).lossy_at(step, 9) for step in range(9)]
        assert lossy == [step // 3 == at for step in range(9)]
    assert all(replace(RUN, lost=ALL).lossy_at(step, 9) for step in range(9))
    assert not any(replace(RUN, lost=NONE).lossy_at(step, 9) for step in range(9))
    planned = list(study.runs())
    assert len(set(planned)) == len(planned)
    assert {run.base for run in planned} <= set(planned)


def test_packets_are_lost_in_that_third(monkeypatch: pytest.MonkeyPatch) -> None:
    task = study.TASKS["digits"]
    monkeypatch.setattr(study, "TASKS", {"digits": lambda: task(3)})
    found = {
        lost: study.train(replace(RUN, lost=lost), Namespace()) for lost in (NONE, "last", ALL)
    }
    assert found[NONE]["missing"] == found[NONE]["drift"] == 0
    assert found[ALL]["missing"] == pytest.approx(study.LOSS, abs=0.05)
    assert found["last"]["missing"] == pytest.approx(study.LOSS / 3, abs=0.05)
    assert found["last"]["drift"] > 0


def test_thirds_are_compared_seed_by_seed() -> None:
    losses = {"first": 0.1, "second": 0.2, "last": 0.3}
    results = [Result(replace(RUN, method=RELIABLE, lost=NONE, seed=s).settings, {"loss": 1.0})
               for s in (1, 2)]  # fmt: skip
    for seed in (1, 2):
        for lost, more in losses.items():
            run = replace(RUN, lost=lost, seed=seed)
            results.append(Result(run.settings, {"loss": 1 + more}))
    line = study.table(results).splitlines()[2]
    assert line.startswith("| digits | cosine | sharded | 2 | **+10.5 ± 0.0** | **+22.1 ± 0.0** |")
    assert line.endswith("| - | **+24.5 ± 0.0** |")
