"""The benchmark of ARC-Top-K: its pieces, and what its report says of figures it is given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is beside tests/

from benchmarks.studies.arc_topk import report
from benchmarks.studies.arc_topk.cells import Cell, cells
from benchmarks.studies.arc_topk.speed import share
from benchmarks.studies.arc_topk.variants import NONE_WAYS, RULE_WAYS, STEP_WAYS, TRAIN_WAYS, WAYS


def test_every_piece_is_there_once_and_comes_back_from_json() -> None:
    found = list(cells())
    assert len(set(found)) == len(found)
    for cell in found:
        assert Cell.of(json.loads(json.dumps(cell.as_dict()))) == cell
        assert set(cell.ways) <= set(WAYS)
        assert ("LOSSYCOLL_INJECT" in cell.environment) == (cell.loss > 0)
    assert {*STEP_WAYS, *TRAIN_WAYS, *RULE_WAYS, *NONE_WAYS} <= set(WAYS)


def test_shares_of_the_bytes() -> None:
    shapes = [(1024, 1024)]
    assert share("ARC 0.2, ef14", shapes) == pytest.approx(0.2 + 4 / 1024)
    assert share("PowerSGD 4", shapes) == pytest.approx(8 / 1024)
    assert share("Rand-K 0.2, ef14", shapes) == 0.2
    assert share("Top-K 0.05, ef14", shapes) == pytest.approx(0.2)


def curve(end: float, seconds: float) -> list[list[float]]:
    return [[0, 0.0, 0, 4.0, 0.1], [60, seconds / 2, 1e6, 3.0, 0.5], [120, seconds, 2e6, end, 0.9]]


def test_the_report(tmp_path: Path) -> None:
    steps = {
        way: {"seconds": [0.1 * (i + 1), 0.2 * (i + 1)], "bytes": [1e6, 1e6]}
        for i, way in enumerate(STEP_WAYS)
    }
    train = {way: curve(2.0 + 0.2 * i, 20.0 + i) for i, way in enumerate(TRAIN_WAYS)}
    speed = [{"model": "m", "way": "ARC 0.2, ef14", "ms_per_mb": 1.0, "share": 0.2}]
    forms = [
        {"kind": "conv", "form": "first dimension", "sketch_dim": d, "budget": 0.1, "kept": d / 10}
        for d in (1, 4)
    ]
    entries: list[dict[str, Any]] = [
        {"cell": cell.as_dict(), "commit": "abc", "found": found}
        for cell, found in (
            (Cell("speed"), speed),
            (Cell("forms"), forms),
            (Cell("steps", STEP_WAYS, 100.0), steps),
            (Cell("train", TRAIN_WAYS, 100.0, 0.0, "gpt"), train),
            (Cell("train", RULE_WAYS, 100.0, 0.1, "gpt"), {RULE_WAYS[0]: curve(2.5, 9.0)}),
        )
    ]
    page = tmp_path / "arc_topk.md"
    names = report.tables(entries)
    page.write_text("".join(f"<!-- arc-{n}: begin -->\n<!-- arc-{n}: end -->\n" for n in names))
    report.write(entries, tmp_path)
    text = page.read_text()
    assert "| first dimension | 0.400 (r=4) | - |" in text
    assert "| ARC 0.2, ef14 | 1.00 | 96 | 10 |" in text  # 12 Mbit of 15 saved per MB
    assert "| dense, gloo | 150 (100) | 1.0x | - | - | 1.00 |" in text
    assert f"| {STEP_WAYS[1]} | 300 (200) | 0.5x |" in text
    # The goal is 5% above the dense lossy run's 2.2: dense gloo is there at 2.31 of 3.0 to 2.0.
    assert "| dense, gloo | 2.0000 | 20.0 | 16.9 | 2.0 |" in text
    assert f"| {TRAIN_WAYS[-1]} | 3.2000 | 26.0 | not reached | 2.0 |" in text
    assert f"| {RULE_WAYS[0]} | 2.5000 |" in text
    assert (tmp_path / "arc_topk-training.png").stat().st_size > 0
    assert (tmp_path / "arc_topk-steps.png").stat().st_size > 0
    assert len(json.loads((tmp_path / "arc_topk.json").read_text())["entries"]) == 5
