"""torch's sanitizer for CUDA watches the checks of order: no two streams touch the same memory
without one waiting for the other."""

from __future__ import annotations

import pytest

from tests.gpu.checks import needs_gpu
from tests.gpu.runner import run_table

pytestmark = [needs_gpu, pytest.mark.timeout(300)]

ORDER = (
    "the_copy_waits_for_kernels_before_the_call",
    "kernels_after_wait_wait_for_the_result",
    "a_call_on_a_side_stream",
    "memory_is_held_until_the_call_is_done",
    "futures_order_the_stream_that_waits",
    "callbacks_of_futures_read_the_result",
)
SANITIZER = {"TORCH_CUDA_SANITIZER": "1", "LOSSYCOLL_LOG": "off"}


def test_the_sanitizer_finds_nothing() -> None:
    names = ("the_sanitizer_sees_a_race", *ORDER)
    found = run_table("tests.gpu.sanitized", env=SANITIZER, names=names)
    bad = {name: one.errors for name, one in found.items() if any(one.errors.values())}
    assert not bad
    assert not [name for name, one in found.items() if one.skipped]
