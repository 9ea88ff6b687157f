"""``lossycoll simulate``: what it prints, draws and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lossycoll.cli.main import EXIT_USAGE, main
from lossycoll.simulate.averaging import METHODS


def test_rounds_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--peers", "512", "--grid", "32x32", "--failure", "0.005", "--seeds", "40"]
    assert main(["simulate", "moshpit", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(METHODS)
    assert found["moshpit"] == {
        "1e-9": pytest.approx(8.8, abs=0.5),
        "1e-4": pytest.approx(3.9, abs=0.5),
    }


def test_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "rounds.png"
    arguments = ["--peers", "16", "--grid", "4x4", "--seeds", "2", "--picture", str(picture)]
    assert main(["simulate", "moshpit", *arguments]) == 0
    out = capsys.readouterr().out
    assert "moshpit" in out
    assert "50 +" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, why in (
        (["--peers", "17", "--grid", "4x4"], "17 peers don't fit into 4x4"),
        (["--picture", "rounds.jpg"], "not a .png"),
        (["--picture", str(tmp_path / "none" / "rounds.png")], "none/rounds.png"),
    ):
        assert main(["simulate", "moshpit", *arguments]) == EXIT_USAGE
        assert why in capsys.readouterr().err
