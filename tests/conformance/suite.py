"""Finds torch's tests and makes each of them a case that :mod:`conformance.runner` can run.

The suite decides by the name of the backend which tests to run, when it is imported. So that lossy
has to face what gloo faces, it is imported as for gloo; from then on the backend is lossy, under a
name that the suite's own comparisons (not torch's) take for gloo's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import traceback
import types
import unittest
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from .fresh import FreshRanks
from .modes import Choice, Mode
from .runner import MAX_TEXT, Message, Outcome, run

LIMIT_SECONDS = 120.0
BARRIER_SECONDS = 60
COUNTERS = ("operations", "packets_injected", "packets_missing")
"""Of lossycoll's statistics: engine operations, packets lost on purpose, packets given up."""
BY_TIERS = "by_tiers"
"""Counts groups whose collectives go by hosts or sites."""


class _TakenFor(str):
    """A backend's name. ``BACKEND == "gloo"`` is how some tests know that models are on CPUs."""

    __slots__ = ("other",)
    other: str

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == self.other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Suite:
    """The tests in one mode at one world size. At most one per process.

    ``samples``: our own cases, which show what the runner makes of them, in place of torch's.
    ``one_gpu``: the tests about GPUs alone, on one that all ranks share. ``limit``: seconds.
    """

    def __init__(
        self,
        mode: Mode,
        world: int,
        choice: Choice,
        *,
        samples: bool = False,
        one_gpu: bool = False,
        limit: float = LIMIT_SECONDS,
    ) -> None:
        os.environ |= {
            "BACKEND": choice.named,
            "WORLD_SIZE": str(world),
            "TEMP_DIR": "",
            **mode.env,
        }
        _stand_in_for_expecttest()
        from torch.testing._internal import common_distributed
        from torch.testing._internal.distributed import distributed_test

        if samples:
            from .samples import Samples as Tests
        else:
            Tests = distributed_test.DistributedTest._DistTestBase
        logging.getLogger("torch.testing").setLevel(logging.WARNING)
        if mode.backend == "lossy":
            from lossycoll import _autoload

            _autoload.register()  # where the package is only on the path
            _autoload.load()  # once here rather than in every rank
        os.environ |= {
            "BACKEND": choice.env_name,
            "MASTER_ADDR": str(distributed_test.MASTER_ADDR),
        }
        distributed_test.BACKEND = _TakenFor(mode.backend)
        distributed_test.BACKEND.other = choice.named
        self._shared = common_distributed
        self._world = world
        self._mode = mode
        self._case = _case(distributed_test.TestDistBackend, Tests)
        self._skips = {s.exit_code: s.message for s in common_distributed.TEST_SKIPS.values()}
        self.names = unittest.TestLoader().getTestCaseNames(self._case)
        self._limit = limit
        self._fresh: FreshRanks | None = None
        self._around: Callable[[], Any] = contextlib.nullcontext
        if one_gpu:
            from .one_gpu import OnGpu0, is_about_gpus, share

            share([common_distributed, distributed_test], world)
            self._around = OnGpu0
            self.names = [name for name in self.names if is_about_gpus(getattr(self._case, name))]

    def run(self, name: str) -> Outcome:
        """Runs one test; after its ``limit``, or else the suite's, it counts as hung."""
        method = getattr(self._case, name)
        if getattr(method, "__unittest_skip__", False):
            return Outcome("skip", method.__unittest_skip_why__)
        limit = getattr(method, "limit", self._limit)
        self._shared.initialize_temp_directories()
        try:
            with tempfile.TemporaryDirectory() as folder:
                store = os.path.join(folder, "store")

                def entry(rank: int, pipe: Connection) -> None:
                    os.environ |= self._mode.env_of(rank)
                    self.run_here(rank, name, store, pipe)

                if self._fresh is not None:
                    return self._fresh.run(name, store, limit)
                return run(entry, self._world, limit=limit, skips=self._skips)
        finally:
            self._shared.cleanup_temp_dir()

    def run_in(self, ranks: FreshRanks) -> None:
        """From now on tests run in processes that aren't forks of this one."""
        self._fresh = ranks

    @property
    def skips(self) -> dict[int, str]:
        """The reason for each exit status that means a skip."""
        return self._skips

    def run_here(self, rank: int, name: str, store: str, pipe: Connection) -> None:
        """Runs one test as a rank of it; it may raise SystemExit."""
        with self._around():
            self._case._run(rank, name, store, pipe)


def _stand_in_for_expecttest() -> None:
    """torch's tests import it; those of backends need nothing of it, so machines may lack it."""
    try:
        import expecttest  # noqa: F401
    except ModuleNotFoundError:
        found = types.ModuleType("expecttest")
        found.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = found


def _case(base: Any, tests: Any) -> Any:
    """A test case as torch makes it for a backend, but for how it reports."""

    class Case(base, tests):  # type: ignore[misc]
        def _barrier(self, *args: Any, **kwargs: Any) -> None:
            """torch's 10 s can be too short for a machine that has other work as well."""
            super()._barrier(*args, **{"timeout": BARRIER_SECONDS, **kwargs})

        def run_test(self, test_name: str, pipe: Connection) -> None:
            from torch.testing._internal import common_utils

            common_utils.set_rng_seed()
            test: Callable[[], None] = getattr(self, test_name)
            try:
                test()
            except unittest.SkipTest as skip:
                pipe.send(Message(str(skip)))
                sys.exit(_GENERIC_SKIP)
            except Exception:
                pipe.send(Message(traceback.format_exc()[-MAX_TEXT:], _counters()))
                sys.exit(self.TEST_ERROR_EXIT_CODE)
            pipe.send(Message("", _counters()))

    return Case


_GENERIC_SKIP = 86


def _counters() -> dict[str, int]:
    """What the engines of this rank's groups have done, as far as the test has left them."""
    from torch.distributed import distributed_c10d

    from lossycoll import topology

    total: Counter[str] = Counter()
    for group in distributed_c10d._world.pg_map:
        if hasattr(group, "lossy_stats"):
            stats = group.lossy_stats()
            total.update({name: getattr(stats, name) for name in COUNTERS})
            total[BY_TIERS] += not topology(group).is_flat
    return dict(total)
