"""Breaks the code in one place at a time, and looks whether a named test notices.

    python -m tools.mutate                   # every mutation of tests/mutations (minutes)
    python -m tools.mutate session credit    # those whose name has one of these words
    python -m tools.mutate --list

Mutations are applied to a copy of the tree, never to the tree itself. What is native is compiled
anew, one source at a time. Exit status 1: a mutation survived, or its test fails without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.model import Mutation
from tests.mutations.table import MUTATIONS

ROOT = Path(__file__).resolve().parents[1]
SLOW = 4.0
"""By so much a busy machine may take longer than a mutation's seconds."""
BUILD_SECONDS = 600.0


@dataclass(frozen=True)
class Run:
    """How a command ended: its status (None: it had to be ended), seconds, and what it said."""

    status: int | None
    seconds: float
    output: str

    @property
    def passed(self) -> bool:
        return self.status == 0


def run(command: Sequence[str], folder: Path, timeout: float) -> Run:
    """Runs a command in a session of its own, so that whatever it starts ends with it."""
    begin = time.monotonic()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOSSYCOLL_")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
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
            status, output = None, ""
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if status is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Run(status, time.monotonic() - begin, output)


class Copy:
    """A copy of the tree, with what was built in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in _files():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        for built in (ROOT / "lossycoll").glob("*.so"):
            shutil.copy2(built, folder / "lossycoll")

    def build(self) -> None:
        """Brings the engine up to date with its sources."""
        made = self.folder / "obj" / "_native.c"
        if not made.exists():
            made.parent.mkdir()
            code = f"from native.build_cffi import ffi; ffi.emit_c_code({str(made)!r})"
            self._must([sys.executable, "-c", code])
        include = f"CFLAGS_PYTHON=-I{sysconfig.get_path('include')}"
        self._must(["make", "-s", "-j2", "-f", "tools/mutate.mk", include])

    def build_program(self, name: str) -> None:
        """Brings a program of tests/native up to date."""
        goal = f"build/plain/{name}"
        self._must(["make", "-s", "-j2", "-C", "tests/native", goal, "EXTRA_CFLAGS=-w"])

    def _must(self, command: Sequence[str]) -> None:
        done = run(command, self.folder, BUILD_SECONDS)
        if not done.passed:
            raise RuntimeError(f"{' '.join(command)}\n{done.output}")

    def test(self, mutation: Mutation) -> Run:
        """Builds what the mutation's test needs, and runs it."""
        kind, _, program = mutation.test.rpartition(":")
        seconds = SLOW * mutation.seconds
        if kind == "native":
            self.build_program(program)
            return run([f"tests/native/build/plain/{program}"], self.folder, seconds)
        if mutation.is_native:
            self.build()
        test = ["-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", mutation.test]
        return run([sys.executable, *test], self.folder, seconds)

    @contextmanager
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


def _files() -> list[str]:
    """What git knows, and what it doesn't ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in found.split("\0") if name and (ROOT / name).is_file()]


def examine(copy: Copy, mutation: Mutation) -> str:
    """Why the mutation was not caught, or nothing."""
    with copy.mutated(mutation):
        broken = copy.test(mutation)
    how = "ended by timeout" if broken.status is None else f"status {broken.status}"
    if broken.passed:
        return f"survived {mutation.test}"
    print(f"  caught in {broken.seconds:.1f} s ({how})", flush=True)
    # pytest: 1 says that tests failed; 2 to 5 that it couldn't run them.
    if not mutation.test.startswith("native:") and broken.status not in (1, None):
        return f"{mutation.test} didn't run:\n{broken.output[-2000:]}"
    return ""


def healthy(copy: Copy, chosen: Sequence[Mutation]) -> list[str]:
    """Tests that fail without any mutation."""
    bad = []
    first = {mutation.test: mutation for mutation in chosen}
    for test, mutation in first.items():
        done = copy.test(mutation)
        print(f"{test}: {done.seconds:.1f} s without a mutation", flush=True)
        if not done.passed:
            bad.append(f"{test} fails without a mutation:\n{done.output[-2000:]}")
    return bad


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
        copy = Copy(Path(folder))
        copy.build()
        bad = healthy(copy, chosen)
        for mutation in chosen:
            print(f"{mutation.name}: {mutation.edits[0].file}", flush=True)
            if complaint := examine(copy, mutation):
                print(f"  NOT CAUGHT: {complaint}", flush=True)
                bad.append(f"{mutation.name}: {complaint}")
    caught = len(chosen) - sum(not text.startswith("tests/") for text in bad)
    print(f"\n{caught} of {len(chosen)} mutations were caught")
    for text in bad:
        print(f"- {text}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
