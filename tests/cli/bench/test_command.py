"""The benchmarks run, and what they report follows from what they measured."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lossycoll.cli import main as cli
from lossycoll.cli.bench import command as bench
from lossycoll.cli.bench import worker
from lossycoll.cli.bench import worker as bench_rank
from lossycoll.options.fields import Options
from lossycoll.options.texts import FAST_PATHS
from tests.support.command_line import run_lossycoll
from tests.support.harness import warm_python
from tests.support.lab_kit import needs_lab

ROOT = Path(__file__).resolve().parents[3]


def run_bench(*options: str, python: str = "") -> dict[str, Any]:
    done = run_lossycoll("bench", "--json", *options, python=python or warm_python())
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_both_backends_side_by_side(tmp_path: Path) -> None:
    saved = tmp_path / "bench.json"
    given = ("--sizes", "4k,256k", "--seconds", "0.2", "--out", str(saved))
    result = run_bench(*given, python=sys.executable)
    assert json.loads(saved.read_text()) == result
    rows = result["rows"]
    assert [(row["bytes"], row["backend"]) for row in rows] == [
        (4096, "lossy"),
        (4096, "gloo"),
        (262144, "lossy"),
        (262144, "gloo"),
    ]
    for row in rows:
        assert row["verified"] is True
        assert row["wrong"] == 0
        assert row["lossy_over_nccl"] is None
        assert row["iterations"] >= worker.LEAST_ROUNDS
        assert 0 < row["median_ms"] <= row["p99_ms"]
        assert row["after_compute_ms"] > 0
        # nccl-tests: algbw = bytes / time; busbw = algbw * 2 (n - 1) / n, which is algbw for two.
        assert row["algbw_gb_s"] == pytest.approx(row["bytes"] / row["median_ms"] / 1e6)
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"])
    ratio = rows[2]["algbw_gb_s"] / rows[3]["algbw_gb_s"]
    assert rows[2]["lossy_over_gloo"] == pytest.approx(ratio)
    assert result["traffic"]["packets_missing"] == 0


@pytest.mark.long
def test_loss_and_switches_reach_the_ranks() -> None:
    result = run_bench(
        *("--backend", "lossy", "--sizes", "512k", "--seconds", "0.1", "--ranks", "3"),
        *("--loss", "0.2", "--mtu", "1500", "--disable", "gso,gro", "--algorithm", "ring"),
    )
    (row,) = result["rows"]
    assert row["verified"] is None  # with loss there is no one right answer
    assert row["lossy_over_gloo"] is None
    assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * 4 / 3)
    assert result["traffic"]["packets_injected"] > 0
    assert result["traffic"]["packets_missing"] > 0


def test_logs_of_a_rank_that_failed_are_there_to_be_read(tmp_path: Path) -> None:
    words = ("bench", "--backend", "lossy", "--sizes", "4k")
    env = os.environ | {"LOSSYCOLL_INTERFACE": "nope", "TMPDIR": str(tmp_path)}
    done = run_lossycoll(*words, python=warm_python(), env=env)
    assert done.returncode == 1
    said = re.search(r"lossycoll bench: rank \d failed .* output is under (\S+)", done.stderr)
    assert said is not None, done.stderr
    assert "InterfaceError" in done.stderr
    logs = Path(said[1])
    assert logs.is_relative_to(tmp_path)
    assert any("'nope'" in log.read_text() for log in logs.rglob("stderr.log"))


def test_sizes() -> None:
    assert bench.sizes("4k, 1MiB,100m,9") == (4096, 1 << 20, 100 << 20, 8)
    for text in ("", "0", "4", "2g", "1t", "-4k"):
        with pytest.raises(argparse.ArgumentTypeError):
            bench.sizes(text)


def test_an_encoding_reaches_the_ranks() -> None:
    options = cli.parser().parse_args(["bench", "--wire", "fp16"])
    assert bench.environment_of(options)["LOSSYCOLL_WIRE"] == "fp16"
    assert "LOSSYCOLL_WIRE" not in bench.environment_of(cli.parser().parse_args(["bench"]))


def test_sums_in_few_bits_are_verified_within_their_step() -> None:
    given = ("--backend", "lossy", "--sizes", "64k", "--seconds", "0.05", "--compute-ms", "0")
    for wire in ("int8", "int2"):
        (row,) = run_bench(*given, "--ranks", "3", "--wire", wire)["rows"]
        assert (row["verified"], row["wrong"]) == (True, 0)


def test_the_tolerance_of_an_encoding_is_its_steps() -> None:
    def of(dtype: torch.dtype = torch.float32, ranks: int = 2, **options: Any) -> float:
        return worker.tolerance(Options(**options), dtype, ranks)

    assert of() == of(torch.float64, wire="int8") == 0
    exact = worker.GRID_ERROR * 2 * worker.LARGEST
    assert of(wire="int8") == pytest.approx(exact / 255)
    assert of(wire="int4/int8") == pytest.approx(exact * (0.5 / 15 + 0.5 / 255))
    assert of(wire="int4", wire_rounding="stochastic") == pytest.approx(exact * 2 / 15)
    assert of(wire="int8", ranks=4, algorithm="ring") == pytest.approx(2 * exact * 2 / 255)
    assert of(wire="bf16") == pytest.approx(exact / 256)
    assert of(wire="fp16", ranks=64) < 0.2


def check_loss(found: dict[str, Any], backends: tuple[str, ...], size: int) -> None:
    assert [(row["loss"], row["backend"]) for row in found["rows"]] == [(0.1, b) for b in backends]
    assert found["bytes"] == size
    assert found["steps"]["loss"] == 0.1
    assert tuple(found["steps"]["seconds"]) == backends
    for times in (*(row["seconds"] for row in found["rows"]), *found["steps"]["seconds"].values()):
        assert len(times) >= worker.LEAST_ROUNDS
        assert min(times) > 0


@pytest.mark.long
@needs_lab
def test_time_against_loss_is_of_a_laboratory() -> None:
    given = ["bench", "--sizes", "4k,64k", "--seconds", "0.05", "--losses", "0.1"]
    options = cli.parser().parse_args(given)
    said: list[str] = []
    found = bench.against_loss(options, bench.configuration(options), {}, said.append)
    check_loss(found, ("lossy", "gloo"), 64 << 10)
    assert said == ["time against loss: 0.1"]
    assert "laboratory, 1000 Mbit/s, 20 ms" in found["network"]
    # A round trip's half for each phase; loss is the network's.
    assert all(row["median_ms"] > 2 * bench.ONE_WAY_MS for row in found["rows"])
    assert found["injected"] == 0


@pytest.mark.long
def test_without_a_laboratory_loss_is_injected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "missing", lambda _: "no rights")
    given = ["bench", "--backend", "lossy", "--sizes", "4k,64k", "--seconds", "0.05"]
    assert cli.main([*given, "--losses", "0.1", "--report", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "bench.json").read_text())
    # The report has every time of what the table sums up.
    assert [row["bytes"] for row in written["rows"]] == [4 << 10, 64 << 10]
    for row in written["rows"]:
        assert len(row["seconds"]) == row["iterations"]
    loss = written["loss"]
    check_loss(loss, ("lossy",), 64 << 10)
    assert loss["without_laboratory"] == "no rights"
    assert "injected" in loss["network"]
    assert loss["injected"] > 0
    assert (tmp_path / "bench.png").stat().st_size > 30_000


def test_one_wrong_rank_makes_a_result_wrong() -> None:
    def rank(wrong: int, seconds: float) -> list[dict[str, Any]]:
        times = {"gloo": [seconds]}
        return [{"bytes": 8, "seconds": times, "after_compute": {}, "wrong": {"gloo": wrong}}]

    (merged,) = bench_rank.merge([rank(0, 1.0), rank(2, 3.0)])
    assert merged["wrong"] == {"gloo": 2}
    (row,) = bench.rows_of({"sizes": [merged]}, 2)
    assert row["verified"] is False
    assert merged["seconds"] == {"gloo": [2.0]}


@pytest.fixture(scope="module")
def raw_udp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("raw_udp") / "raw_udp"
    source = ROOT / "benchmarks" / "micro" / "raw_udp.c"
    command = ["cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([*command, "-o", str(program), str(source)], check=True, timeout=60)
    return program


# What the bare sockets have: nobody there asks when a datagram came.
RAW_PATHS = tuple(name for name in FAST_PATHS if name not in {"stamps", "path_mtu"})


@pytest.mark.parametrize("off", [(), *((name,) for name in RAW_PATHS), RAW_PATHS])
def test_raw_udp_arrives_whole(raw_udp: Path, off: tuple[str, ...]) -> None:
    command = [str(raw_udp), "--megabytes", "16", *(f"--no-{name}" for name in off)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    result = json.loads(done.stdout)
    assert [name for name in RAW_PATHS if not result[name]] == list(off)
    assert result["lost"] == 0
    # Every datagram holds ones, so the sum counts them.
    assert result["sum"] == result["received"] >= 16_000_000 // result["datagram"]
    if not off:
        # One call of the kernel sends many datagrams; otherwise the fast path was not taken.
        assert result["send_calls"] * 8 < result["received"]


def test_raw_udp_refuses(raw_udp: Path) -> None:
    for arguments in (["--no-warp"], ["--datagram", "1"], ["--megabytes", "0"]):
        done = subprocess.run([str(raw_udp), *arguments], capture_output=True, check=False)
        assert done.returncode == 2
