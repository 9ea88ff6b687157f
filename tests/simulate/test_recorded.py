"""What a file of recorded times may have; what is refused is in tests/cli/threshold."""

from __future__ import annotations

import numpy as np
import pytest

from lossycoll import OptionError
from lossycoll.simulate import recorded

STEP = [[0.1, 0.2], [0.1]]


def test_other_keys_are_the_users_own() -> None:
    content = {"micro_batch_seconds": [STEP], "communication_seconds": 0, "machine": "ours"}
    found = recorded.parse(content)
    assert found.times.shape == (1, 2, 2)
    assert np.isnan(found.times[0, 1, 1])
    with pytest.raises(OptionError, match="a list at the top"):
        recorded.parse([])
