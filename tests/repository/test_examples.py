"""The examples, under torchrun and with 5% of packets dropped; each checks its own results."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lossycoll.cli.launcher import on_one_machine
from tests.support.harness import free_port, warm_python
from tools import frameworks_table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import run as examples  # noqa: E402 (a script beside the examples, not a package)

HELPERS = {"common", "run"}
LAUNCHERS = {"rejoin"}
"""They start their ranks by themselves."""
FRAMEWORKS = {"torchft_manager": "torchft", "ray_fit": "ray"}
"""Launchers that belong to a package, and its name."""
SWARMS = {"swarm"}
"""Peers of a swarm, which are started one by one."""
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
    assert "Traceback" not in outcome.output or "--max-restarts" in example.arguments, (
        outcome.output
    )
    if example.name != "ddp":  # the smallest job doesn't count
        lost = re.search(r"(\d+) packets dropped", outcome.summary)
        assert lost, outcome.output
        assert int(lost[1]) > 0


def test_all_examples_are_run_and_in_the_table() -> None:
    names = {example.name for example in examples.EXAMPLES}
    assert names == {path.stem for path in (ROOT / "examples").glob("*.py")} - (
        HELPERS | LAUNCHERS | SWARMS | set(FRAMEWORKS)
    )
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


def launch(name: str, *arguments: str, python: str, **variables: str) -> str:
    """What a framework's launcher printed while 5% of the packets were dropped."""
    if importlib.util.find_spec(FRAMEWORKS[name]) is None:
        pytest.skip(f"{FRAMEWORKS[name]} isn't installed: pip install {FRAMEWORKS[name]}")
    env = {k: v for k, v in os.environ.items() if not k.startswith("LOSSYCOLL_")}
    env |= {k: v for k, v in on_one_machine().items() if v is not None}
    env |= {"LOSSYCOLL_LOG": "warning", "LOSSYCOLL_INJECT": examples.INJECT, **variables}
    found = subprocess.run(
        [python, str(ROOT / "examples" / f"{name}.py"), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.long
@pytest.mark.timeout(580)
@pytest.mark.parametrize("method", ["ddp", "diloco"])
def test_torchft_trains_while_replicas_are_killed(method: str) -> None:
    """Each replica's packets were dropped, and its loss fell: the example asserts it."""
    said = launch(
        "torchft_manager",
        "--method",
        method,
        python=sys.executable,
        KILLS="2",
        LOSSYCOLL_MTU="1500",
    )
    assert said.count("ended by SIGKILL") == 2, said
    assert f"torchft_manager: {method}, 2 kills, all came back" in said
    assert len(re.findall(r"replica \d: .* [1-9]\d* packets dropped", said)) == 3, said
    # Those that were killed have taken the state of one that lived.
    assert re.search(r"replica 1: went on from step [1-9]\d", said), said
    assert re.search(r"replica 2: went on from step [1-9]\d", said), said


@pytest.mark.long
@pytest.mark.timeout(580)
@pytest.mark.parametrize("method", ["ddp", "diloco"])
def test_torchft_gets_the_parameters_that_its_gloo_gives(method: str) -> None:
    """Two replicas, without loss and kill. Their task is learnt: the example asserts it.

    On a busy machine torchft over its gloo forms another quorum at times, and then has other
    parameters than in its other runs: so gloo may try again.
    """

    def run(backend: str) -> list[str]:
        said = launch(
            *("torchft_manager", "--replicas", "2", "--method", method, "--backend", backend),
            python=sys.executable,
            KILLS="0",
            LOSSYCOLL_INJECT="",
        )
        return sorted(re.findall(r"replica \d: .* (parameters #[0-9a-f]{12})", said))

    found = run("lossy")
    assert len(found) == 2
    assert any(run("gloo") == found for _ in range(3))


@pytest.mark.long
@pytest.mark.timeout(580)
def test_ray_starts_the_workers_again() -> None:
    said = launch("ray_fit", python=sys.executable)
    assert re.search(r"went on from step 10, .* [1-9]\d* packets dropped", said), said


@pytest.mark.long
@pytest.mark.timeout(580)
def test_ray_gets_the_parameters_that_gloo_gives() -> None:
    """Two workers, without loss and kill."""
    found = []
    for backend in ("gloo", "lossy"):
        said = launch(
            *("ray_fit", "--backend", backend),
            python=sys.executable,
            KILLS="0",
            LOSSYCOLL_INJECT="",
        )
        found += re.findall(r"went on from step 0, .* (parameters #[0-9a-f]{12})", said)
    assert len(found) == 2
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        *("accelerate_fit", "deepspeed_zero", "fabric_fit", "fsdp", "lightning_fit", "pipeline"),
        *("tensor_parallel", "transformers_fit", "trl_sft"),
    ],
)
def test_a_framework_gets_the_parameters_that_gloo_gives(name: str) -> None:
    """Groups of two ranks, without loss and kill: there is one order of sums, so hashes of all
    parameters agree."""
    (example,) = (one for one in examples.EXAMPLES if one.name == name)
    if example.lacks:
        pytest.skip(example.lacks)
    clean = dataclasses.replace(
        example, arguments=(), environment={**example.environment, "LOSSYCOLL_INJECT": ""}
    )
    found = []
    for backend in ("gloo", "lossy"):
        outcome = examples.run(clean, backend, timeout=280, python=warm_python())
        assert outcome.status == 0, outcome.output
        found += re.findall(r"parameters #[0-9a-f]{12}", outcome.summary)
    assert len(found) == 2
    assert found[0] == found[1]


def test_the_table_of_frameworks_has_the_versions_that_make_installs() -> None:
    text = frameworks_table.PAGE.read_text(encoding="utf-8")
    head, *rows = re.findall(r"^\| (.+) \|$", text.partition("\n\n```")[0], re.MULTILINE)
    assert head.startswith("framework | version | run on")
    days = {row.split(" | ")[2] for row in rows}
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", day) for day in days)
    assert len(rows) == len(frameworks_table.PACKAGES)
    (day,) = days
    assert frameworks_table.filled(text, frameworks_table.pins(), day) == text
    later = frameworks_table.filled(text, frameworks_table.pins(), "2099-01-01")
    assert later.count("| 2099-01-01 |") == len(rows)
    assert later.replace("2099-01-01", day) == text


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_swarm_of_examples(tmp_path: Path) -> None:
    """The second peer writes a checkpoint, is killed and comes back; the first one ends by itself,
    and so do all."""
    env = {**os.environ, "LOSSYCOLL_LOG": "off", "LOSSYCOLL_INJECT": examples.INJECT}
    place = f"127.0.0.1:{free_port()}"
    checkpoint = tmp_path / "swarm.pt"

    def start(*how: str) -> subprocess.Popen[str]:
        command = [warm_python(), str(ROOT / "examples" / "swarm.py"), "--steps", "300", *how]
        return subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def lines_until(peer: subprocess.Popen[str], said: str) -> list[str]:
        assert peer.stdout is not None
        lines: list[str] = []
        while not any(said in line for line in lines):
            line = peer.stdout.readline()
            assert line, lines
            lines.append(line)
        return lines

    joins = ("--join", place, "--checkpoint", str(checkpoint))
    started: list[subprocess.Popen[str]] = []
    try:
        started.append(first := start("--listen", place))
        lines_until(first, "round 1: 1 peers")
        started.append(second := start(*joins))
        lines_until(second, "took the state of 1 peer")
        for _ in range(2):  # it writes the checkpoint in between
            lines_until(second, "2 peers, mean of")
        second.kill()
        assert second.wait() < 0
        assert checkpoint.exists()
        started.append(again := start(*joins))
        said = again.communicate(timeout=120)[0]
        others = first.communicate(timeout=120)[0]
    finally:
        for peer in started:
            peer.kill()
            peer.wait()
    assert (again.returncode, first.returncode) == (0, 0), said + others
    assert f"went on from {checkpoint}" in said
    assert "took the state of 1 peer" in said
    losses = [float(loss) for loss in re.findall(r"step \d+, loss ([\d.]+)", others)]
    assert losses[-1] < losses[0] / 3, others
    assert "failed" not in others
    means = [float(mean) for mean in re.findall(r"2 peers, mean of ([\d.]+)", said + others)]
    assert 1 < sum(means) / len(means) < 2, means  # 5% is lost
