"""Which arguments DropCompute refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

import lossycoll
from tests.support.dropcompute_cases import small

M = 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"micro_batches": 0}, "micro_batches is 0, wanted a whole number, at least 1"),
        ({"micro_batches": 2.0}, "micro_batches is 2.0"),
        ({"micro_batches": True}, "micro_batches is True"),
        ({"threshold": 0}, "threshold is 0, wanted seconds above 0, or 'auto'"),
        ({"threshold": -1.0}, "threshold is -1.0"),
        ({"threshold": math.nan}, "threshold is nan"),
        ({"threshold": "fast"}, "threshold is 'fast'"),
        ({"threshold": None}, "threshold is None"),
        ({"threshold": True}, "threshold is True"),
        ({"drop_rate": 1.0}, "drop_rate is 1.0, wanted a share"),
        ({"drop_rate": math.nan}, "drop_rate is nan"),
        ({"drop_rate": -0.1}, "drop_rate is -0.1"),
        ({"threshold": 1.0, "drop_rate": 0.1}, "wanted one of them"),
        ({"divisor": "median"}, "divisor is 'median'"),
        ({"warm_up": 1}, "warm_up is 1, wanted a whole number, at least 2"),
        ({"skip": -1}, "skip is -1"),
        ({"window": 0}, "window is 0"),
        ({"cut": "deep"}, "cut is 'deep', wanted one of finished, threshold, started"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"tolerance": math.nan}, "tolerance is nan"),
    ],
)
def test_arguments_that_can_not_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(lossycoll.OptionError, match=said):
        lossycoll.DropCompute(small(), **{"micro_batches": M, **given})
