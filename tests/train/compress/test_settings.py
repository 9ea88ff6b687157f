"""Which arguments ARCTopKState refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import lossycoll


@pytest.mark.parametrize(
    "bad",
    [
        {"ratio": 0.0}, {"ratio": 1.1}, {"ratio": -0.2}, {"ratio": math.nan}, {"ratio": "0.2"},
        {"ratio": True}, {"sketch_dim": 0}, {"sketch_dim": 2.5}, {"start_iter": -1},
        {"error_feedback": "ef22"}, {"momentum": 0.0}, {"momentum": 1.5}, {"method": "top"},
        {"sketch_dtype": torch.int32}, {"dense_below": -1}, {"on_nonfinite": "ignore"},
        {"seed": -1}, {"dense": ["token.weight"]},
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_and_named(bad: dict[str, Any]) -> None:
    with pytest.raises(lossycoll.OptionError, match=next(iter(bad))) as caught:
        lossycoll.ARCTopKState(**bad)
    assert isinstance(caught.value, ValueError)
    assert "wanted" in str(caught.value)
