"""What holds for every test: the order they run in, which worker runs them, and when one is alone.

Markers: ``long`` leaves a test to ``make test-all``; ``serial`` runs it after all others, with
nothing of the suite beside it; ``in_clear`` hides a secret from it (LOSSYCOLL_SECRET), with which
all others seal what they send.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.waiting import until

# Before torch is imported: with more, the threads of a few processes wait for one another's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # tests/gpu does without
    from hypothesis import settings

    # A busy machine may take its time, and the cases of one run are those of the next.
    settings.register_profile("suite", deadline=None, derandomize=True)
    settings.load_profile("suite")

TESTS = Path(__file__).resolve().parent

SECONDS = {
    "native/test_native.py": 90,
    "benchmarks/test_theory.py": 95,
    "runtime/engine/test_oracle.py": 100,
    "repository/test_examples.py": 85,
    "failures/test_leave.py": 75,
    "runtime/world/test_world_machine.py": 25,
    "runtime/world/test_failover.py": 20,
    "conformance/test_conformance.py": 60,
    "backend/test_faults.py": 60,
    "cli/bench/test_command.py": 60,
    "plan/test_reference_executor.py": 55,
    "lab/test_links.py": 50,
    "cli/demo/test_command.py": 46,
    "repository/test_wheel.py": 45,
    "backend/test_survivors.py": 40,
    "repository/test_guide.py": 36,
    "backend/test_surface.py": 35,
    "runtime/swarm/test_valkey.py": 40,
    "train/compress/test_arc_topk_ranks.py": 32,
    "train/dropcompute/test_loss.py": 31,
    "cli/doctor/test_command.py": 31,
    "cli/doctor/peer/test_peer.py": 25,
    "lab/test_life.py": 30,
    "train/sharded/test_optimizer.py": 14,
    "train/drift/test_sharded_models.py": 25,
    "train/drift/test_bound.py": 22,
    "backend/test_process_group.py": 25,
    "cli/bench/test_nccl.py": 22,
    "failures/test_kill.py": 20,
    "benchmarks/test_quality.py": 45,
    "gpu/test_fake_device.py": 30,
    "backend/test_monitored_barrier.py": 30,
    "train/moshpit/test_wire.py": 25,
    "train/moshpit/test_shards.py": 30,
    "benchmarks/test_full_grids.py": 25,
    "benchmarks/test_mass_restart.py": 20,
    "backend/test_sealed.py": 25,
    "runtime/world/test_rendezvous_orders.py": 22,
    "train/dropcompute/test_ranks.py": 22,
    "gpu/test_on_cpu.py": 16,
    "train/sharded/test_compression.py": 16,
    "train/sharded/test_loss.py": 15,
    "train/sharded/test_checkpoint.py": 15,
    "backend/test_replacement.py": 15,
    "lab/test_congestion.py": 15,
}
"""Files that take long, and about how long on two cores with others beside.

The longest start first, so that at the end no worker is left with a long test.
"""


def pytest_collection(session: pytest.Session) -> None:
    """Workers that collect the whole suite begin with different files. In a clean checkout each
    would rewrite the asserts of all tests: so each finds most of them done by another, in
    __pycache__."""
    config = session.config
    told = getattr(config, "workerinput", None)
    if told is None or config.args != config.getini("testpaths"):
        return
    files = sorted(TESTS.rglob("test_*.py"))
    number, workers = int(told["workerid"].removeprefix("gw")), int(told["workercount"])
    first = number * len(files) // workers
    for file in files[first:] + files[:first]:
        name = ".".join(file.relative_to(TESTS.parent).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting it tells of it
            importlib.import_module(name)


PER_FILE: pytest.StashKey[dict[str, tuple[int, int]]] = pytest.StashKey()
"""How many tests each file that was collected has: in the short suite, and of the long one only."""


# First, since xdist reads the groups in its own.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[PER_FILE] = _per_file(items)
    items.sort(key=_place)
    for item in items:
        # Workers take single tests (--dist=loadgroup), but for these groups.
        if item.get_closest_marker("serial"):
            item.add_marker(pytest.mark.xdist_group("serial"))
        elif _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(TESTS))))
        if getattr(config.option, "loadgroup", False):
            _say_group(item)


def _say_group(item: pytest.Item) -> None:
    """Puts the group where pytest-xdist looks for it. It does so itself, up to 3.8 by an attribute
    that pytest 9.2 has no more: without this, every test would be a group of its own."""
    group = item.get_closest_marker("xdist_group")
    if group is not None:
        item._id = type(item._id).parse(f"{item.nodeid}@{group.args[0]}")


def _per_file(items: list[pytest.Item]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for item in items:
        path = str(item.path.relative_to(TESTS))
        short, long = found.get(path, (0, 0))
        is_long = item.get_closest_marker("long") is not None
        found[path] = (short + (not is_long), long + is_long)
    return found


def _place(item: pytest.Item) -> tuple[bool, int]:
    """Sorts by it: serial tests last, before them the others in the order of their files."""
    seconds = SECONDS.get(str(item.path.relative_to(TESTS)), 0)
    return item.get_closest_marker("serial") is not None, -seconds


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Whether it uses a fixture of its module's, which a second worker would have to make again."""
    if not isinstance(item, pytest.Function):
        return False
    fixtures = item._fixtureinfo.name2fixturedefs
    return any(one.scope == "module" for found in fixtures.values() for one in found)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A serial test waits until the other worker's test has ended, and holds back its next one. One
    in clear finds no secret, nor do its fixtures."""
    with contextlib.ExitStack() as stack:
        if item.get_closest_marker("in_clear"):
            stack.enter_context(_without_secret())
        if hasattr(item.config, "workerinput"):  # else a single process: nothing is beside it
            alone = item.get_closest_marker("serial") is not None
            lock = stack.enter_context(open(__file__, encoding="utf-8"))
            fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        return (yield)


@contextlib.contextmanager
def _without_secret() -> Generator[None, None, None]:
    from lossycoll.options.texts import SECRET_VARIABLES

    hidden = {name: os.environ.pop(name) for name in SECRET_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Generator[None, None, None]:
    """Fails a test that leaves a thread of ours: an engine that nobody closed, say, which would
    take its turns beside all later tests of the worker."""
    before = our_threads()
    yield
    until(lambda: our_threads().keys() <= before.keys(), "the end of the threads of this test")


def our_threads() -> dict[int, str]:
    """This process's, by the kernel's number: Python knows nothing of the engine's."""
    found = {
        thread.native_id or 0: thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("lossycoll")
    }
    for number in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{number}/comm", encoding="utf-8") as file:
                name = file.read().strip()
        except OSError:
            continue  # it has just ended
        if name.startswith("lossycoll"):
            found[int(number)] = name
    return found
