"""The command `lossycoll lab`: its help, and what it refuses."""

from __future__ import annotations

import pytest

from lossycoll.cli import main as cli


def test_the_help_says_that_a_link_is_one_direction(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["lab", "--help"])
    assert "1-0 is the way back" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("lab", "nothing to run; write a command after --"),
        ("lab --loss 2 -- true", "loss is 2.0"),
        ("lab --hosts 1 -- true", "hosts is 1"),
        ("lab --mtu 100 -- true", "mtu is 100"),
        ("lab verify --profile nowhere", "no profile is called 'nowhere'"),
        ("lab verify --link 0-0:loss=0.1", "two hosts that differ"),
        ("lab verify --link 0-1", "WHERE:NAME=N"),
        ("lab verify --port 7:up_mbit=1", "host is 7"),
        ("lab --wan loss=1% -- true", "there is one; set --sites"),
        ("lab --sites 2 --wan los=1% -- true", "neither links nor gateways have a los"),
        ("lab --sites 40 --hosts 2 -- true", "hosts is 2, wanted a whole number from 1 to 1"),
        ("lab --ranks 3,2,1 -- true", "wanted one number, or one for each of 2 hosts"),
        ("lab verify --file /nonexistent.json", "can't read the network"),
        ("lab verify --jitter-ms 3", "jitter_ms is 3.0"),
        ("lab --counters /dev/null/x -- true", "cannot write to /dev/null/x"),
    ],
)
def test_the_command_refuses(line: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("lossycoll lab: ")
    assert complaint in said
    assert said.count("\n") == 1
