"""The command line: what it offers, and that it refuses what cannot work."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from lossycoll import arguments, cli

SCRIPT = Path(sys.executable).with_name("lossycoll")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("command", [[str(SCRIPT)], [sys.executable, "-m", "lossycoll.cli"]])
def test_version(command: list[str]) -> None:
    done = run(*command, "--version")
    assert (done.returncode, done.stdout.strip()) == (0, metadata.version("lossycoll"))


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("demo", "bench", "doctor"))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "COMMAND"),
        ("train", "train"),
        ("demo --loss 1", "'1' is not a number of at least 0 and below 1"),
        ("demo --loss -0.1", "-0.1"),
        ("demo --loss nan", "'nan' is not"),
        ("demo --loss much", "'much' is not"),
        ("demo --ranks 1", "'1' is not a whole number from 2"),
        ("demo --steps 0", "'0' is not"),
        ("demo --steps 2.5", "'2.5' is not"),
        ("demo --width 100", "multiple of 32"),
        ("demo --context 4", "'4' is not"),
        ("demo --burst 0.5", "'0.5' is not"),
        ("demo --runs gloo,nccl", "'nccl' is not one of gloo, clean, lossy"),
        ("demo --runs gloo,gloo", "twice"),
        ("bench --backend nccl", "'nccl' is not one of lossy, gloo"),
        ("bench --sizes 4k,big", "'big' is not a size"),
        ("bench --sizes 4", "'4' is not a size"),
        ("bench --disable warp", "'warp' is not one of"),
        ("bench --dtype int8", "int8"),
        ("bench --seconds inf", "'inf' is not"),
        ("doctor --fix", "--fix"),
    ],
)
def test_refuses(line: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_keyboard_interrupt_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.doctor, "run", interrupted)
    assert cli.main(["doctor"]) == 130


@pytest.mark.parametrize(
    ("loss", "burst", "text"),
    [
        (0.0, 8.0, None),
        (0.1, 1.0, "loss=0.1,seed=7"),
        (0.1, 8.0, "loss=0.1,burst=8,seed=7"),
    ],
)
def test_inject_text(loss: float, burst: float, text: str | None) -> None:
    assert arguments.inject_text(loss, burst, 7) == text
