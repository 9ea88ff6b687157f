"""``lossycoll directory``: it serves peers until it is told to stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from lossycoll.cli.main import EXIT_FAILED, EXIT_USAGE, main
from lossycoll.errors import RendezvousError
from lossycoll.runtime.swarm import server
from lossycoll.runtime.swarm.directory_list import BEGIN_SECONDS
from lossycoll.runtime.swarm.swarm import Swarm

SECRET = "a secret of tests"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_peers_meet_there(number: signal.Signals) -> None:
    options = ["--grid", "2x2", "--new"]
    command = [sys.executable, "-m", "lossycoll.cli", "directory", "127.0.0.1:0", *options]
    with subprocess.Popen(
        command,
        env={**os.environ, "LOSSYCOLL_SECRET": SECRET},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        place = said.removeprefix("directory at ").removesuffix(", sealed\n")
        with (
            Swarm(join=[place], secret=SECRET, name="a") as one,
            Swarm(join=[place], secret=SECRET, name="b"),
        ):
            one.wait_for(2, 10.0)
        process.send_signal(number)
        assert process.wait(10) == 0


@pytest.mark.parametrize(("options", "waits"), [([], BEGIN_SECONDS), (["--new"], 0.0)])
def test_newcomers_wait_unless_the_swarm_is_new(
    options: list[str], waits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How: tests/runtime/swarm/test_newcomers.py."""
    given: list[float] = []

    def made(*rest: object, **how: Any) -> None:
        given.append(how["waits"])
        raise RendezvousError("enough")

    monkeypatch.setattr(server, "DirectoryServer", made)
    assert main(["directory", "127.0.0.1:0", *options]) == EXIT_FAILED
    assert given == [waits]


def test_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        for arguments, status, why in (
            (["7000"], EXIT_USAGE, "'7000' is no HOST:PORT"),
            (["127.0.0.1:0", "--grid", "x"], EXIT_USAGE, "as in 32x32"),
            (
                [place],
                EXIT_FAILED,
                f"no directory at {place}: Address already",
            ),
        ):
            assert main(["directory", *arguments]) == status
            assert why in capsys.readouterr().err
