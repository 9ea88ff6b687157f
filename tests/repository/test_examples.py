"""The examples, under torchrun and with 5% of packets dropped; each checks its own results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import warm_python

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import run as examples  # noqa: E402 (a script beside the examples, not a package)

HELPERS = {"common", "run"}
LAUNCHERS = {"rejoin"}
"""They start their ranks by themselves."""
OFTEN = "ddp"
"""The one of the short suite. Processes that import torch for themselves are the guide's."""


def case(example: examples.Example) -> Any:
    marks = () if example.name == OFTEN else pytest.mark.long
    return pytest.param(example, id=example.name, marks=marks)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", [case(example) for example in examples.EXAMPLES])
def test_example(example: examples.Example) -> None:
    if example.lacks:
        pytest.skip(example.lacks)
    outcome = examples.run(example, "lossy", timeout=240, python=warm_python())
    assert outcome.status == 0, outcome.output
    assert "terminate called" not in outcome.output
    assert "Traceback" not in outcome.output or example.name == "restart", outcome.output
    if example.name != "ddp":  # the smallest job doesn't count
        lost = re.search(r"(\d+) packets dropped", outcome.summary)
        assert lost, outcome.output
        assert int(lost[1]) > 0


def test_all_examples_are_run_and_in_the_table() -> None:
    names = {example.name for example in examples.EXAMPLES}
    assert names == {path.stem for path in (ROOT / "examples").glob("*.py")} - HELPERS - LAUNCHERS
    page = examples.PAGE.read_text(encoding="utf-8")
    for example in examples.EXAMPLES:
        row = rf"^\| \[{example.name}\].* \| {example.ranks} \| .* \| passes.* \|"
        assert re.search(row, page, re.MULTILINE), example.name


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(LAUNCHERS))
def test_launchers(name: str) -> None:
    env = {**os.environ, "LOSSYCOLL_LOG": "off", "LOSSYCOLL_INJECT": examples.INJECT}
    found = subprocess.run(
        [warm_python(), str(ROOT / "examples" / f"{name}.py")],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "ended by SIGKILL" in found.stdout
    assert "came back before step" in found.stdout
    lost = re.search(r"(\d+) packets dropped", found.stdout)
    assert lost, found.stdout
    assert int(lost[1]) > 0
    assert name in examples.PAGE.read_text(encoding="utf-8")
