"""What tells one machine from another; its cores and memory, by the files of control groups."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lossycoll.runtime.net import machine
from lossycoll.runtime.net.machine import (
    Machine,
    core_limit,
    core_mask,
    memory_room,
    this_machine,
)

NO_LIMIT = 0x7FFFFFFFFFFFF000
"""What version 1 says where there is none."""


def write(folder: Path, files: Mapping[str, object]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")


def system(
    root: Path, groups: str = "", files: Mapping[str, object] | None = None, *, available: int = 0
) -> tuple[Path, Path]:
    """A /proc with these control groups, and memory available in KiB; a place for their files."""
    proc, mounts = root / "proc", root / "cgroup"
    mounts.mkdir()
    write(proc, {"self/cgroup": groups} if groups else {})
    if available:
        write(proc, {"meminfo": f"MemTotal: 99 kB\nMemAvailable:   {available} kB\nOdd line"})
    write(mounts, files or {})
    return proc, mounts


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


def test_the_cores_are_those_that_the_process_may_run_on() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(before)})
        assert core_mask() == 1 << max(before)
    finally:
        os.sched_setaffinity(0, before)
    assert core_mask().bit_count() == len(before)


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/", {}, math.inf),
        ("0::/mine", {"mine/cpu.max": "max 100000"}, math.inf),
        ("0::/mine", {"mine/cpu.max": "150000 100000"}, 1.5),
        ("0::/jobs/mine", {"jobs/mine/cpu.max": "max 1", "jobs/cpu.max": "200 100"}, 2.0),
        ("0::/mine", {"unified/mine/cpu.max": "300 100"}, 3.0),
        ("0::/mine", {"mine/cpu.max": "nonsense"}, math.inf),
        ("0::/mine", {"mine/cpu.max": "100 0"}, math.inf),
        (
            "4:cpu,cpuacct:/mine",
            {"cpu/mine/cpu.cfs_quota_us": "250000", "cpu/mine/cpu.cfs_period_us": "100000"},
            2.5,
        ),
        (
            "4:cpu,cpuacct:/mine",
            {"cpu/mine/cpu.cfs_quota_us": "-1", "cpu/mine/cpu.cfs_period_us": "100000"},
            math.inf,
        ),
        ("4:cpuset:/mine", {"cpu/mine/cpu.cfs_quota_us": "1"}, math.inf),
    ],
)
def test_control_groups_limit_them(
    tmp_path: Path, groups: str, files: dict[str, str], limit: float
) -> None:
    assert core_limit(*system(tmp_path, groups, files)) == limit


def test_without_any_file_there_is_no_limit(tmp_path: Path) -> None:
    assert core_limit(tmp_path, tmp_path) == memory_room(tmp_path, tmp_path) == math.inf


def test_the_machines_memory_is_a_limit(tmp_path: Path) -> None:
    assert memory_room(*system(tmp_path, available=1000)) == 1000 * 1024


@pytest.mark.parametrize("folder", [".", "unified"])
def test_a_group_of_version_2(tmp_path: Path, folder: str) -> None:
    proc, mounts = system(tmp_path, "0::/jobs/mine", available=1000)
    stat = "anon 5\ninactive_file 20\nactive_file 3\nshmem 7"
    files = {"memory.max": 500, "memory.current": 400, "memory.stat": stat}
    write(mounts / folder / "jobs" / "mine", files)
    assert memory_room(proc, mounts) == 123


def test_the_groups_around_it_count_and_those_without_a_limit_dont(tmp_path: Path) -> None:
    proc, mounts = system(tmp_path, "0::/jobs/mine", available=1000)
    write(mounts / "jobs/mine", {"memory.max": "max", "memory.current": 400})
    write(mounts / "jobs", {"memory.max": 70, "memory.current": 60})
    assert memory_room(proc, mounts) == 10


def test_a_group_of_version_1(tmp_path: Path) -> None:
    groups = "9:cpu,cpuacct:/elsewhere\n4:memory:/mine"
    proc, mounts = system(tmp_path, groups, available=1000)
    none = {"memory.limit_in_bytes": NO_LIMIT, "memory.usage_in_bytes": 900}
    write(mounts / "memory", none)
    mine = {"memory.limit_in_bytes": 100, "memory.usage_in_bytes": 100}
    write(mounts / "memory" / "mine", mine | {"memory.stat": "total_inactive_file 8\ncache 50"})
    assert memory_room(proc, mounts) == 8


def test_a_group_that_uses_more_than_its_limit_has_no_room(tmp_path: Path) -> None:
    proc, mounts = system(tmp_path, "0::/", available=1000)
    write(mounts, {"memory.max": 100, "memory.current": 120})
    assert memory_room(proc, mounts) == 0


def test_this_machine_has_some() -> None:
    assert memory_room() > 1 << 20
