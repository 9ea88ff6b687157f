"""How much memory is free, by the files of the kernel: both versions of control groups."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lossycoll.runtime.net.control_groups import memory_room

NO_LIMIT = 0x7FFFFFFFFFFFF000
"""What version 1 says where there is none."""


def write(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def system(root: Path, *, groups: str = "", available: int | None = None) -> tuple[Path, Path]:
    """A /proc with these control groups, and memory available in KiB; a place for their files."""
    proc, mounts = root / "proc", root / "cgroup"
    write(proc / "self", {"cgroup": groups} if groups else {})
    if available is not None:
        write(proc, {"meminfo": f"MemTotal: 99 kB\nMemAvailable:   {available} kB\nOdd line"})
    mounts.mkdir()
    return proc, mounts


def test_without_any_file_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_room(*system(tmp_path)) == math.inf


def test_the_machines_memory_is_a_limit(tmp_path: Path) -> None:
    assert memory_room(*system(tmp_path, available=1000)) == 1000 * 1024


@pytest.mark.parametrize("folder", [".", "unified"])
def test_a_group_of_version_2(tmp_path: Path, folder: str) -> None:
    proc, mounts = system(tmp_path, groups="0::/jobs/mine", available=1000)
    stat = "anon 5\ninactive_file 20\nactive_file 3\nshmem 7"
    files = {"memory.max": 500, "memory.current": 400, "memory.stat": stat}
    write(mounts / folder / "jobs" / "mine", files)
    assert memory_room(proc, mounts) == 123


def test_the_groups_around_it_count_and_those_without_a_limit_dont(tmp_path: Path) -> None:
    proc, mounts = system(tmp_path, groups="0::/jobs/mine", available=1000)
    write(mounts / "jobs/mine", {"memory.max": "max", "memory.current": 400})
    write(mounts / "jobs", {"memory.max": 70, "memory.current": 60})
    assert memory_room(proc, mounts) == 10


def test_a_group_of_version_1(tmp_path: Path) -> None:
    groups = "9:cpu,cpuacct:/elsewhere\n4:memory:/mine"
    proc, mounts = system(tmp_path, groups=groups, available=1000)
    none = {"memory.limit_in_bytes": NO_LIMIT, "memory.usage_in_bytes": 900}
    write(mounts / "memory", none)
    mine = {"memory.limit_in_bytes": 100, "memory.usage_in_bytes": 100}
    write(mounts / "memory" / "mine", mine | {"memory.stat": "total_inactive_file 8\ncache 50"})
    assert memory_room(proc, mounts) == 8


def test_a_group_that_uses_more_than_its_limit_has_no_room(tmp_path: Path) -> None:
    proc, mounts = system(tmp_path, groups="0::/", available=1000)
    write(mounts, {"memory.max": 100, "memory.current": 120})
    assert memory_room(proc, mounts) == 0


def test_this_machine_has_some() -> None:
    assert memory_room() > 1 << 20
