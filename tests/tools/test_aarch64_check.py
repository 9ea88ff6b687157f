"""The check of a wheel for aarch64, without an emulator: what it would run."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from tools import aarch64_check
from tools.aarch64_check import CPUINFO, Machine
from tools.check_versions import StepFailed


def programs(folder: Path, **scripts: str) -> None:
    """Programs of a shell, in ``folder``."""
    for name, script in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_missing_programs_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["aarch64_check", "no.whl"])
    assert aarch64_check.main() == 2
    assert "qemu-user debootstrap" in capsys.readouterr().err


def test_the_files_are_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    programs(tmp_path, debootstrap=f'echo "$@" >> {calls}; mkdir -p {tmp_path}/bookworm/proc')
    for _ in range(2):
        Machine(tmp_path, "qemu").make(["mirror:"])
    (line,) = calls.read_text().splitlines()
    assert line.startswith("--foreign --arch=arm64 ")
    assert line.endswith(f" bookworm {tmp_path}/bookworm mirror:")
    about = (tmp_path / "bookworm" / "proc" / "cpuinfo").read_text()
    assert about.startswith(CPUINFO.format(0))


def test_both_ranks_must_end_well(tmp_path: Path) -> None:
    """An emulator that says what it was told to run."""
    programs(tmp_path, qemu='echo "$RANK of $WORLD_SIZE: $@"; exit 0')
    said = Machine(tmp_path, str(tmp_path / "qemu")).ranks(Path("job.py"), 2)
    assert {line[:6] for line in said.splitlines()} == {"0 of 2", "1 of 2"}
    assert said.endswith(f"-L {tmp_path}/bookworm {tmp_path}/bookworm/usr/bin/python3.11 job.py")
    programs(tmp_path, qemu="echo no; exit $RANK")
    with pytest.raises(StepFailed, match=r"ended with \[0, 1\].*\nno\nno"):
        Machine(tmp_path, str(tmp_path / "qemu")).ranks(Path("job.py"), 2)
