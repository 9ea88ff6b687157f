"""Peers without engines, by both ways: all join, are in one group in each round, and leave."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.micro import directory
from lossycoll.plan.grid import fitting


@pytest.mark.parametrize(
    ("way", "sealed"),
    [
        ("tcp", True),
        ("valkey", False),
        pytest.param("tcp", False, marks=pytest.mark.long),
        pytest.param("valkey", True, marks=pytest.mark.long),
    ],
)
def test_a_row(way: str, sealed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "valkey" and not (shutil.which("valkey-server") or shutil.which("redis-server")):
        pytest.skip("neither valkey-server nor redis-server is installed")
    monkeypatch.setattr(directory, "SPREAD_SECONDS", 0.2)
    monkeypatch.setattr(directory, "REST_SECONDS", 0.2)
    found = dict(zip(directory.HEAD, directory.row(way, sealed, 40, 2, 2), strict=True))
    assert (found["peers"], found["transport"], found["sealed"]) == (
        "40",
        way,
        "yes" if sealed else "no",
    )
    least = fitting(40, 32).shape[0]
    assert least <= int(found["groups"]) <= 40 // 2
    assert float(found["its memory, MiB"]) > float(found["of it for the peers"]) >= 0
