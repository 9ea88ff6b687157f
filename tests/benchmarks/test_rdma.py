"""The benchmark of RDMA: what it reads of perftest, what it prints, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.micro import rdma
from tests.support import fake_rdma
from tests.support.harness import run_ranks

PRINTED = """
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 4096       1000             92.51              91.38              2.788574
---------------------------------------------------------------------------------------
"""


def test_the_mean_of_perftest_is_read() -> None:
    assert rdma.perftest_gbit(PRINTED) == pytest.approx(91.38)
    assert rdma.perftest_gbit("Couldn't connect to 10.0.0.1:18515") is None


def test_what_is_printed() -> None:
    rows = [
        rdma.Row("message", way, 1 << 20, seconds, 1e-6)
        for way, seconds in (("rdma", 1e-4), ("udp", 4e-4))
    ]
    assert "84% of that, wanted 90%" in rdma.table(rows, 100.0)
    assert "the limit wasn't measured" in rdma.table(rows, None)


def rank_measures(rank: int, world: int) -> int:
    import os

    fake_rdma.show_devices()
    sizes = ["--sizes", "4096,1048576", "--turns", "1", "--each", "2"]
    return rdma.main([*sizes, "--json", os.environ["ROWS"]])


@pytest.mark.long
def test_it_runs(tmp_path: Path) -> None:
    fake_rdma.write_port(tmp_path / "sys")
    env = {**fake_rdma.environment(tmp_path / "sys"), "ROWS": str(tmp_path / "rows.json")}
    hosts = {rank: {"LOSSYCOLL_HOST": f"h{rank}"} for rank in range(2)}
    try:
        for outcome in run_ranks(rank_measures, 2, env, per_rank=hosts):
            assert outcome.value == 0, str(outcome)
    finally:
        fake_rdma.drop_library()
    found = json.loads((tmp_path / "rows.json").read_text())
    assert {(row["what"], row["way"], row["nbytes"]) for row in found["rows"]} == {
        (what, way, nbytes)
        for what in ("all_reduce", "message")
        for way in rdma.WAYS
        for nbytes in (4096, 1 << 20)
    }
    assert all(row["seconds"] > 0 for row in found["rows"])
