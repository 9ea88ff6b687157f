"""Where the secret comes from, and what is derived from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lossycoll.errors import OptionError
from lossycoll.runtime.keys.secret import (
    KEY_BYTES,
    LEAST_BYTES,
    MOST_BYTES,
    Secret,
    find_secret,
    transcript,
)

TEXT = "a secret of some bytes"


def written(path: Path, text: str, mode: int = 0o600) -> dict[str, str]:
    path.write_text(text)
    path.chmod(mode)
    return {"LOSSYCOLL_SECRET_FILE": str(path)}


def test_the_variable_goes_before_the_file_and_without_both_there_is_none(tmp_path: Path) -> None:
    file = written(tmp_path / "secret", f"\n {TEXT}\n")
    assert find_secret({}) is None
    assert find_secret(file) == Secret.of(TEXT.encode())
    assert find_secret(file | {"LOSSYCOLL_SECRET": f"{TEXT}, another "}) == Secret.of(
        f"{TEXT}, another".encode()
    )


def test_the_process_s_own_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOSSYCOLL_SECRET", TEXT)
    assert find_secret() == Secret.of(TEXT.encode())


def test_a_secret_is_the_same_bytes_in_every_locale(tmp_path: Path) -> None:
    secret = "a secret of Zürich".encode()
    made = subprocess.run(
        ["localedef", "-i", "en_US", "-f", "ISO-8859-1", tmp_path / "latin"],
        capture_output=True,
        check=False,
    ) if shutil.which("localedef") else None  # fmt: skip
    if made is None or made.returncode:
        pytest.skip("this system makes no locale")
    code = (
        "import sys; from lossycoll.runtime.keys.secret import find_secret;"
        "print(sys.getfilesystemencoding(), find_secret().root.hex())"
    )
    for locale, encoding in (("C.UTF-8", "utf-8"), ("latin", "iso8859-1")):
        env = os.environb | {
            b"LOSSYCOLL_SECRET": secret,
            b"LOCPATH": os.fsencode(tmp_path),
            b"LC_ALL": locale.encode(),
            b"PYTHONUTF8": b"0",
        }
        there = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert there.stdout.split() == [encoding, Secret.of(secret).root.hex()]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(OptionError) as caught:
        find_secret(written(tmp_path / "secret", TEXT, mode))
    assert f"(mode {mode:04o}); chmod 600 {tmp_path / 'secret'}" in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(OptionError, match=f"LOSSYCOLL_SECRET_FILE is {path}, .*{why}"):
            find_secret({"LOSSYCOLL_SECRET_FILE": str(path)})


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(OptionError, match="which is no file"):
        find_secret({"LOSSYCOLL_SECRET_FILE": str(tmp_path / "pipe")})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "secret", TEXT)
    os.chown(tmp_path / "secret", 12345, -1)
    with pytest.raises(OptionError, match=r"belongs to another user \(12345\)"):
        find_secret(file)


def test_too_short_and_too_long_secrets_are_refused(tmp_path: Path) -> None:
    for size in (0, LEAST_BYTES - 1, MOST_BYTES + 1):
        wanted = f"has {size} bytes, but a secret has 16 to 4096; `lossycoll keygen` makes one"
        with pytest.raises(OptionError, match=wanted):
            find_secret({"LOSSYCOLL_SECRET": "x" * size})
        with pytest.raises(OptionError, match=wanted):
            find_secret(written(tmp_path / "secret", "x" * size))
    assert find_secret({"LOSSYCOLL_SECRET": "x" * LEAST_BYTES}) is not None
    assert find_secret(written(tmp_path / "secret", "x" * MOST_BYTES)) is not None


def test_a_secret_does_not_show_itself() -> None:
    secret = Secret.of(TEXT.encode())
    assert TEXT not in repr(secret)
    assert secret.root.hex() not in repr(secret)
    assert repr(secret.root) not in repr(secret)


def test_what_is_derived_is_hkdf() -> None:
    """By another program: ``openssl kdf -keylen 32 -kdfopt digest:SHA256 -kdfopt key:"a secret of
    some bytes" -kdfopt salt:"lossycoll 1" -kdfopt info:"link/a/0/1" HKDF``."""
    wanted = "9862310001c6b15a2cd9e1c2a28de791e2f134474470470182947b38f47a2d6f"
    assert Secret.of(TEXT.encode()).derived("link", "a", 0, 1).hex() == wanted


def test_both_ends_of_a_path_derive_the_same_and_no_two_directions_do() -> None:
    secret, world = Secret.of(TEXT.encode()), 5
    tables = [secret.path_secrets("meeting", rank, world) for rank in range(world)]

    def of(rank: int, other: int) -> tuple[bytes, bytes]:
        """What ``rank`` seals for ``other``, and opens of it."""
        at = 2 * KEY_BYTES * other
        return tables[rank][at : at + KEY_BYTES], tables[rank][at + KEY_BYTES : at + 2 * KEY_BYTES]

    pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
    assert all(of(a, b) == of(b, a)[::-1] for a, b in pairs)
    assert len({of(a, b)[0] for a, b in pairs}) == len(pairs)
    assert secret.path_secrets("another", 0, world) != tables[0]
    assert Secret.of(b"another secret..").path_secrets("meeting", 0, world) != tables[0]


def test_a_meeting_is_told_from_others_by_each_rank_s_nonce() -> None:
    nonces = [os.urandom(16).hex() for _ in range(4)]
    usual = transcript("0" * 16, nonces)
    assert usual == transcript("0" * 16, list(nonces))
    for rank in range(4):
        other = [*nonces[:rank], os.urandom(16).hex(), *nonces[rank + 1 :]]
        assert transcript("0" * 16, other) != usual
    assert transcript("1" * 16, nonces) != usual
    assert Secret.of(TEXT.encode()).filter(usual) < 1 << 16
