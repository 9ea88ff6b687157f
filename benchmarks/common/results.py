"""Results on disk: a line of JSON for each piece that is done, appended as it ends.

A line has ``key`` and ``settings`` (which piece it is), ``figures`` (what was measured), and
``date``, ``commit`` and ``machine`` ("" where they weren't noted).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
STUDIES = ROOT / "benchmarks" / "studies"

SomePiece = TypeVar("SomePiece", bound="Piece")


@dataclass(frozen=True)
class Piece:
    """What is measured at once, and kept as one line: a study's dataclass derives from it."""

    @property
    def settings(self) -> dict[str, Any]:
        """Its fields, as JSON has them."""
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return fields

    @property
    def key(self) -> str:
        """What tells it from all other pieces of its study."""
        return key_of(self.settings)

    @classmethod
    def of(cls: type[SomePiece], settings: Mapping[str, Any]) -> SomePiece:
        """The inverse of :attr:`settings`."""
        return cls(**settings)


@dataclass(frozen=True)
class Result:
    """What was measured of one piece, when, by which code and where."""

    settings: Mapping[str, Any]
    figures: Any
    date: str = ""
    commit: str = ""
    machine: str = ""

    @property
    def key(self) -> str:
        return key_of(self.settings)

    def line(self) -> str:
        """As the file of results has it."""
        return json.dumps({"key": self.key, **asdict(self)})


def key_of(settings: Mapping[str, Any]) -> str:
    """The values, in their order, between slashes."""
    return "/".join(map(_word, settings.values()))


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={_word(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ";".join(map(_word, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def load(path: Path) -> dict[str, Result]:
    """The results by key, the last of each; none where there is no file. A line that was cut off by
    a crash is left out."""
    found: dict[str, Result] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            entry = json.loads(line)
            entry.pop("key")
            result = Result(**entry)
            found[result.key] = result
    return found


def one_budget(entries: Iterable[Result]) -> dict[str, Any]:
    """The budget of all runs. Raises ValueError where they have several, or there are none."""
    budgets = {json.dumps(one.settings["budget"], sort_keys=True) for one in entries}
    if len(budgets) != 1:
        raise ValueError(f"runs of {len(budgets)} budgets, wanted one: {sorted(budgets)}")
    budget: dict[str, Any] = json.loads(*budgets)
    return budget


def append(path: Path, result: Result) -> None:
    """One more line, on a line of its own even where the last was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as lines:
        lines.write(("\n" if cut else "") + result.line() + "\n")


def today() -> str:
    """The date in UTC, as in 2026-11-22."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def machine() -> str:
    """Cores and architecture."""
    return f"{os.cpu_count()} cores, {platform.machine()}"


def commit(*paths: str) -> str:
    """The commit that is checked out, with "+" where the code differs from it: lossycoll, native,
    benchmarks/common and ``paths``. Results are no code: each that is added would change it for the
    next."""
    try:
        name = _git("rev-parse", "--short=10", "HEAD")
        results = ":(exclude,glob)benchmarks/**/*.jsonl"
        code = ("lossycoll", "native", "benchmarks/common", *paths, results)
        changed = _git("status", "--porcelain", "--", *code)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changed else "")


def source(*paths: str) -> dict[str, str]:
    """When, by which code (:func:`commit` of ``paths``) and where figures are taken."""
    return {"date": today(), "commit": commit(*paths), "machine": machine()}


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()
