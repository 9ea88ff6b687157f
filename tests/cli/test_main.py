"""The command line: what it offers, and that it refuses what cannot work."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from lossycoll.cli import answer, argtypes, launcher
from lossycoll.cli import main as cli

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
    assert all(
        name in text
        for name in (
            "demo",
            "bench",
            "doctor",
            "lab",
            "try",
            "plan-threshold",
            "simulate",
            "directory",
        )
    )


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "usage: lossycoll COMMAND [OPTIONS], where COMMAND is one of demo, bench"),
        ("train", "train"),
        ("demoo", "; did you mean demo?"),
        ("bench --seconsd 3", "unrecognized arguments: --seconsd 3; did you mean --seconds?"),
        ("demo --loss 1", "'1' is not a share of at least 0 and below 1, as in 0.01 or 1%"),
        ("demo --loss 100%", "'100%' is not a share"),
        ("demo --loss 1%%", "'1%%' is not a share"),
        ("demo --loss 1%x", "'1%x' is not a share"),
        ("demo --loss -0.1", "-0.1"),
        ("demo --loss -1%", "'-1%' is not a share"),
        ("bench --sizes -4k", "'-4k' is not a size"),
        ("lab --timeout -1 -- true", "'-1' is not a number of at least 0"),
        ("lab --grace -1s -- true", "'-1s' is not a number"),
        ("lab verify --mbit -inf", "'-inf' is not a number"),
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
        ("bench --backend mpi", "'mpi' is not one of lossy, nccl, gloo"),
        ("bench --losses 0.1,0.1", "doesn't rise"),
        ("bench --sizes 4k,big", "'big' is not a size"),
        ("bench --sizes 4", "'4' is not a size"),
        ("bench --disable warp", "'warp' is not one of"),
        ("bench --dtype int8", "int8"),
        ("bench --seconds inf", "'inf' is not"),
        ("doctor --fix", "--fix"),
        ("doctor --peer h:99999", "'h:99999' is no HOST:PORT"),
        (
            "lab python train.py",
            "'python' is not one of run, verify, check, clean, profiles; a comm",
        ),
        ("lab --hosts 2 python train.py", "goes after --: lossycoll lab [OPTIONS] -- python ..."),
        ("lab run python train.py", "arguments: python train.py; a command to run goes after --"),
        ("lab run python --lr 1", "arguments: python --lr 1; a command to run goes after --"),
        ("lab --hosts 2 --bad 1 -- python", "unrecognized arguments: --bad"),
        ("lab --hots 2 -- python", "unrecognized arguments: --hots; did you mean --hosts?"),
        ("try --los 1%,5%x -- true", "'5%x' is not"),
        ("try --ranka=3 -- true", "unrecognized arguments: --ranka; did you mean --ranks?"),
        ("try --loss 0.1,0 -- true", "doesn't rise"),
        ("try --loss 1 -- true", "'1' is not"),
        ("try --seeds 0 -- true", "'0' is not"),
        ("plan-threshold", "times"),
        ("simulate", "what"),
        ("directory", "HOST:PORT"),
        ("simulate moshpit --grid 3y3", "'3y3' is no grid; as in 32x32"),
        ("simulate moshpit --grid 0x3", "a grid of 0x3: wanted at least one axis"),
        ("simulate moshpit --failure 1", "'1' is not a share of at least 0 and below 1"),
        ("plan-threshold t.json --workers 0", "'0' is not a whole number from 1 to 16384"),
        ("plan-threshold t.json --drop-rate 1", "'1' is not a share of at least 0 and below 1"),
        ("plan-threshold t.json --cut late", "'late'"),
    ],
)
def test_refuses(line: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 2


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("demo --loss 1%", "loss", 0.01),
        ("demo --loss 12.5%", "loss", 0.125),
        ("bench --loss 0.1", "loss", 0.1),
        ("bench --losses 0,1%,0.05", "losses", (0.0, 0.01, 0.05)),
        ("try --loss 0%,5%", "losses", (0.0, 0.05)),
        ("simulate moshpit --failure 1%", "failure", 0.01),
        ("plan-threshold t.json --drop-rate 10%", "drop_rate", 0.1),
        ("doctor --peer [fd00::2]", "peer", "fd00::2"),
        ("doctor --peer fd00::2", "peer", "fd00::2"),
    ],
)
def test_a_value_is_read_as_people_write_it(line: str, name: str, value: object) -> None:
    assert getattr(cli.parser().parse_args(line.split()), name) == value


def test_no_help_shows_markup(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], *([command] for command in cli.COMMANDS)):
        with pytest.raises(SystemExit):
            cli.main([*words, "--help"])
    said = capsys.readouterr().out
    assert "demo" in said
    assert "`" not in said


def test_keyboard_interrupt_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("lossycoll.cli.doctor.command.run", interrupted)
    assert cli.main(["doctor"]) == 130


def test_a_reader_that_has_had_enough_ends_a_command_in_silence() -> None:
    """As ``lossycoll status | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lossycoll.cli", "status", "--json"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(writer)
    assert ended.stderr == b""
    assert ended.returncode == cli.EXIT_UNREAD


@pytest.mark.parametrize("command", ["demo", "bench"])
@pytest.mark.parametrize("place", ["/dev/null/results", "a-folder/demo.json"])
def test_refuses_a_place_that_cannot_be_written_before_it_starts(
    command: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launcher, "run_ranks", started)
    # A folder where the file is to go; demo names the folder, bench the file.
    (tmp_path / "a-folder" / "demo.json").mkdir(parents=True)
    out = tmp_path / place
    out = out.parent if command == "demo" and out.is_dir() else out
    assert cli.main([command, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"lossycoll {command}: cannot write to {out}")
    assert said.count("\n") == 1


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("{}")
    answer.must_be_writable(old)
    answer.must_be_writable(tmp_path / "new" / "new.json", make_folder=True)
    assert old.read_text() == "{}"
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("error", "status"),
    [(launcher.LaunchError, 1), (launcher.Interrupted, 130), (answer.Unwritable, 2)],
)
def test_errors_are_exit_codes(
    error: type[Exception],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(_: object) -> int:
        raise error("[bold]rank 1[/] failed")

    monkeypatch.setattr("lossycoll.cli.bench.command.run", failing)
    assert cli.main(["bench"]) == status
    assert capsys.readouterr().err == "lossycoll bench: [bold]rank 1[/] failed\n"


@pytest.mark.parametrize(
    ("loss", "burst", "text"),
    [
        (0.0, 8.0, None),
        (0.1, 1.0, "loss=0.1,seed=7"),
        (0.1, 8.0, "loss=0.1,burst=8,seed=7"),
    ],
)
def test_inject_text(loss: float, burst: float, text: str | None) -> None:
    assert argtypes.inject_text(loss, burst, 7) == text


def test_inject_text_of_links() -> None:
    links = {(0, 1): 0.3, (2, 1): 0.0}
    text = argtypes.inject_text(0.1, 8, 7, links)
    assert text == "loss=0.1,link=0-1:0.3,link=2-1:0,burst=8,seed=7"
    assert argtypes.inject_text(0, 1, 7, links) == "link=0-1:0.3,link=2-1:0,seed=7"
