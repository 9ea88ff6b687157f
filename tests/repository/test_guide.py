"""Every code block of docs/guide.md runs as it stands there, in order, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import warm_python

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"# (\w+\.py)\n")
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

blocks = BLOCK.findall(GUIDE.read_text())
scripts = {NAME.match(text)[1]: text for kind, text in blocks if kind == "python"}  # type: ignore[index]
commands = [line for kind, text in blocks if kind == "sh" for line in text.splitlines()]


def test_each_script_is_run_by_a_command_of_the_guide() -> None:
    assert {kind for kind, _ in blocks} == {"python", "sh"}
    assert set(scripts) == set(WANTED) == {command.split()[-1] for command in commands}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("guide")
    for name, text in scripts.items():
        (where / name).write_text(text)
    return where


@pytest.mark.parametrize("command", commands)
def test_a_command(command: str, folder: Path) -> None:
    # The guide's torchrun is that of the Python which runs this test; the first imports torch as
    # at a user's.
    python = sys.executable if command == commands[0] else warm_python()
    torchrun = f"{python} -m torch.distributed.run"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LOSSYCOLL_")}
    done = subprocess.run(
        command.replace("torchrun", f"{torchrun} --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0"),
        shell=True,
        cwd=folder,
        env={**environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(WANTED[command.rsplit(maxsplit=1)[-1]], done.stdout), done.stdout
