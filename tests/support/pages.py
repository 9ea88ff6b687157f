"""The blocks of code of a page of the documentation, as tests run them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"# (\w+\.py)\n")


@cache
def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of each block of docs/``page``."""
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def scripts(page: str) -> dict[str, str]:
    """Its Python blocks, by the file name that each begins with."""
    return {NAME.match(text)[1]: text for kind, text in blocks(page) if kind == "python"}  # type: ignore[index]


def commands(page: str) -> list[str]:
    """The lines of its shell blocks."""
    return [line for kind, text in blocks(page) if kind == "sh" for line in text.splitlines()]


def write(page: str, folder: Path) -> Path:
    """Puts its scripts into ``folder``, which is returned."""
    for name, text in scripts(page).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def run(command: str, folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    """A command of a page in ``folder``, by ``python`` and its torchrun."""
    torchrun = f"{python} -m torch.distributed.run"
    torchrun += " --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0"
    for name, path in (("python", python), ("torchrun", torchrun)):
        command = re.sub(rf"(?<![\w/]){name} ", f"{path} ", command)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LOSSYCOLL_")}
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={**environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def load(page: str, name: str) -> ModuleType:
    """A script of a page as a module, which is made once in a process."""
    stem = name.removesuffix(".py")
    if stem not in sys.modules:
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(stem, None))  # type: ignore[arg-type]
        sys.modules[stem] = module
        exec(compile(scripts(page)[name], f"docs/{page}:{name}", "exec"), module.__dict__)
    return sys.modules[stem]
