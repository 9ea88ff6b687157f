"""What the arguments of a method mean, and which options a call is made with then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.train.common.delivery import MAX_MISSING, NOTHING_ASKED, Recovery


def test_a_share_may_be_missing_unless_rounds_are_given() -> None:
    assert Recovery.of(None, None) == Recovery(MAX_MISSING, None, asked=False)
    assert Recovery.of(None, 2) == Recovery(None, 2)
    assert Recovery.of(0.05, None) == Recovery(0.05, None)
    assert Recovery.of(0.0, 0) == Recovery(0.0, 0)


@pytest.mark.parametrize(
    ("max_missing", "repair", "text"),
    [
        (None, 256, "repair is 256, wanted a number of rounds, 0 to 255, or None"),
        (None, True, "repair is True, wanted"),
        (2.0, None, "max_missing is 2.0, wanted 0, 0.0001 to 1"),
        ("none", None, "max_missing is 'none', wanted a share, 0 to 1, or None"),
    ],
)
def test_a_bad_value_is_refused(max_missing: Any, repair: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        Recovery.of(max_missing, repair)


@pytest.mark.parametrize(
    ("recovery", "options", "held", "at_least"),
    [
        (NOTHING_ASKED, Options(repair=1), {}, {}),
        (Recovery.of(None, None), Options(), {"max_missing": 0.01}, {"max_missing": 0.01}),
        # What the group was given goes before what nobody asked for.
        (Recovery.of(None, None), Options(repair=0), {"max_missing": 0.01}, {}),
        (Recovery.of(None, None), Options(fec=0.1), {"max_missing": 0.01}, {}),
        (Recovery.of(None, None), Options(max_missing=0.1), {"max_missing": 0.01}, {}),
        (
            Recovery.of(0.02, None),
            Options(max_missing=0.1),
            {"max_missing": 0.02},
            {"max_missing": 0.02},
        ),
        (Recovery.of(None, 2), Options(repair=3), {"repair": 2}, {"repair": 3}),
        (Recovery.of(None, 2), Options(max_missing=0.1), {"repair": 2}, {"repair": 2}),
        (
            Recovery.of(0.02, 0),
            Options(),
            {"max_missing": 0.02, "repair": 0},
            {"max_missing": 0.02, "repair": 0},
        ),
    ],
)
def test_a_call_is_made_with(
    recovery: Recovery, options: Options, held: dict[str, Any], at_least: dict[str, Any]
) -> None:
    assert replace(recovery, exact=True).changes(options) == held
    assert recovery.changes(options) == at_least
