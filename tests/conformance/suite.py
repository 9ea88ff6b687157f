"""Finds torch's tests and makes each of them a case that :mod:`conformance.runner` can run.

The suite decides by the name of the backend which tests to run, when it is imported. So that lossy
has to face what gloo faces, it is always imported as for gloo; from then on the backend is lossy,
under a name that the suite's own comparisons (not torch's) take for gloo's.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import traceback
import unittest
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from .modes import Mode
from .runner import MAX_TEXT, Outcome, run

SLOW = {"test_ddp_uneven_inputs": 400.0}
LIMIT_SECONDS = 120.0


class _TakenForGloo(str):
    """A backend's name. ``BACKEND == "gloo"`` is how some tests know that models are on CPUs."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Suite:
    """The tests in one mode at one world size. At most one per process.

    ``samples``: our own cases, which show what the runner makes of them, in place of torch's.
    """

    def __init__(self, mode: Mode, world: int, *, samples: bool = False) -> None:
        backend = mode.backend
        os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(world), "TEMP_DIR": "", **mode.env}
        from torch.testing._internal import common_distributed
        from torch.testing._internal.distributed import distributed_test

        if samples:
            from .samples import Samples as Tests
        else:
            Tests = distributed_test.DistributedTest._DistTestBase
        logging.getLogger("torch.testing").setLevel(logging.WARNING)
        if backend == "lossy":
            import lossycoll.backend  # noqa: F401 (once here rather than in every rank)
        os.environ |= {"BACKEND": backend, "MASTER_ADDR": str(distributed_test.MASTER_ADDR)}
        distributed_test.BACKEND = backend if backend == "gloo" else _TakenForGloo(backend)
        self._shared = common_distributed
        self._world = world
        self._case = _case(distributed_test.TestDistBackend, Tests)
        self._skips = {s.exit_code: s.message for s in common_distributed.TEST_SKIPS.values()}
        self.names = unittest.TestLoader().getTestCaseNames(self._case)

    def run(self, name: str, limit: float | None = None) -> Outcome:
        """Runs one test; after ``limit`` seconds (or what it usually gets) it counts as hung."""
        method = getattr(self._case, name)
        if getattr(method, "__unittest_skip__", False):
            return Outcome("skip", method.__unittest_skip_why__)
        limit = SLOW.get(name, LIMIT_SECONDS) if limit is None else limit
        self._shared.initialize_temp_directories()
        try:
            with tempfile.TemporaryDirectory() as folder:
                store = os.path.join(folder, "store")

                def entry(rank: int, pipe: Connection) -> None:
                    self._case._run(rank, name, store, pipe)

                return run(entry, self._world, limit=limit, skips=self._skips)
        finally:
            self._shared.cleanup_temp_dir()


def _case(base: Any, tests: Any) -> Any:
    """A test case as torch makes it for a backend, but for how it reports."""

    class Case(base, tests):  # type: ignore[misc]
        def run_test(self, test_name: str, pipe: Connection) -> None:
            from torch.testing._internal import common_utils

            common_utils.set_rng_seed()
            test: Callable[[], None] = getattr(self, test_name)
            try:
                test()
            except unittest.SkipTest as skip:
                pipe.send(str(skip))
                sys.exit(_GENERIC_SKIP)
            except Exception:
                pipe.send(traceback.format_exc()[-MAX_TEXT:])
                sys.exit(self.TEST_ERROR_EXIT_CODE)

    return Case


_GENERIC_SKIP = 86
