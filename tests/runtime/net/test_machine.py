"""What tells one machine from another, and how a rank says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lossycoll.runtime.net import machine
from lossycoll.runtime.net.machine import Machine, this_machine


def test_a_process_says_always_the_same_and_the_other_end_understands() -> None:
    mine = this_machine()
    assert mine == this_machine()
    assert len(mine.boot) == 36
    assert Machine.from_json(json.loads(json.dumps(mine.to_json()))) == mine


@pytest.mark.parametrize("field", ["boot", "network", "users", "user"])
def test_machines_differ_where_one_thing_does(
    field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = this_machine()
    if field == "boot":
        (tmp_path / "boot_id").write_text("another\n")
        monkeypatch.setattr(machine, "BOOT_ID", tmp_path / "boot_id")
    elif field == "user":
        monkeypatch.setattr(machine.os, "geteuid", lambda: mine.user + 1)
    else:
        for name in ("net", "user"):
            other = {"network": "net", "users": "user"}[field] == name
            (tmp_path / name).symlink_to(tmp_path if other else f"/proc/self/ns/{name}")
        monkeypatch.setattr(machine, "NAMESPACES", tmp_path)
    other_one = this_machine()
    assert getattr(other_one, field) != getattr(mine, field)
    assert other_one != mine


@pytest.mark.parametrize("said", [None, 7, "abcd", [], ["b", 1, 2], ["b", 1, "2", 3], [1, 2, 3, 4]])
def test_what_is_no_machine_is_none(said: Any) -> None:
    assert Machine.from_json(said) is None
