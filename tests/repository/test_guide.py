"""The code blocks of docs/guide.md and docs/optimizers.md run as they stand, in one folder."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support import pages
from tests.support.harness import warm_python

PAGES = ("guide.md", "optimizers.md")
WANTED = {
    "train.py": r"loss \d\.\d+",
    "train_bounded.py": r"loss \d\.\d+, replicas \d+\.\d+% of",
    "train_sharded.py": r"loss \d\.\d+, ages of blocks \(\d+",
    "train_arc.py": r"loss \d\.\d+, 2\d% of the bytes",
    "train_dropping.py": r"rank 0: \d+ completed, [1-9]\d* dropped\nrank 1: \d+ completed, [1-9]",
    "estimator.py": r"\['0\.00', '0\.\d+'\]|\['0\.\d+', '0\.00'\]",
    "exact.py": "",
}
"""What each script prints."""

scripts = {name: text for page in PAGES for name, text in pages.scripts(page).items()}
commands = [command for page in PAGES for command in pages.commands(page)]


def test_each_script_is_run_by_a_command_of_the_guide() -> None:
    assert {kind for page in PAGES for kind, _ in pages.blocks(page)} == {"python", "sh"}
    assert set(scripts) == set(WANTED) == {command.split()[-1] for command in commands}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("guide")
    for page in PAGES:
        pages.write(page, made)
    return made


@pytest.mark.parametrize(
    "command",
    [commands[0], *(pytest.param(command, marks=pytest.mark.long) for command in commands[1:])],
)
def test_a_command(command: str, folder: Path) -> None:
    # The guide's torchrun is that of the Python which runs this test; the first imports torch as
    # at a user's.
    python = sys.executable if command == commands[0] else warm_python()
    done = pages.run(command, folder, python)
    assert done.returncode == 0, done.stderr
    assert re.search(WANTED[command.rsplit(maxsplit=1)[-1]], done.stdout), done.stdout
