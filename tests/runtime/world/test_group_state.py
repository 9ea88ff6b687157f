"""What a rank says of its group's state: who left, and when it failed."""

from __future__ import annotations

import logging

import pytest

from lossycoll.errors import LossyError
from lossycoll.runtime.core.call import Collective
from lossycoll.runtime.world.group_state import Health


def health() -> Health:
    return Health(
        0, 2, addresses=["a", "b"], liveness=9.0, control=None, on_failure=lambda error: None
    )


@pytest.mark.parametrize(
    ("last", "when"), [(-1, "before its first call was done"), (0, "after call #0")]
)
def test_a_rank_that_left_is_named_with_the_last_call_that_it_made(last: int, when: str) -> None:
    group = health()
    assert group.left(1) is None
    group.on_bye(1, last)
    error = group.left(1)
    assert error is not None
    assert f"rank 1 (b) left the group {when}; did it end early" in str(error)
    assert "#-1" not in str(error)
    assert error.peer == 1


def test_a_rank_that_left_by_an_error_is_named_with_it() -> None:
    group = health()
    group.on_bye(1, 3, "RuntimeError: shapes differ")
    assert str(group.left(1)).endswith(
        "rank 1 (b) left the group after call #3, by RuntimeError: shapes differ"
    )


def test_a_failure_before_the_first_call_has_no_number(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lossycoll"):
        group = health()
        group.fail(LossyError("early"))
        group = health()
        group.issue(Collective("barrier"))
        group.fail(LossyError("late"))
    early, late = (record.fields for record in caplog.records)  # type: ignore[attr-defined]
    assert "seq" not in early
    assert late["seq"] == 0
