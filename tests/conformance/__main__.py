"""``python -m tests.conformance``: the suite in every mode, the table, and whether all is as
known."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from benchmarks.common.tables import add_report

from .modes import CHOICES, MODES
from .runner import Outcome
from .table import BY_TORCH, counts, page, rows_by_torch, skip_reasons, versions_of
from .verdict import Contradiction, Run, contradictions

ROOT = Path(__file__).resolve().parents[2]
RANKS_ENV = {
    "OMP_NUM_THREADS": "1",  # a pool of threads doesn't survive a fork
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the other check would forbid forks to use CUDA
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
}


class WorkerError(RuntimeError):
    """The process that runs the tests ended otherwise than by running them."""


def outcomes(
    mode: str, world: int, tests: list[str] | None = None, *arguments: str
) -> Iterator[tuple[str, Outcome]]:
    """Runs ``tests`` (None: all) in a process of their own; yields each as it is done.

    ``arguments`` are further ones for the worker. Raises WorkerError if it fails.
    """
    if tests is not None and not tests:
        return
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LOSSYCOLL_", "TORCH_"))}
    command = [sys.executable, "-m", "tests.conformance.worker", *arguments, mode, str(world)]
    with subprocess.Popen(
        [*command, *(tests or [])], stdout=subprocess.PIPE, text=True, env=kept | RANKS_ENV
    ) as worker:
        try:
            for line in worker.stdout or ():
                fields = json.loads(line)
                yield fields.pop("test"), Outcome(**fields)
        except BaseException:  # also when the caller wants no more
            worker.kill()
            raise
    if worker.returncode:
        raise WorkerError(f"{' '.join(command)} ended with status {worker.returncode}")


def facts() -> list[str]:
    """When, where and with what."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
        return done.stdout.strip()

    changed = ", with changes" if git("status", "--porcelain", "--", "lossycoll", "native") else ""
    return [
        f"Date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        f"Commit: {git('rev-parse', '--short', 'HEAD') or 'unknown'}{changed}",
        f"torch {version('torch')}, Python {platform.python_version()}",
        f"Machine: {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    measured_modes = [mode.name for mode in MODES.values() if mode.on_page]
    parser.add_argument("--modes", nargs="+", choices=MODES, default=measured_modes)
    parser.add_argument("--worlds", nargs="+", type=int, default=[3, 4])
    parser.add_argument("--tests", nargs="+", help="only these")
    parser.add_argument("--jobs", type=int, default=1, help="world sizes at the same time")
    parser.add_argument("--write", type=Path, help="the page to write")
    add_report(parser, f"{BY_TORCH.page}, which gets rows of the installed torch; the rest stays")
    given = parser.parse_args()
    measured = facts()
    results: dict[str, dict[tuple[str, int], Run]] = {name: {} for name in CHOICES}
    was = given.write.read_text(encoding="utf-8") if given.write and given.write.exists() else ""
    versions = versions_of(was)
    lock = threading.Lock()

    def keep(choice: str, mode: str, world: int, run: Run) -> None:
        """The page has whatever is done, so an interrupted run isn't lost."""
        with lock:
            results[choice][mode, world] = run
            if given.write:
                given.write.write_text(page(results, measured, versions), encoding="utf-8")
            if given.report:
                BY_TORCH.report(given.report, rows_by_torch(version("torch"), results["gloo"]))

    def all_of(world: int) -> list[Contradiction]:
        bad = []
        for choice in CHOICES.values():
            runs, tests = results[choice.name], given.tests
            if choice.reason:
                first = results["gloo"]["gloo", world]
                tests = [
                    test for test, out in first.items() if out.reason.startswith(choice.reason)
                ]
            modes = [mode for mode in given.modes if not choice.reason or not MODES[mode].inject]
            for mode in dict.fromkeys(["gloo", *modes]):
                run = _run(mode, world, choice.name, tests)
                keep(choice.name, mode, world, run)
                if mode == "gloo":
                    tests = [name for name, outcome in run.items() if outcome.kind != "skip"]
                else:
                    bad += contradictions(runs["gloo", world], run, mode, world)
        return bad

    with ThreadPoolExecutor(given.jobs) as pool:
        bad = list(itertools.chain.from_iterable(pool.map(all_of, given.worlds)))
    for one in bad:
        print(f"not as known: {one}")
    return 1 if bad else 0


def _run(mode: str, world: int, choice: str, tests: list[str] | None) -> Run:
    run: dict[str, Outcome] = {}
    where = f"{mode}, {world} ranks" + (f", {choice}" if choice != "gloo" else "")
    for name, outcome in outcomes(mode, world, tests, "--choice", choice):
        run[name] = outcome
        place = f"{where}, {len(run)}/{len(tests) if tests else '?'}"
        print(f"[{place}] {outcome.seconds:6.2f} s  {outcome.kind:7} {name}  {outcome.reason}")
        sys.stdout.flush()
    print(f"[{where}] {counts(run)}")
    for reason, number in skip_reasons(run).most_common():
        print(f"    {number:3} skipped: {reason}")
    return run


if __name__ == "__main__":
    sys.exit(main())
