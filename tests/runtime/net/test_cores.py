"""How many cores a process has: by its affinity, and by the files of its control groups."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from lossycoll.runtime.net.control_groups import core_limit, core_mask


def system(root: Path, groups: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A /proc with these control groups, and their files."""
    proc, mounts = root / "proc", root / "cgroup"
    for path, text in {
        proc / "self/cgroup": groups,
        **{mounts / f: files[f] for f in files},
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    mounts.mkdir(exist_ok=True)
    return proc, mounts


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
    assert core_limit(tmp_path, tmp_path) == math.inf
