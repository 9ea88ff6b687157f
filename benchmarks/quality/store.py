"""Results on disk: a line of JSON for each run that is done, appended as it ends."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from .matrix import Run

ROOT = Path(__file__).resolve().parents[2]


def load(path: Path) -> dict[str, dict[str, Any]]:
    """The results by the key of their run. A line that was cut off by a crash is left out."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
            found[Run(**entry["run"]).key] = entry
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return found


def append(path: Path, run: Run, result: dict[str, Any], commit: str) -> dict[str, Any]:
    """Writes down a run that is done; returns the entry."""
    entry = {"run": run.as_dict(), "commit": commit, **result}
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as lines:
        lines.write(("\n" if cut else "") + json.dumps(entry) + "\n")
    return entry


def commit() -> str:
    """The commit that is checked out, with "+" where the code differs from it."""
    try:
        name = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--", "lossycoll", "native", "benchmarks/quality")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changed else "")


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()
