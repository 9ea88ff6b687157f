"""torch's own tests of groups whose members change, with lossy.

``TORCH_FAULT_TOLERANCE=FILE python -m tests.conformance.fault_tolerance [TEST ...]``.

FILE is test/distributed/test_c10d_fault_tolerance.py of torch's sources, which its wheels lack. It
needs torch 2.14. Our own tests of the same situations are tests/backend/test_reconfigure.py.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import unittest
from typing import Any

import torch.multiprocessing

NAME = "TORCH_FAULT_TOLERANCE"
FILE = os.environ.get(NAME, "")


def _loaded(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("torch_fault_tolerance", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    if not FILE:
        print(f"torch's tests of fault tolerance aren't run: {NAME} doesn't name their file")
        return 0
    torchs = _loaded(FILE)
    case = torchs._make_fault_tolerance_test_class("lossy", "cpu")
    # Importing torch takes seconds, and a fork of this process, which has one thread, has done so.
    forked = torch.multiprocessing.get_context("fork").Process
    case._spawn_processes = lambda test: test._start_processes(forked)
    load = unittest.defaultTestLoader
    suite = unittest.TestSuite(
        each(name)
        for each in (case, torchs.ReconfigureContractTest)
        for name in load.getTestCaseNames(each)
        if name in sys.argv[1:] or not sys.argv[1:]
    )
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    bad = len(result.failures) + len(result.errors)
    print(f"{result.testsRun} run, {len(result.skipped)} skipped, {bad} failed")
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
