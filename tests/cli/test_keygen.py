"""A new secret, printed or in a file of its own."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lossycoll.cli.main import EXIT_USAGE, main
from lossycoll.runtime.keys.secret import find_secret


def test_a_secret_is_printed_that_can_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for _ in range(2):
        assert main(["keygen"]) == 0
        printed.append(capsys.readouterr().out.strip())
    assert printed[0] != printed[1]
    assert find_secret({"LOSSYCOLL_SECRET": printed[0]}) is not None


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_a_file_is_its_owner_s_alone_whatever_the_umask(
    umask: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, before = tmp_path / "secret", os.umask(umask)
    try:
        assert main(["keygen", "--to", str(file)]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert find_secret({"LOSSYCOLL_SECRET_FILE": str(file)}) is not None
    said = capsys.readouterr().out
    assert "LOSSYCOLL_SECRET_FILE" in said
    assert file.read_text().strip() not in said


def test_a_file_that_is_there_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "secret"
    file.write_text("precious")
    for path in (file, tmp_path / "none" / "secret"):
        assert main(["keygen", "--to", str(path)]) == EXIT_USAGE
        assert f"can't write a new secret to {path}" in capsys.readouterr().err
    assert file.read_text() == "precious"
