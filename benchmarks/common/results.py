"""Results on disk: a line of JSON for each run that is done, appended as it ends."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.studies.quality.matrix import Run

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]


def load(path: Path) -> dict[str, dict[str, Any]]:
    """The results by the key of their run. A line that was cut off by a crash is left out."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries(path):
        with contextlib.suppress(KeyError, TypeError):
            found[Run(**entry["run"]).key] = entry
    return found


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """What each line of a file of results says; nothing where there is no file. A line that was cut
    off by a crash is left out."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def in_time(pieces: Iterable[T], minutes: float) -> Iterator[T]:
    """``pieces`` until so many minutes have passed, none of which is begun later; 0: all."""
    begin = time.monotonic()
    for piece in pieces:
        if minutes and time.monotonic() - begin > 60 * minutes:
            return
        yield piece


def append(path: Path, run: Run, result: dict[str, Any], commit: str) -> dict[str, Any]:
    """Writes down a run that is done, with the day and the machine; returns the entry."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    entry = {"run": run.as_dict(), "commit": commit, "date": day, "machine": machine, **result}
    append_entry(path, entry)
    return entry


def append_entry(path: Path, entry: dict[str, Any]) -> None:
    """One more line of a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as lines:
        lines.write(("\n" if cut else "") + json.dumps(entry) + "\n")


def commit(benchmark: str = "studies/quality", *others: str) -> str:
    """The commit that is checked out, with "+" where the code differs from it, the benchmark's
    included: its folder or file in benchmarks, and ``others`` by their paths. Results are no code:
    each that is added would change it for the next."""
    try:
        name = _git("rev-parse", "--short=10", "HEAD")
        results = ":(exclude,glob)benchmarks/**/*.jsonl"
        paths = ("lossycoll", "native", f"benchmarks/{benchmark}", *others, results)
        changed = _git("status", "--porcelain", "--", *paths)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changed else "")


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()
