"""The command that predicts a large job's control plane."""

from __future__ import annotations

import json

import pytest

from lossycoll.cli.main import main


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_says_when_all_know(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "control", "--ranks", "12", "--liveness", "2"]
    assert main([*arguments, *["--json"] * as_json]) == 0
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out)["ended"]["last"] < 0.1
    else:
        assert "coordinator of 12 ranks" in out
        assert "a host falls silent" in out
