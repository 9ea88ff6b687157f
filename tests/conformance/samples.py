"""Cases whose outcome is known: what the runner must make of a pass, a skip, a failure, a hang."""

from __future__ import annotations

import os
import signal
import time
import unittest
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import TEST_SKIPS
from torch.testing._internal.distributed import distributed_test


class Samples:
    """Mixed into torch's case in place of its tests."""

    rank: int

    def _barrier(self, *args: Any, **kwargs: Any) -> None:
        distributed_test.Barrier.sync(*args, **kwargs)

    def test_pass(self) -> None:
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor)
        assert tensor[0].item() == dist.get_world_size()

    @unittest.skip("known before it starts")
    def test_skip_static(self) -> None:
        raise AssertionError

    def test_skip_inside(self) -> None:
        raise unittest.SkipTest("known inside")

    def test_skip_by_status(self) -> None:
        raise SystemExit(TEST_SKIPS["multi-gpu-3"].exit_code)

    def test_skip_of_one_rank(self) -> None:
        if self.rank == 1:
            raise unittest.SkipTest("here only")

    test_skip_of_one_rank.limit = 6.0  # type: ignore[attr-defined]

    def test_fail(self) -> None:
        dist.barrier()
        raise ValueError("on every rank")

    def test_fail_of_last_rank(self) -> None:
        """The others wait for it, and must not be what is reported."""
        if self.rank == dist.get_world_size() - 1:
            raise ValueError("the last rank only")
        time.sleep(600)

    def test_crash(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    def test_hang(self) -> None:
        if self.rank == 1:
            self.wait_for_nothing()

    test_hang.limit = 10.0  # type: ignore[attr-defined]

    def wait_for_nothing(self) -> None:
        time.sleep(600)

    def test_exit(self) -> None:
        raise SystemExit(3)
