"""``lossycoll simulate training``: what it prints and refuses."""

from __future__ import annotations

import inspect
import json

import pytest

from lossycoll.cli.main import EXIT_USAGE, main
from lossycoll.simulate.training import PERIOD
from lossycoll.train.drift.bound import DriftBound

SMALL = ["--bytes", "512k", "--network", "cross-dc", "--steps", "3", "--compute", "0.05"]


def test_json_has_a_step_for_each_of_those_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "--method", "sharded", "--micro-batches", "3", "--threshold", "0.1"]
    assert main(["simulate", "training", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["steps"]) == 3
    assert found["seconds"] > found["computing"] > 0.1
    assert found["seconds_p99"] >= found["seconds"]
    assert any(step["dropped"] > 0 for step in found["steps"])


def test_a_table_says_what_takes_most(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "training", *SMALL]) == 0
    assert "plain on cross-dc:" in capsys.readouterr().out


def test_a_death_wants_a_group_that_continues(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "training", *SMALL, "--death", "1"]) == EXIT_USAGE
    assert "on_peer_loss" in capsys.readouterr().err


def test_a_slice_is_as_large_as_the_method_makes_it() -> None:
    assert inspect.signature(DriftBound).parameters["period"].default == PERIOD
