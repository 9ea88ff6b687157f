"""An algorithm from outside the package, docs/extending.md's, does what the package's own do."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lossycoll.plan import (
    Algorithm,
    algorithm_names,
    choose_algorithm,
    register,
    unregister,
)
from tests.oracle.codec import wire_type
from tests.support import pages, plan_cases, plan_checks
from tests.support.harness import EXACT, init, run_good, run_ranks, warm_python
from tests.support.network import Network
from tests.support.oracle_cases import cases_of
from tests.support.oracle_checks import check

PAGE, PLUGIN = "extending.md", "star_all_reduce.py"
PAYLOAD = 256
ELEMENTS = 50_000


@pytest.fixture(scope="module")
def root() -> Iterator[Algorithm]:
    yield register(pages.load(PAGE, PLUGIN).STAR)
    unregister(choose_algorithm("all_reduce", "star", 4))


@pytest.mark.parametrize("checked", plan_checks.PLAN_CHECKS, ids=lambda one: one.__name__)
def test_its_plans_pass_the_checks_of_plans(root: Algorithm, checked: Any) -> None:
    for case in plan_cases.cases_of(root):
        checked(case)


def test_the_reference_executor_gives_the_sum(root: Algorithm) -> None:
    for case in plan_cases.cases_of(root):
        for checked in plan_checks.reference_checks(case):
            checked(case)


@pytest.mark.parametrize("loss", ["", "loss=0.1,seed=6", "loss=0.5,burst=3,seed=10"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_engine_gives_what_the_reference_gives(root: Algorithm, world: int, loss: str) -> None:
    dropped = 0
    with Network(world, PAYLOAD, inject=loss, seed=11) as network:
        for case in cases_of(root):
            for dtype in ("f32", "bf16"):
                per_packet = PAYLOAD // wire_type(dtype).wire.itemsize
                for count in (0, 1, per_packet + 1, 37 * per_packet + 5):
                    for how in ({"repair": 0}, {"repair": 1}, {"reliable": True}):
                        dropped += check(network, case, count, dtype, loss, **how)
    if loss and world > 1:
        assert dropped > 0, "the fault did not happen"


def sums_by_the_star(rank: int, world: int) -> list[Any]:
    """A lossy and a reliable sum, and the packets that this rank sent for the reliable one."""
    import torch
    import torch.distributed as dist

    import lossycoll

    pages.load(PAGE, PLUGIN)
    init(pg_options={"algorithm": "star"})
    mine = torch.arange(ELEMENTS, dtype=torch.float32) + rank
    lossy, reliable = mine.clone(), mine.clone()
    dist.all_reduce(lossy)
    with lossycoll.reliable():
        dist.all_reduce(reliable)
    report = lossycoll.last_report()
    assert report is not None
    want = world * torch.arange(ELEMENTS) + sum(range(world))
    dist.destroy_process_group()
    torch.testing.assert_close(lossy, want.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(reliable, want.float(), rtol=1e-6, atol=0)
    return [report.packets_sent, report.packets_missing]


def test_ranks_reduce_by_it() -> None:
    world = 3
    sent, missing = zip(*run_good(sums_by_the_star, world, EXACT), strict=True)
    assert missing == (0, 0, 0)
    # By a transpose all ranks would send alike. The root of a reliable call is rank 0.
    assert sent[1] == sent[2] > 0
    assert sent[0] == (world - 1) * sent[1]


def only_rank_one_lacks_it(rank: int, world: int) -> None:
    if rank != 1:
        pages.load(PAGE, PLUGIN)
    init(pg_options={"algorithm": "star"})


def test_a_rank_that_lacks_it_is_named() -> None:
    outcomes = run_ranks(only_rank_one_lacks_it, 3)
    names = " or ".join(name for name in algorithm_names() if name != "star")
    wanted = f"option algorithm is 'star', wanted {names} (a plug-in's must be"
    for outcome in outcomes:
        assert outcome.error == ("OptionError" if outcome.rank == 1 else "RendezvousError")
        assert "rank 1/3" in outcome.text, str(outcome)
        assert wanted in outcome.text, str(outcome)


@pytest.mark.long
def test_bench_measures_an_installed_one(tmp_path: Path) -> None:
    """The ranks of the benchmark are processes of their own: entry points bring it to them."""
    pages.write(PAGE, tmp_path)
    info = tmp_path / "star-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: star\nVersion: 1\n")
    (declared,) = [text for kind, text in pages.blocks(PAGE) if kind == "toml"]
    section = declared.replace(
        'project.entry-points."lossycoll.algorithms"', "lossycoll.algorithms"
    )
    (info / "entry_points.txt").write_text(section.replace('"', ""))
    few = ("--ranks", "3", "--sizes", "64k", "--seconds", "0.1", "--backend", "lossy")
    done = subprocess.run(
        [warm_python(), "-m", "lossycoll.cli", "bench", "--json", "--algorithm", "star", *few],
        env={**os.environ, "PYTHONPATH": f"{pages.DOCS.parent}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["options"]["algorithm"] == "star"
    assert [row["verified"] for row in found["rows"]] == [True]
