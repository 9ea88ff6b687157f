"""The code blocks of docs/extending.md run as they stand there, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import pages
from tests.support.harness import warm_python

PAGE = "extending.md"
TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
SHARED = {"sign_sgd.py": TESTS / "cli" / "demo", "rotate.py": TESTS / "backend"}
"""Scripts of the page that other tests use as well, with their folders."""
COMMANDS = pages.commands(PAGE)
WANTED = [
    r"^mean 1\.00\n$",
    r"sign-sgd: each step follows the sign of the mean that arrived\.",
    r"^the rank before 0 is 2\n$",
]
"""What each command prints."""


def test_each_command_has_its_output_here() -> None:
    assert len(COMMANDS) == len(WANTED)


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        pytest.param(command, wanted, marks=pytest.mark.long if "demo" in command else ())
        for command, wanted in zip(COMMANDS, WANTED, strict=True)
    ],
)
def test_a_command(command: str, wanted: str, tmp_path: Path) -> None:
    done = pages.run(command, pages.write(PAGE, tmp_path), warm_python())
    assert done.returncode == 0, done.stderr
    assert re.search(wanted, done.stdout), done.stdout


@pytest.mark.parametrize("name", SHARED)
def test_a_script_is_the_one_that_other_tests_use(name: str) -> None:
    shown = pages.scripts(PAGE)[name].removeprefix(f"# {name}\n")
    assert shown == (SHARED[name] / name).read_text(encoding="utf-8")


def complaints(folder: Path, *command: str) -> str:
    """What a linter with this repository's settings says of the scripts in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", *command, *map(str, sorted(folder.glob("*.py")))],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.stdout + done.stderr if done.returncode else ""


MYPY = ("mypy", "--strict", "--follow-imports=silent", "--no-error-summary")
"""Silent of what a script imports: what the package is to mypy depends on the version of torch, and
`make lint` looks at that."""


@pytest.mark.long
def test_a_wrong_type_is_found(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text('count: int = "none"\n', encoding="utf-8")
    assert "Incompatible types in assignment" in complaints(tmp_path, *MYPY)


@pytest.mark.parametrize(
    "tool", ["check", "format --diff", pytest.param("mypy", marks=pytest.mark.long)]
)
def test_the_scripts_are_lint_clean(tool: str, tmp_path: Path) -> None:
    folder = pages.write(PAGE, tmp_path)
    if tool == "mypy":
        found = complaints(folder, *MYPY)
    else:
        # What stands beside a script is its own, as lossycoll is here.
        found = complaints(folder, "ruff", *tool.split(), "--config", f"src=['{folder}', '{ROOT}']")
    assert not found, found
