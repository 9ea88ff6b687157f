"""What the runner of checks makes of each ending. Needs no GPU."""

from __future__ import annotations

import pytest

from tests.gpu.checks import names_of
from tests.gpu.runner import run_table

SAMPLES = "tests.gpu.samples"


def test_each_ending_is_told_and_the_next_check_runs() -> None:
    found = run_table(SAMPLES, device="cpu", env={"LOSSYCOLL_LOG": "off"})
    assert list(found) == names_of(SAMPLES)
    for name in ("passes", "passes_at_the_end"):
        found[name].must_pass()
        assert set(found[name].errors) == {0, 1}
    failed = found["fails_on_the_last_rank"].errors
    assert "AssertionError: the last rank only" in failed[1]
    assert "Aborted" in failed[0]
    assert found["skips"].skipped == "known inside"
    assert found["is_of_cuda"].skipped
    hung = found["hangs_on_the_first_rank"].errors
    assert "in hangs_on_the_first_rank" in hung[0]
    ended = found["ends_its_process"].errors
    assert "status 3" in ended[1]
    with pytest.raises(AssertionError, match="the last rank only"):
        found["fails_on_the_last_rank"].must_pass()
    with pytest.raises(pytest.skip.Exception, match="known inside"):
        found["skips"].must_pass()
