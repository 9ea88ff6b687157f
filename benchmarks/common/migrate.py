"""Brings results of before the common format into it: ``python -m benchmarks.common.migrate``.

Rewrites every ``benchmarks/studies/*/results.jsonl`` whose lines are of the old formats, and makes
those of the studies that kept their results in docs/*.json alone. Lines in the format stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.results import ROOT, STUDIES, Result

DOCS = ROOT / "docs"
NOTED = ("date", "commit", "machine")
SETTINGS = ("run", "job", "cell")
"""What the settings of a piece were called."""
RENAMED = {"arm": "variant", "way": "variant", "ways": "variants"}


def migrated(entry: dict[str, Any]) -> Result:
    """A line of an old format."""
    (name,) = (name for name in SETTINGS if name in entry)
    rest = {key: value for key, value in entry.items() if key not in (name, *NOTED)}
    figures = rest["found"] if set(rest) <= {"found", "took"} else rest
    noted = {key: entry[key] for key in NOTED if key in entry}
    return Result(renamed(entry[name]), renamed(figures), **noted)


def renamed(value: Any) -> Any:
    """The same with today's names of what is in it."""
    if isinstance(value, dict):
        return {RENAMED.get(name, name): renamed(one) for name, one in value.items()}
    return [renamed(one) for one in value] if isinstance(value, list) else value


def lines(path: Path) -> Iterator[Result]:
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "settings" in entry:
            entry.pop("key")
            yield Result(**entry)
        else:
            yield migrated(entry)


def fec(found: dict[str, Any]) -> Iterator[Result]:
    for row in found["residual"]["rows"]:
        settings = {"part": "residual", "variant": row["arm"], **_of(row, "loss", "burst")}
        figures = {key: value for key, value in row.items() if key not in ("arm", "loss", "burst")}
        yield Result(settings, figures, commit=found["residual"]["commit"])
    lab = {"part": "lab", "variant": "all", "loss": 0.01, "burst": 1}
    yield Result(lab, found["lab"]["arms"], commit=found["lab"]["commit"])


def fairness(found: dict[str, Any]) -> Iterator[Result]:
    for row in found["contests"]:
        figures = _of(row, "samples", "queue_drops")
        yield Result(_of(row, "beside", "loss"), figures, commit=found["commit"])


def deadlines(found: list[dict[str, Any]]) -> Iterator[Result]:
    for row in found:
        figures = {key: value for key, value in row.items() if key not in ("scenario", "commit")}
        yield Result(_of(row, "scenario"), figures, commit=row["commit"])


def _of(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names}


FROM_DOCS: dict[str, tuple[str, Callable[[Any], Iterator[Result]]]] = {
    "fec": ("fec.json", fec),
    "fairness": ("sharing.json", fairness),
    "deadlines": ("deadlines.json", deadlines),
}


def main() -> None:
    for path in sorted(STUDIES.glob("*/results.jsonl")):
        _write(path, list(lines(path)))
    for study, (name, read) in FROM_DOCS.items():
        path = STUDIES / study / "results.jsonl"
        if not path.exists() and (DOCS / name).exists():
            found = json.loads((DOCS / name).read_text(encoding="utf-8"))
            _write(path, list(read(found)))


def _write(path: Path, results: list[Result]) -> None:
    path.write_text("".join(f"{one.line()}\n" for one in results), encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(results)} results")


if __name__ == "__main__":
    main()
