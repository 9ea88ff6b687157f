"""NCCL in the benchmark, as far as it goes without a GPU: who takes which, and what is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.common.results import Result
from benchmarks.studies.nccl.report import table
from benchmarks.studies.nccl.study import main
from benchmarks.studies.nccl.sweep import Sweep
from lossycoll.cli import main as cli
from lossycoll.cli.bench import command as bench
from lossycoll.cli.bench import nccl
from lossycoll.cli.bench import worker as bench_rank
from lossycoll.cli.bench.nccl import NcclMissing, Seen, choose, transports
from lossycoll.cli.launcher import launch
from tests.support.lab_kit import ROOT

GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
NCCL_VARIABLES = {"NCCL_HOSTID", "NCCL_NET", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"}


def host(name: str, *gpus: str) -> Seen:
    return Seen(name, "2.13.0+cu130", True, gpus)


def devices(setup: nccl.Setup) -> list[int]:
    return [place.device for place in setup.places]


def test_a_gpu_for_each_rank() -> None:
    setup = choose([host("one", *GPUS)] * 4)
    assert (setup.mode, setup.hosts, devices(setup)) == ("own", 1, [0, 1, 2, 3])
    # NCCL finds its way by itself.
    assert all(place.environment == {} for place in setup.places)
    # A launcher that shows each rank a GPU of its own.
    setup = choose([host("one", "GPU-a"), host("one", "GPU-b")])
    assert (setup.mode, devices(setup)) == ("own", [0, 0])


def test_several_hosts() -> None:
    seen = [host("one", "GPU-a", "GPU-b")] * 2 + [host("two", "GPU-c", "GPU-d")] * 2
    setup = choose(seen)
    assert (setup.mode, setup.hosts, devices(setup)) == ("hosts", 2, [0, 1, 0, 1])
    assert all(place.environment == {} for place in setup.places)
    assert setup.label == "a GPU for each rank, 2 hosts"


def test_two_agents_on_one_host_are_one_host() -> None:
    setup = choose([host("one", "GPU-a", "GPU-b")] * 2)
    assert (setup.mode, devices(setup)) == ("own", [0, 1])


def test_ranks_that_share_a_gpu_are_hosts_to_nccl() -> None:
    setup = choose([host("one", "GPU-a")] * 2)
    assert (setup.mode, devices(setup)) == ("shared", [0, 0])
    ids = {place.environment["NCCL_HOSTID"] for place in setup.places}
    assert len(ids) == 2
    for place in setup.places:
        assert place.environment["NCCL_NET"] == "Socket"
        assert place.environment["NCCL_SOCKET_IFNAME"] == "lo"
        assert place.environment.keys() >= NCCL_VARIABLES
    assert "sockets" in setup.label
    # One GPU too few makes all of them go through sockets, spread over what there is.
    setup = choose([host("one", "GPU-a", "GPU-b")] * 3)
    assert (setup.mode, devices(setup)) == ("shared", [0, 1, 0])
    # Between hosts, loopback leads nowhere.
    setup = choose([host("one", "GPU-a")] * 2 + [host("two", "GPU-b")])
    assert setup.mode == "shared"
    assert not any("NCCL_SOCKET_IFNAME" in place.environment for place in setup.places)
    # Containers that share a GPU are hosts to NCCL, but it is the same GPU.
    assert choose([host("one", "GPU-a"), host("two", "GPU-a")]).mode == "shared"


def test_what_is_missing_is_said_by_the_first_rank_that_lacks_it() -> None:
    bare = Seen("one", "2.13.0+cpu", False)
    with pytest.raises(NcclMissing, match=r"rank 0: torch 2.13.0\+cpu has no NCCL; install"):
        choose([bare, bare])
    with pytest.raises(NcclMissing, match=r"rank 1: torch .* sees no GPU; .*CUDA_VISIBLE_DEVICES"):
        choose([host("one", "GPU-a"), host("two"), host("two")])
    with pytest.raises(NcclMissing, match="rank 0: it takes two ranks at least"):
        choose([host("one", "GPU-a")])


def test_hosts_are_distinguished_as_nccl_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert nccl.look().host.endswith(boot)
    monkeypatch.setenv("NCCL_HOSTID", "mine")
    assert nccl.look().host == "mine"


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in (*NCCL_VARIABLES, "NCCL_DEBUG", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_HOSTID", "the same everywhere")
    nccl.set_up(choose([host("one", "GPU-a")] * 2).places[1], tmp_path / "log")
    assert chosen == [0]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
    assert os.environ["NCCL_HOSTID"] == "lossycoll-rank-1"
    assert os.environ["NCCL_DEBUG_FILE"] == str(tmp_path / "log")


def test_transports_are_read_from_ncclis_account() -> None:
    account = """
    host:1:2 [0] NCCL INFO Channel 00/02 : 0 1
    host:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
    host:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/Socket/1
    host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
    host:1:2 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
    """
    assert transports(account) == ("NET/Socket", "P2P/CUMEM", "SHM/direct/direct")
    assert transports("Using network Socket") == ()


def test_sizes_are_nccl_tests() -> None:
    sizes = bench.sizes("nccl-tests")
    assert sizes[:3] == (8, 16, 32)
    assert sizes[-1] == 128 << 20
    assert len(sizes) == 25
    sweep = Sweep(("gloo",), 2, begin=8, end=100, factor=3, dtype="float32", seconds=1.0)
    assert sweep.sizes == (8, 24, 72)


@pytest.mark.long
def test_ranks_measure_sums_that_are_right(tmp_path: Path) -> None:
    config = {
        "backends": ("lossy", "gloo"),
        "sizes": (8, 65536),
        "dtype": "float32",
        "seconds": 0.05,
        "verify": True,
        "compute_seconds": 0,
        "step_seconds": 0.05,
    }
    measured = launch(
        "lossycoll.cli.bench.worker", config, ranks=2, folder=tmp_path, environment={}
    )
    assert [entry["wrong"] for entry in measured["sizes"]] == [{"lossy": 0, "gloo": 0}] * 2
    assert measured["measured"] == {"lossy": "CPU tensors", "gloo": "CPU tensors"}
    assert measured["nccl"] is None
    for times in measured["steps"].values():
        assert len(times) >= 3
        assert min(times) > 0


def test_a_time_is_of_the_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has done all when the clock is read."""
    did: list[object] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: did.append(group))
    monkeypatch.setattr(bench_rank, "synchronize", did.append)
    tensor = torch.ones(3)
    bench_rank.reduce(tensor, "a group")  # type: ignore[arg-type]
    assert did == ["a group", tensor.device]


def test_what_was_measured_is_said() -> None:
    setup = choose([host("one", "GPU-a")] * 2)
    config = {"backends": ("lossy", "nccl", "gloo")}
    said = bench_rank.labels(config, setup)
    assert said["nccl"] == f"GPU tensors; {setup.label}"
    assert said["lossy"] == said["gloo"]
    assert "copies to the host's memory and back are in the time" in said["lossy"]
    plain = bench_rank.labels({"backends": ("lossy",)}, None)
    assert plain == {"lossy": "CPU tensors"}


def measured_row(name: str, ms: float, wrong: int | None) -> dict[str, Any]:
    return {
        "bytes": 1 << 20,
        "backend": name,
        "median_ms": ms,
        "algbw_gb_s": (1 << 20) / ms / 1e6,
        "busbw_gb_s": (1 << 20) / ms / 1e6,
        "wrong": wrong,
    }


def test_the_table_has_nccl_tests_columns() -> None:
    figures = {
        "measured": {"nccl": "GPU tensors; sockets", "gloo": "GPU tensors; copied"},
        "nccl": {"version": "2.27.3", "gpu": "H", "transports": ["NET/Socket"]},
        "rows": [measured_row("nccl", 1.0, 0), measured_row("gloo", 4.0, None)],
    }
    settings = {"ranks": 2, "dtype": "bfloat16"}
    text = table(Result(settings, figures, "2026-11-22", "0"))
    assert text.startswith("# all_reduce, 2 ranks, 2026-11-22, 0")
    (row,) = [line.split() for line in text.splitlines() if not line.startswith("#")]
    assert row == [
        *("1048576", "524288", "bfloat16", "sum"),
        *("1000.00", "1.049", "1.049", "0"),
        *("4000.00", "0.262", "0.262", "N/A"),
    ]
    assert "# NCCL 2.27.3 on H, connected by NET/Socket" in text
    assert "# nccl: GPU tensors; sockets" in text


def torchrun(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *("--local-addr", "127.0.0.1", "-m", "benchmarks", "nccl", *options),
        ],
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.long
def test_under_torchrun_every_process_is_a_rank(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("<!-- nccl: begin --><!-- nccl: end -->")
    own = ("--results", str(tmp_path / "results.jsonl"), "--report", str(tmp_path))
    sizes = ("-b", "1k", "-e", "64k", "-f", "8", "--seconds", "0.05")
    done = torchrun("--backend", "lossy,gloo", *sizes, *own)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "nccl.json").read_text())
    rows = result["figures"]["rows"]
    assert [(row["bytes"], row["backend"], row["wrong"]) for row in rows] == [
        (size, name, 0) for size in (1 << 10, 8 << 10, 64 << 10) for name in ("lossy", "gloo")
    ]
    assert done.stdout.count("# all_reduce, 2 ranks") == 1
    assert "# lossy: CPU tensors" in done.stdout
    assert "# all_reduce, 2 ranks" in page.read_text()
    again = torchrun("--backend", "lossy,gloo", *sizes, *own)
    assert "1 pieces, 0 to do" in again.stderr
    assert torchrun("--backend", "nccl,gloo", "--dry-run").returncode == 1


def test_the_dry_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(nccl, "look", lambda: Seen("one", "2.13.0+cpu", False))
    assert main(["--dry-run"]) == 1
    out, err = capfd.readouterr()
    plan = "would run: lossy, nccl, gloo; 2 ranks on one host; 25 sizes, 8 to 134217728 bytes"
    assert plan in out
    assert "NCCL can't run here: rank 0: torch" in err
    # Without --dry-run nothing is started.
    assert main(["--results", str(tmp_path / "results.jsonl")]) == 1
    assert "NCCL can't run here" in capfd.readouterr().err
    monkeypatch.setattr(nccl, "look", lambda: host("one", *GPUS))
    assert main(["--dry-run"]) == 0
    out, _ = capfd.readouterr()
    assert "4 ranks on one host" in out
    assert "NCCL: a GPU for each rank, one host\nrank 0: cuda:0\nrank 1: cuda:1\n" in out
    monkeypatch.setattr(nccl, "look", lambda: host("one", "GPU-a"))
    assert cli.main(["bench", "--backend", "lossy,nccl,gloo", "--dry-run"]) == 0
    out, _ = capfd.readouterr()
    assert "25 sizes from 8 B to 128 MiB" in out
    assert "rank 1: cuda:0 NCCL_HOSTID=lossycoll-rank-1 NCCL_NET=Socket" in out
    monkeypatch.setattr(nccl, "look", lambda: host("one"))
    assert cli.main(["bench", "--backend", "nccl"]) == 1
    assert "lossycoll bench: NCCL can't run here" in capfd.readouterr().err
