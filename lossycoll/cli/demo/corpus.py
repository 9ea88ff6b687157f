"""The demo's corpus: the source text of the Python standard library on this machine.

It is real text, it is on every machine that can run the demo, and nothing is downloaded.
"""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Installed packages are no part of the library; its tests are data tables more than text.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
VALIDATION_SHARE = 0.1
LEAST_BYTES = 200_000


class CorpusError(RuntimeError):
    """There is not enough text on this machine."""


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, uint8, and how many files it is from."""

    train: Tensor
    validation: Tensor
    train_files: int
    validation_files: int


def source_files(root: Path) -> list[Path]:
    """The library's own modules, in an order that does not depend on the file system."""
    return sorted(
        path
        for path in root.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1])
    )


def load(seed: int, root: Path | None = None) -> Corpus:
    """Splits by file: no validation text shares a file with what was trained on."""
    root = root or Path(sysconfig.get_path("stdlib"))
    files = source_files(root)
    random.Random(seed).shuffle(files)
    n_validation = round(len(files) * VALIDATION_SHARE)
    held_out, trained = files[:n_validation], files[n_validation:]
    validation = b"".join(path.read_bytes() for path in held_out)
    train = b"".join(path.read_bytes() for path in trained)
    if min(len(train), len(validation) / VALIDATION_SHARE) < LEAST_BYTES:
        raise CorpusError(
            f"only {len(train) + len(validation)} bytes of Python source under {root}: "
            "install the complete standard library (on Debian: apt install libpython3-stdlib)"
        )
    return Corpus(_tensor(train), _tensor(validation), len(trained), len(held_out))


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw(
    text: Tensor, batch: int, context: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """``batch`` windows of the text, and the same windows one byte further on."""
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator, device="cpu")
    windows = text[starts + torch.arange(context + 1, device="cpu")].long()
    return windows[:, :-1], windows[:, 1:]
