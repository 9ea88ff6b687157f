"""The secret that all ranks of a job share: where it comes from, and what is derived from it."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lossycoll.errors import OptionError
from lossycoll.options.texts import SECRET_VARIABLES

VARIABLE, FILE_VARIABLE = SECRET_VARIABLES
LEAST_BYTES: Final = 16
MOST_BYTES: Final = 4096
KEY_BYTES: Final = 32
"""Bytes of everything that is derived."""
_SALT: Final = b"lossycoll 1"


@dataclass(frozen=True)
class Secret:
    """Keys derived from the secret of a job; the secret itself isn't kept."""

    root: bytes = field(repr=False)
    """HKDF's pseudorandom key (RFC 5869, section 2.2)."""

    @classmethod
    def of(cls, secret: bytes) -> Secret:
        return cls(hmac.digest(_SALT, secret, hashlib.sha256))

    def derived(self, *purpose: str | int) -> bytes:
        """``KEY_BYTES`` for one purpose: a name, and what tells it from others of this name.
        HKDF-Expand with SHA-256 (RFC 5869, section 2.3), of a single block."""
        info = "/".join(map(str, purpose)).encode()
        return hmac.digest(self.root, info + b"\1", hashlib.sha256)

    def path_secrets(self, meeting: str, process: int, processes: int) -> bytes:
        """Keys with which a process seals, and opens."""
        return b"".join(
            self.derived("link", meeting, sender, receiver)
            for other in range(processes)
            for sender, receiver in ((process, other), (other, process))
        )

    def filter(self, meeting: str) -> int:
        """16 bits by which strangers' packets are known before they are opened."""
        return int.from_bytes(self.derived("filter", meeting)[:2], "little")


def transcript(session: str, nonces: list[str]) -> str:
    """A digest of a meeting: as each rank's nonce is its own, no other meeting has the same."""
    return hashlib.sha256("/".join([session, *nonces]).encode()).hexdigest()


def find_secret(environ: Mapping[str, str] | None = None) -> Secret | None:
    """The secret of ``LOSSYCOLL_SECRET``, or ``LOSSYCOLL_SECRET_FILE``; None: neither is set."""
    environ = os.environ if environ is None else environ
    if VARIABLE in environ:
        # Its bytes, as a file's: in another locale they would be another text.
        return _checked(os.fsencode(environ[VARIABLE]), VARIABLE)
    if FILE_VARIABLE in environ:
        path = environ[FILE_VARIABLE]
        return _checked(_read(path), f"{FILE_VARIABLE} ({path})")
    return None


def secret_of(text: str) -> Secret:
    return _checked(text.encode(errors="surrogateescape"), "the secret")


def _checked(secret: bytes, where: str) -> Secret:
    secret = secret.strip()
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        raise OptionError(
            f"{where} has {len(secret)} bytes, but a secret has {LEAST_BYTES} to {MOST_BYTES}; "
            f"`lossycoll keygen` makes one"
        )
    return Secret.of(secret)


def _read(path: str) -> bytes:
    try:
        # A pipe that nobody writes to would block here.
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            found = os.fstat(file.fileno())
            mode = stat.S_IMODE(found.st_mode)
            if not stat.S_ISREG(found.st_mode):
                why = "is no file"
            elif found.st_uid not in (0, os.geteuid()):
                user = os.geteuid()
                why = f"belongs to another user ({found.st_uid}); this process runs as {user}"
            elif mode & 0o077:
                why = f"others than its owner may use (mode {mode:04o}); chmod 600 {path}"
            else:
                return file.read(MOST_BYTES + 2)
    except OSError as error:
        why = f"can't be read: {error.strerror}"
    raise OptionError(f"{FILE_VARIABLE} is {path}, which {why}")
