"""Texts that are sealed one by one."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lossycoll._native import ffi

from lossycoll.errors import OptionError
from lossycoll.runtime.keys import aead
from lossycoll.runtime.keys.secret import Secret

KEY = bytes(range(32))
IV = bytes(range(12))


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000, 1 << 20])
def test_a_text_is_opened_again_and_nothing_else_is(size: int) -> None:
    text, known = os.urandom(size), b"known"
    sealed = aead.seal(KEY, IV, text, known)
    assert len(sealed) == size + aead.TAG_BYTES
    assert aead.open_sealed(KEY, IV, sealed, known) == text
    for at in {0, size // 2, size, len(sealed) - 1}:
        changed = bytearray(sealed)
        changed[at] ^= 1
        assert aead.open_sealed(KEY, IV, bytes(changed), known) is None
    assert aead.open_sealed(KEY, IV, sealed[:-1], known) is None
    assert aead.open_sealed(KEY, IV, sealed + b"\0", known) is None
    assert aead.open_sealed(KEY, IV, sealed, b"other") is None
    assert aead.open_sealed(KEY, bytes(12), sealed, known) is None
    assert aead.open_sealed(bytes(32), IV, sealed, known) is None


def test_what_is_too_short_for_a_tag_is_no_text() -> None:
    for size in range(aead.TAG_BYTES):
        assert aead.open_sealed(KEY, IV, bytes(size)) is None


def test_a_value_opens_under_its_own_name_with_the_same_secret_alone() -> None:
    values = aead.SealedValues(Secret.of(b"x" * 16))
    sealed = values.seal("session/hello/1", "what was said: é")
    assert values.open("session/hello/1", sealed) == "what was said: é"
    assert values.open("session/hello/2", sealed) is None
    assert aead.SealedValues(Secret.of(b"y" * 16)).open("session/hello/1", sealed) is None
    assert sealed != values.seal("session/hello/1", "what was said: é")
    assert b"said" not in base64.b64decode(sealed)


@pytest.mark.parametrize("found", ["", "é", "AAAA", "not base64!", "0123456789abcdef", "A" * 40])
def test_what_is_no_sealed_value_does_not_open(found: str) -> None:
    assert aead.SealedValues(Secret.of(b"x" * 16)).open("name", found) is None


def test_without_a_library_a_secret_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    version, why = aead.library()
    assert "SSL" in version
    assert not why
    aead.check_library()

    class Without:
        @staticmethod
        def lc_crypto_load(path: bytes) -> object:
            return ffi.new("char[]", b"there is no libcrypto")

    monkeypatch.setattr(aead, "lib", Without)
    assert aead.library() == ("", "there is no libcrypto")
    with pytest.raises(OptionError, match=r"LOSSYCOLL_SECRET .* there is no libcrypto; .* libssl3"):
        aead.check_library()


def said(code: str, *arguments: str, **variables: str) -> list[str]:
    """What a new process prints, line by line."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    return done.stdout.split("\n")[:-1]


def used(*paths: str, **variables: str) -> list[str]:
    """What is said of each library in turn: "" if it can be used, or why not."""
    code = (
        "import sys\n"
        "from lossycoll.runtime.keys.aead import library\n"
        "for path in sys.argv[1:]: print(library(path)[1])\n"
    )
    return said(code, *paths, **variables)


def mapped(name: str) -> str:
    """The file of a library that this process uses."""
    aead.check_library()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in lines if f"/{name}." in line)


def test_a_library_is_used_that_an_option_names(tmp_path: Path) -> None:
    copy = str(shutil.copy(mapped("libcrypto"), tmp_path / "libcrypto.so"))
    assert used(copy, "", copy) == ["", "", ""]
    another = "this process uses another library already"
    assert used("", copy) == ["", another]
    missing, without, good = used(str(tmp_path / "none.so"), mapped("libc"), copy)
    assert "none.so: cannot open shared object file" in missing
    assert (without, good) == ("libcrypto lacks a function that is needed", "")
    aead.check_library()
    with pytest.raises(OptionError, match=f"libcrypto='{copy}' can't be used: {another}"):
        aead.check_library(copy)


@pytest.fixture(scope="module")
def liar(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that calls itself OpenSSL 99 and does what the variable LIE says."""
    library = tmp_path_factory.mktemp("liar") / "libcrypto.so"
    source = Path(__file__).with_name("lying_libcrypto.c")
    command = ["cc", "-shared", "-fPIC", "-w", str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return str(library)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("none", ""),
        ("hash", "libcrypto's HMAC gives wrong results"),
        ("text copied", "libcrypto's aes-256-gcm is missing, or gives wrong results"),
        ("header ignored", "libcrypto's aes-256-gcm is missing, or gives wrong results"),
        ("tag ignored", "libcrypto's aes-256-gcm is missing, or gives wrong results"),
        ("no chacha", ""),
    ],
)
def test_a_library_is_believed_by_what_it_does(lie: str, why: str, liar: str) -> None:
    assert used(liar, LIE=lie, REAL=mapped("libcrypto")) == [why]


def test_a_library_may_lack_a_cipher_that_is_not_used(liar: str) -> None:
    code = (
        "import sys\n"
        "from lossycoll.errors import OptionError\n"
        "from lossycoll.runtime.keys.aead import check_library\n"
        "check_library(sys.argv[1], 'aes-128-gcm')\n"
        "try: check_library(sys.argv[1], 'chacha20-poly1305')\n"
        "except OptionError as error: print(error)\n"
    )
    told = said(code, liar, LIE="no chacha", REAL=mapped("libcrypto"))
    assert told == [
        "cipher=chacha20-poly1305: this machine's libcrypto has aes-128-gcm and aes-256-gcm"
    ]
