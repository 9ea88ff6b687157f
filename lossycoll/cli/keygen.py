"""Make a secret, with which a job seals all that it sends (docs/sealing.md)."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from .answer import Unwritable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    how = (
        "write it to a new file that only its owner can read, for LOSSYCOLL_SECRET_FILE; "
        "without it, the secret is printed"
    )
    parser.add_argument("--to", type=Path, metavar="FILE", help=how)


def run(options: argparse.Namespace) -> int:
    if options.to is None:
        print(secrets.token_urlsafe(32))
        return 0
    try:
        descriptor = os.open(options.to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)  # whatever the umask
            file.write(f"{secrets.token_urlsafe(32)}\n")
    except OSError as error:
        raise Unwritable(f"can't write a new secret to {options.to}: {error.strerror}") from error
    print(f"wrote {options.to}; copy it to all machines, and set LOSSYCOLL_SECRET_FILE to its path")
    return 0
