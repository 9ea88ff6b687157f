"""Texts that are sealed one by one: values in a store, and messages of the control plane."""

from __future__ import annotations

import base64
import binascii
import contextlib
import secrets
from dataclasses import dataclass
from typing import Final

from lossycoll._native import ffi, lib
from lossycoll.errors import OptionError
from lossycoll.options import texts

from .secret import FILE_VARIABLE, VARIABLE, Secret

CIPHERS: Final = {name: number for number, name in enumerate(texts.CIPHERS, 1)}
TEXT_CIPHER: Final = "aes-256-gcm"
IV_BYTES: Final = 12
TAG_BYTES: Final[int] = lib.LC_TAG_BYTES
_SALT_BYTES: Final = 16
_MOST_BYTES: Final = 1 << 20
"""Longest value in the store that is opened; a stranger may have written it."""


def library(path: str = "") -> tuple[str, str]:
    """(version, "") of libcrypto, or ("", why there is none). ``path``: its file; empty: any."""
    with contextlib.suppress(ImportError):  # it may lie where the loader wouldn't look
        import _ssl  # noqa: F401
    why = lib.lc_crypto_load(path.encode())
    if why != ffi.NULL:
        return "", bytes(ffi.string(why)).decode(errors="replace")
    if not has_cipher(TEXT_CIPHER):
        return "", f"libcrypto's {TEXT_CIPHER} is missing, or gives wrong results"
    return bytes(ffi.string(lib.lc_crypto_version())).decode(), ""


def has_cipher(cipher: str) -> bool:
    """True if the library has it, and it seals and opens as it must."""
    return bool(lib.lc_crypto_has(CIPHERS[cipher]))


def check_library(path: str = "", cipher: str = TEXT_CIPHER) -> None:
    """Raises OptionError if nothing can be sealed here, though there is a secret."""
    _, why = library(path)
    if why and path:
        raise OptionError(f"libcrypto={path!r} can't be used: {why}")
    if why:
        raise OptionError(
            f"{VARIABLE} or {FILE_VARIABLE} is set, but nothing can be sealed: {why}; install "
            f"OpenSSL's library: libssl3 (Debian, Ubuntu) or openssl-libs (Fedora)"
        )
    if not has_cipher(cipher):
        found = [name for name in CIPHERS if has_cipher(name)]
        raise OptionError(f"cipher={cipher}: this machine's libcrypto has {' and '.join(found)}")


def seal(
    key: bytes, iv: bytes, text: bytes, known: bytes = b"", cipher: str = TEXT_CIPHER
) -> bytes:
    """``text`` sealed, its tag behind it."""
    number = CIPHERS[cipher]
    out = ffi.new("uint8_t[]", len(text) + TAG_BYTES)
    if lib.lc_text_seal(number, key, iv, known, len(known), text, len(text), out) != lib.LC_OK:
        raise OptionError("OpenSSL failed to seal a text")
    return bytes(ffi.buffer(out))


def open_sealed(key: bytes, iv: bytes, sealed: bytes, known: bytes = b"") -> bytes | None:
    """The text that :func:`seal` was given; None: it isn't what was sealed with this key."""
    if len(sealed) < TAG_BYTES:
        return None
    out = ffi.new("uint8_t[]", max(1, len(sealed) - TAG_BYTES))
    number = CIPHERS[TEXT_CIPHER]
    code = lib.lc_text_open(number, key, iv, known, len(known), sealed, len(sealed), out)
    return bytes(ffi.buffer(out, len(sealed) - TAG_BYTES)) if code == lib.LC_OK else None


@dataclass(frozen=True)
class SealedValues:
    """Values of a store that anybody may read and write. Each has a key of its own, drawn with it:
    a rank that starts again never uses one twice."""

    secret: Secret

    def seal(self, name: str, value: str) -> str:
        """``value`` as it may stand in the store under ``name``, and nowhere else."""
        salt = secrets.token_bytes(_SALT_BYTES)
        sealed = seal(self._key(salt), bytes(IV_BYTES), value.encode(), name.encode())
        return base64.b64encode(salt + sealed).decode()

    def open(self, name: str, found: str) -> str | None:
        """The value that was sealed; None if it wasn't, with this secret and under this name."""
        if len(found) > _MOST_BYTES:
            return None
        try:
            raw = base64.b64decode(found.encode(), validate=True)
        except (binascii.Error, ValueError):
            return None
        salt, sealed = raw[:_SALT_BYTES], raw[_SALT_BYTES:]
        text = open_sealed(self._key(salt), bytes(IV_BYTES), sealed, name.encode())
        return None if text is None else text.decode()

    def _key(self, salt: bytes) -> bytes:
        return self.secret.derived("value", salt.hex())
