"""Breaks the code in one place at a time, and looks whether a named test notices.

    python -m tools.mutate                   # every mutation of tests/mutations (minutes)
    python -m tools.mutate session credit    # those whose name has one of these words
    python -m tools.mutate --list

Mutations are applied to a copy of the tree, never to the tree itself. What is native is compiled
anew, one source at a time. A test that hangs notices nothing, unless the mutation says that it
makes its test hang. Exit status 1: a mutation wasn't caught, or couldn't be tried, since it doesn't
build or its test fails without it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.mutations.model import Mutation
from tests.mutations.table import MUTATIONS

ROOT = Path(__file__).resolve().parents[1]
SLOW = 4.0
"""By so much a busy machine may take longer than a mutation's seconds."""
BUILD_SECONDS = 600.0
SHOWN = 5
"""So many of the slowest are named in the end."""
TIMED_OUT = "from pytest-timeout."
"""What pytest-timeout writes of a test that it ended."""
TESTS_FAILED = 1
"""pytest's status when tests failed; 2 to 5 say that it couldn't run them."""


class NotBuilt(Exception):
    """The tree doesn't compile; the text is the compiler's."""


@dataclass(frozen=True)
class Run:
    """How a command ended: its status (None: it had to be ended), seconds, and what it said."""

    status: int | None
    seconds: float
    output: str

    @property
    def passed(self) -> bool:
        return self.status == 0

    @property
    def hung(self) -> bool:
        return self.status is None or TIMED_OUT in self.output


class Result(Enum):
    """What became of a mutation."""

    CAUGHT = "caught"
    SURVIVED = "NOT CAUGHT: survived"
    HUNG = "NOT CAUGHT: the test hung"
    NOT_BUILT = "ERROR: does not build"
    NOT_RUN = "ERROR: the test did not run"
    NOT_HEALTHY = "ERROR: the test fails without the mutation"


@dataclass(frozen=True)
class Verdict:
    """What became of a mutation, the seconds of its build and of its test, and the output."""

    result: Result
    build: float = 0.0
    test: float = 0.0
    output: str = ""

    def __str__(self) -> str:
        return f"{self.result.value} ({self.test:.1f} s, built in {self.build:.1f} s)"


def run(command: Sequence[str], folder: Path, timeout: float) -> Run:
    """Runs a command in a session of its own, so that whatever it starts ends with it."""
    begin = time.monotonic()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOSSYCOLL_")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder), "CHECK_FIRST": "1"}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
            status = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status, output = None, ""
            # What left the session may hold the pipe open.
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = process.communicate(timeout=5)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return Run(status, time.monotonic() - begin, output)


class Copy:
    """A copy of the tree at ``root``, with what was built in it."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder = folder
        for name in _files(root):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
        for built in (root / "lossycoll").glob("*.so"):
            shutil.copy2(built, folder / "lossycoll")

    def build(self, mutation: Mutation) -> float:
        """Brings what the mutation's test needs up to date; returns the seconds that took."""
        begin = time.monotonic()
        for edit in mutation.edits:
            self._compile(edit.file)
        kind, _, program = mutation.test.rpartition(":")
        if kind == "native":
            goal = f"build/plain/{program}"
            self._must(["make", "-s", "-j2", "-C", "tests/native", goal, "EXTRA_CFLAGS=-w"])
        else:
            # Whatever the mutation breaks: the one before it may have left its engine.
            self.build_engine()
        return time.monotonic() - begin

    def build_engine(self) -> None:
        """Brings the engine up to date with its sources."""
        made = self.folder / "obj" / "_native.c"
        if not made.exists():
            made.parent.mkdir()
            code = f"from native.build_cffi import ffi; ffi.emit_c_code({str(made)!r})"
            self._must([sys.executable, "-c", code])
        include = f"CFLAGS_PYTHON=-I{sysconfig.get_path('include')}"
        self._must(["make", "-s", "-j2", "-f", "tools/mutate.mk", include])

    def _compile(self, name: str) -> None:
        if not name.endswith(".py"):
            return
        try:
            compile((self.folder / name).read_text(encoding="utf-8"), name, "exec")
        except SyntaxError as caught:
            raise NotBuilt(f"{name}: {caught}") from caught

    def _must(self, command: Sequence[str]) -> None:
        done = run(command, self.folder, BUILD_SECONDS)
        if not done.passed:
            raise NotBuilt(f"{' '.join(command)}\n{done.output}")

    def test(self, mutation: Mutation) -> Run:
        """Runs the mutation's test."""
        kind, _, program = mutation.test.rpartition(":")
        seconds = SLOW * mutation.seconds
        if kind == "native":
            return run([f"tests/native/build/plain/{program}"], self.folder, seconds)
        test = ["-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", mutation.test]
        return run([sys.executable, *test], self.folder, seconds)

    @contextlib.contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """Has the defect in it."""
        whole: dict[Path, str] = {}
        for edit in mutation.edits:
            path = self.folder / edit.file
            text = path.read_text(encoding="utf-8")
            whole.setdefault(path, text)
            if text.count(edit.before) != 1:
                raise ValueError(f"{mutation.name}: {edit.before!r} isn't once in {edit.file}")
            path.write_text(text.replace(edit.before, edit.after), encoding="utf-8")
        try:
            yield
        finally:
            for path, text in whole.items():
                path.write_text(text, encoding="utf-8")


def _files(root: Path) -> list[str]:
    """What git knows, and what it doesn't ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    found = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [name for name in found.split("\0") if name and (root / name).is_file()]


def examine(copy: Copy, mutation: Mutation) -> Verdict:
    """Breaks the copy, and sees what the mutation's test says to it."""
    with copy.mutated(mutation):
        try:
            build = copy.build(mutation)
        except NotBuilt as caught:
            return Verdict(Result.NOT_BUILT, output=str(caught))
        broken = copy.test(mutation)
    return Verdict(_judge(mutation, broken), build, broken.seconds, broken.output)


def _judge(mutation: Mutation, broken: Run) -> Result:
    if broken.passed:
        return Result.SURVIVED
    if broken.hung:
        return Result.CAUGHT if mutation.hangs else Result.HUNG
    if not mutation.test.startswith("native:") and broken.status != TESTS_FAILED:
        return Result.NOT_RUN
    return Result.CAUGHT


def sick(copy: Copy, chosen: Sequence[Mutation]) -> dict[str, Verdict]:
    """The tests that fail without any mutation."""
    found = {}
    first = {mutation.test: mutation for mutation in chosen}
    for test, mutation in first.items():
        build = copy.build(mutation)
        done = copy.test(mutation)
        print(f"{test}: {done.seconds:.1f} s without a mutation", flush=True)
        if not done.passed:
            found[test] = Verdict(Result.NOT_HEALTHY, build, done.seconds, done.output)
    return found


def try_all(copy: Copy, chosen: Sequence[Mutation]) -> dict[str, Verdict]:
    """The verdict on each mutation by its name, told as it is found."""
    bad_tests = sick(copy, chosen)
    verdicts = {}
    for mutation in chosen:
        verdict = bad_tests.get(mutation.test) or examine(copy, mutation)
        print(f"{mutation.name}: {verdict}", flush=True)
        verdicts[mutation.name] = verdict
    return verdicts


def summary(verdicts: Mapping[str, Verdict]) -> str:
    """How many were caught, in what time, and what the others' tests said."""
    caught = [each for each in verdicts.values() if each.result is Result.CAUGHT]
    seconds = sum(each.build + each.test for each in verdicts.values())
    lines = [f"{len(caught)} of {len(verdicts)} mutations were caught; {seconds:.0f} s"]
    slowest = sorted(verdicts, key=lambda name: verdicts[name].test, reverse=True)[:SHOWN]
    lines += ["slowest: " + ", ".join(f"{name} {verdicts[name].test:.1f} s" for name in slowest)]
    for name, verdict in verdicts.items():
        if verdict.result is not Result.CAUGHT:
            lines += [f"- {name}: {verdict}", verdict.output[-2000:].rstrip()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutate", description=__doc__.split("\n", 1)[0])
    parser.add_argument("words", nargs="*", help="only mutations whose name has one of these")
    parser.add_argument("--list", action="store_true", help="say which there are")
    options = parser.parse_args()
    chosen = [
        mutation
        for mutation in MUTATIONS
        if not options.words or any(word in mutation.name for word in options.words)
    ]
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name}: {mutation.test}")
        return 0
    if not chosen:
        parser.error("no mutation has such a name; --list says which there are")
    with tempfile.TemporaryDirectory(prefix="lossycoll-mutate-") as folder:
        verdicts = try_all(Copy(Path(folder)), chosen)
    print(f"\n{summary(verdicts)}")
    return any(verdict.result is not Result.CAUGHT for verdict in verdicts.values())


if __name__ == "__main__":
    sys.exit(main())
