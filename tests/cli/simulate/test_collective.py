"""``lossycoll simulate collective``: what it prints, draws and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lossycoll.cli.main import EXIT_USAGE, main

SMALL = ["--bytes", "256k", "--network", "cross-dc", "--calls", "3"]


def test_json_has_the_figures_of_one_network(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "--hosts", "3", "--ranks-per-host", "2", "--loss", "2%", "--json"]
    assert main(["simulate", "collective", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] > found["limit_seconds"] - 0.01 > 0
    assert found["dropped"]["network"] > 0
    assert found["network_bytes"] > found["host_packets"] > 0
    assert found["site_bytes"] == found["site_packets"] == 0  # one site
    assert len(found["calls"]) == 3


def test_a_sweep_has_a_row_and_a_picture_for_each_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "sweep.png"
    arguments = [*SMALL, "--sweep", "hosts=2:4", "--picture", str(picture), "--json"]
    assert main(["simulate", "collective", *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["hosts"] for row in rows] == [2, 4]
    assert rows[1]["network_bytes"] > 2 * rows[0]["network_bytes"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_network_s_numbers_are_swept_and_options_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--sweep", "loss=0,5%", "--option", "delivery=reliable"]
    assert main(["simulate", "collective", *SMALL, *arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["loss"] for row in rows] == [0, 0.05]
    assert [row["resent"] > 0 for row in rows] == [False, True]
    assert all(row["missing"] == 0 for row in rows)


def test_a_few_hosts_stand_for_many(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--bytes", "1M", "--hosts", "96", "--network", "cross-dc", "--calls", "1"]
    assert main(["simulate", "collective", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["hosts"], found["hosts_simulated"]) == (96, 8)
    low, high = found["seconds_interval"]
    assert low < found["seconds"] < high
    assert main(["simulate", "collective", *arguments]) == 0
    assert "96 hosts: 8 were simulated and stand for all" in capsys.readouterr().out


def test_ranks_that_wake_late_take_longer(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for late in ("0.01", "20"):
        arguments = [*SMALL, "--up-mbit", "100", "--down-mbit", "100", "--wake-ms", late, "--json"]
        assert main(["simulate", "collective", *arguments]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["seconds"])
    assert seconds[1] > 1.5 * seconds[0]


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "collective", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "all_reduce of 0.25 MiB on cross-dc" in out
    assert "missing" in out


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, why in (
        (["--network", "cross-cd"], "did you mean cross-dc?"),
        (["--option", "repair"], "wanted NAME=VALUE"),
        (["--option", "repaid=1"], "did you mean repair?"),
        (["--sweep", "hots=2:4"], "NAME one of hosts"),
        (["--sweep", "hosts=4:2"], "wanted A above 0, and B no less"),
        (["--sweep", "bytes=1x"], "'1x' is not a size"),
        (["--sweep", "rate_mbit=10:inf"], "rate_mbit is 'inf', wanted a finite number"),
        (["--sweep", "rate_mbit=none:10"], "wanted A above 0, and B no less"),
        (["--picture", "a.png"], "--picture draws a sweep"),
    ):
        assert main(["simulate", "collective", *arguments]) == EXIT_USAGE
        assert why in capsys.readouterr().err
