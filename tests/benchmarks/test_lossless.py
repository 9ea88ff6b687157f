"""The benchmark of clean wires: its sockets, its sums and its words; and what it says of memory."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.results import Result
from benchmarks.studies.lossless import report, summary, verdict
from benchmarks.studies.lossless.cells import MIB, RAW, RAW_BASE, Job, jobs
from benchmarks.studies.lossless.memory import resident
from benchmarks.studies.lossless.sockets import SOURCES
from tests.support.failure_cases import CALM
from tests.support.harness import free_port, init, run_good

ROOT = Path(__file__).resolve().parents[2]
SPANS, CALLS = 4, 600
NOISE = 192 << 10
"""Bytes that a process grows by on its own in some of the spans, never in all."""


def rank_holds(rank: int, world: int) -> tuple[list[int], list[int]]:
    """Bytes grown in each span of calls; first as they are, then with every work kept."""
    import torch
    import torch.distributed as dist

    init()
    tensors = [torch.ones(elements) for elements in (64, 1024, 16_384)]
    kept: list[Any] = []

    def span(keep: bool) -> int:
        before = resident()
        for number in range(CALLS):
            tensor = tensors[number % len(tensors)].fill_(1)
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            if keep:
                kept.append((work, bytearray(1024)))
        return resident() - before

    span(False)  # what is made once is made
    flat = [span(False) for _ in range(SPANS)]
    leaking = [span(True) for _ in range(SPANS)]
    assert all((tensor == world).all() for tensor in tensors)
    dist.destroy_process_group()
    return flat, leaking


def test_memory_is_flat_over_thousands_of_calls() -> None:
    for flat, leaking in run_good(rank_holds, 2, CALM, timeout=200):
        # What leaks does so in every span; one that doesn't grow shows that nothing does.
        assert min(flat) < NOISE, flat
        assert min(leaking) > NOISE, leaking  # the measure would see it


@pytest.fixture(scope="module")
def raw_duplex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("raw_duplex") / "raw_duplex"
    sources = [str(path) for path in SOURCES]
    command = ["cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program)]
    subprocess.run([*command, *sources], check=True, timeout=60)
    return program


def both_ends(program: Path, *switches: str) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of two ends on loopback."""
    ports = [free_port(), free_port()]
    ends = []
    for own, other in (ports, ports[::-1]):
        addresses = ["--bind", f"127.0.0.1:{own}", "--peer", f"127.0.0.1:{other}"]
        command = [str(program), *addresses, "--megabytes", "16", *switches]
        pipe = subprocess.PIPE
        ends.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
    said = [end.communicate(timeout=60) for end in ends]
    return [(end.returncode, *texts) for end, texts in zip(ends, said, strict=True)]


OFF = tuple((f"--no-{name}",) for name in ("gso", "gro", "mmsg", "gather", "simd"))


@pytest.mark.parametrize("switches", [*RAW.values(), *OFF, ("--datagram", "1448")])
def test_raw_duplex_arrives_whole(raw_duplex: Path, switches: tuple[str, ...]) -> None:
    for code, out, errors in both_ends(raw_duplex, *switches):
        if "--io-uring" in switches and code:
            assert "io_uring_setup" in errors  # many sandboxes refuse it
            continue
        assert code == 0, errors
        result = json.loads(out)
        assert result["lost"] == 0
        if "--in-place" not in switches and "--zerocopy" not in switches:
            # Every datagram holds ones; where headers lie among them they go around as well.
            assert result["sum"] == result["received"] > 0
        assert result["zero_copies"] > 0 or "--zerocopy" not in switches


def test_raw_duplex_asks_and_answers(raw_duplex: Path) -> None:
    found = [json.loads(out) for _, out, _ in both_ends(raw_duplex, "--pings", "100")]
    assert sorted(one["asks"] for one in found) == [0, 1]
    assert all(0 < one["p50_us"] <= one["p99_us"] for one in found)


def test_raw_duplex_refuses(raw_duplex: Path) -> None:
    ends = ["--bind", "127.0.0.1:20001", "--peer", "127.0.0.1:20002"]
    for arguments in (["--no-warp"], ["--pings", "1"], [*ends, "--datagram", "1"]):
        done = subprocess.run([str(raw_duplex), *arguments], capture_output=True, check=False)
        assert done.returncode == 2, arguments


def measured(variant: dict[str, list[float]], right: bool = True) -> dict[str, Any]:
    """One rank's figures of a 4 MiB all-reduce."""
    return {
        "collective": "all_reduce",
        "bytes": 4 * MIB,
        "seconds": variant,
        "cpu": variant,
        "right": dict.fromkeys(variant, right),
    }


def test_turns_of_a_size_are_one_row_of_means_over_ranks() -> None:
    one = [measured({"lossy": [1.0]}), measured({"lossy": [5.0]})]
    other = [measured({"lossy": [3.0]}), measured({"lossy": [5.0]}, right=False)]
    (row,) = summary.rows([one, other])
    figures = row["variants"]["lossy"]
    assert figures["calls"] == 2
    assert (figures["p50"], figures["longest"], figures["cpu"]) == (2.0, 5.0, 3.5)
    assert figures["right"] is False


def entry(lossy: float, gloo: float, right: bool = True) -> Result:
    rank = {"rows": [measured({"lossy": [lossy], "gloo": [gloo]}, right)], "missing": 0}
    figures = summary.summarize("collectives", [rank, rank])
    return Result(Job("collectives", "lo", 2).settings, figures, "2026-11-22", "abc")


def test_words_follow_from_the_figures() -> None:
    said = "\n".join(verdict.lines([entry(1.0, 3.5)]))
    assert "bus bandwidth: 3.50 to 3.50, goal >= 3, reached in 1 of 1." in said
    assert "slower than gloo: nowhere" in said
    assert "Results that were wrong: none" in said
    said = "\n".join(verdict.lines([entry(1.0, 0.5, right=False)]))
    assert "reached in 0 of 1; not in lo, 2 ranks, 4 MiB (0.50)" in said
    assert "slower than gloo: lo, 2 ranks, 4 MiB (0.50x)" in said
    assert "CPU time against gloo's: 2.00 to 2.00, goal <= 1, reached in 0 of 1" in said
    assert "Results that were wrong: lo, 2 ranks, 4 MiB" in said


def test_tables_of_what_there_is() -> None:
    tables = report.tables([entry(0.004, 0.008)])
    row = tables["clean-all-reduce"].splitlines()[2]
    assert "| 4 MiB | 4, 4 | 1.05 | 8, 8 | 0.52 | 2.00x | 3x |" in row
    assert tables["clean-raw"] == "No runs yet."
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for name in tables:
        assert f"<!-- {name}: begin -->" in page
        assert f"<!-- {name}: end -->" in page


def test_every_wire_is_measured_in_every_part() -> None:
    assert len(set(jobs())) == len(list(jobs())) == 13
    assert RAW[RAW_BASE] == ()
