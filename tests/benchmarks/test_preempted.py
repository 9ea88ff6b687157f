"""Peers that are preempted: their schedule, their returns, gossip, and what the report says."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import runner, tcp
from benchmarks.common.results import Result, append
from benchmarks.common.runner import one_by_one
from benchmarks.studies.swarm.preempted import by_gossip, report
from benchmarks.studies.swarm.preempted import study as command
from benchmarks.studies.swarm.preempted.runs import (
    PEERS,
    REST_SECONDS,
    SPEEDS,
    VARIANTS,
    WATCHED,
    Budget,
    Preemption,
    Run,
    runs,
    schedule,
)
from tests.support.waiting import until

BUDGET = Budget()
OURS = "lossycoll"
THEIRS = "gloo, restarts"


def figures(seconds: float = 100.0, loss: float = 2.25) -> dict[str, Any]:
    """As a run writes them: the mean of two losses falls to ``loss`` at ``seconds``."""
    return {
        "curve": [
            [10.0, 4.0],
            [seconds - 20.0, report.GOAL + 0.1],
            [seconds - 10.0, loss + 0.3],
            [seconds, loss - 0.3],
        ],
        "losses": [loss + 0.01] * PEERS,
        "steps": [10 * speed for speed in SPEEDS],
        "rounds": 3,
        "members": 5.5,
        "failed": 0,
        "back": [[1, 20.0, 3.5], [2, 40.0, 1.5]],
        "preempted": [[1, 16.0, 4.0]] * 7,
        "crashes": [],
        "bytes": 2**21,
        "load": 3.0,
    }


def entry(variant: str, seconds: float, seed: int = 1, loss: float = 2.25) -> Result:
    return Result(Run(variant, seed, BUDGET).settings, figures(seconds, loss), commit="abc")


@pytest.mark.parametrize("seed", range(20))
def test_all_are_preempted_alike_and_who_is_away_is_not(seed: int) -> None:
    found = schedule(seed, BUDGET)
    assert found == schedule(seed, BUDGET) != schedule(seed + 1, BUDGET)
    assert 4 <= len(found) <= BUDGET.seconds / (BUDGET.gap / 2)
    back: dict[int, float] = {}
    for before, one in zip([Preemption(0.0, 0, 0.0), *found], found, strict=False):
        assert BUDGET.gap / 2 - 1e-3 <= one.at - before.at
        assert BUDGET.pause / 2 <= one.pause <= 1.5 * BUDGET.pause
        assert one.peer in range(PEERS)
        assert one.peer != WATCHED
        assert one.at >= back.get(one.peer, 0.0)
        back[one.peer] = one.at + one.pause + REST_SECONDS - 0.01
    made = [Run(name, seed, BUDGET) for name in VARIANTS]
    assert all(run.preemptions == found for run in made)


def test_a_whole_comparison_comes_before_the_next_seed() -> None:
    found = list(runs((1, 2), list(VARIANTS), BUDGET))
    assert [run.seed for run in found] == [1] * len(VARIANTS) + [2] * len(VARIANTS)
    for run in found:
        assert Run.of(json.loads(json.dumps(run.settings))) == run


def test_what_can_not_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, said in {
        ("--local", "0"): "local is 0, wanted at least 1",
        ("--gap", "0"): "gap is 0.0, wanted seconds above 0",
        ("--seconds", "nan"): "seconds is nan, wanted seconds above 0",
        ("--seeds", "1", "1"): "seeds are [1, 1], wanted different numbers",
    }.items():
        with pytest.raises(SystemExit):
            runner.main(command.STUDY, wrong)
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="variant is 'mpi', wanted one of lossycoll, "):
        Run("mpi", 1, BUDGET)


class Machine:
    """In place of a host of the laboratory."""

    def __init__(self, number: int) -> None:
        self.number, self.life, self.lives = number, 0, True
        self.errors = ["it fell over\n"]
        self.ended = False

    @property
    def has_ended(self) -> bool:
        return self.lives and self.ended

    def start(self) -> None:
        assert not self.lives
        self.life += 1
        self.lives, self.ended = True, False

    def kill(self) -> None:
        self.lives = False


def course(variant: str) -> Any:
    made = command.Course.__new__(command.Course)
    made._run, made._together = Run(variant, 1, BUDGET), VARIANTS[variant].together
    made.peers = made.hosts = [Machine(number) for number in range(PEERS)]  # type: ignore[misc]
    made._away, made.starts, made.crashes, made.begin = [], [], [], 0.0
    return made


def test_a_preempted_peer_comes_back_alone() -> None:
    one = course(OURS)
    one._preempt(Preemption(10.0, 1, 5.0), 10.0)
    assert [peer.lives for peer in one.peers] == [True, False, True, True, True, True]
    one._bring_back(14.9)
    assert not one.peers[1].lives
    one._bring_back(15.0)
    assert [peer.life for peer in one.peers] == [0, 1, 0, 0, 0, 0]
    one.peers[3].ended = True
    one._watch(20.0)
    assert not one.peers[3].lives
    assert one.crashes == ["peer 3: it fell over"]
    one._bring_back(20.0 + command.AGAIN_SECONDS)
    assert one.peers[3].lives


def test_the_ranks_of_a_job_start_again_together() -> None:
    one = course(THEIRS)
    one._preempt(Preemption(10.0, 1, 5.0), 10.0)
    assert not any(peer.lives for peer in one.peers)
    one._bring_back(14.0)
    one._preempt(Preemption(14.5, 2, 5.0), 14.5)  # while the job waits for the other
    one._bring_back(15.0)
    assert not any(peer.lives for peer in one.peers)
    one._bring_back(19.5)
    assert [peer.life for peer in one.peers] == [1] * PEERS
    one.peers[3].ended = True
    one._watch(30.0)
    assert not any(peer.lives for peer in one.peers)
    one._bring_back(32.0)
    assert [peer.life for peer in one.peers] == [2] * PEERS


def end(peer: Any) -> None:
    """It answers nobody from now on."""
    with contextlib.suppress(OSError):  # it has ended before
        peer._listener.shutdown(socket.SHUT_RDWR)
    peer._listener.close()


@pytest.fixture
def gossips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Two peers of this process, of which the second is reached at another address."""
    monkeypatch.setattr(tcp, "use_by_default", lambda control: None)
    monkeypatch.setattr(by_gossip, "PEERS", 3)
    monkeypatch.setattr(by_gossip, "SPEEDS", (1, 1, 1))
    with socket.create_server(("127.0.0.2", 0)) as free:
        monkeypatch.setattr(by_gossip, "PORT", free.getsockname()[1])
    made = []
    for number in range(2):
        model = torch.nn.Linear(500, 40, bias=False)
        torch.nn.init.constant_(model.weight, float(number))
        config = {
            "peer": number,
            "life": 0,
            "local": 2,
            "control": "bbr",
            "folder": str(tmp_path),
            "addresses": ["127.0.0.2", "127.0.0.3", "127.0.0.4"],
        }
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        one = by_gossip.Averaging(config, model, inner)
        made.append(one)
    yield made
    for one in made:
        end(one)


def test_gossip_averages_with_a_partner_that_is_there(gossips: list[Any]) -> None:
    """The third peer is away: the first finds the second whichever it asks first."""
    one, other = gossips
    one.begin()
    done = [one.step() for _ in range(2)]
    assert done == [None, None]
    one._asks.join(10)
    assert one.step() == {"members": 2, "failure": ""}
    until(lambda: float(other._mine()[0]) != 1.0, "the other takes its half")
    for peer in gossips:
        assert torch.equal(peer._mine(), torch.full((20_000,), 0.5))


def test_gossip_goes_on_without_anybody(gossips: list[Any]) -> None:
    one, other = gossips
    end(other)
    for _ in range(2):
        assert one.step() is None
    one._asks.join(10)
    assert one.step() == {"members": 1, "failure": "no partner"}
    assert float(one._mine()[0]) == 0.0


def test_the_report_tells_times_to_the_goal() -> None:
    made = [
        *(entry(OURS, 50.0 + seed, seed) for seed in (1, 2, 3)),
        *(entry(THEIRS, 90.0 + 3 * seed, seed) for seed in (1, 2, 3)),
        entry("gossip", 40.0, 1, loss=report.GOAL + 0.1),
        entry("gossip", 50.0, 2),
    ]
    found = report.results(made)
    rows = {row.split(" | ")[0].strip("| "): row for row in report.table(found).splitlines()[2:]}
    assert rows[OURS].startswith(
        f"| {OURS} | 1, 2, 3 | 52 (51, 53) | - | 2.250 (2.250, 2.250) | 7% |"
    )
    assert "| 2.5, 3.5 | 2 |" in rows[OURS]
    assert "| 96 (93, 99) | 1.85 (1.82, 1.87) |" in rows[THEIRS]
    assert "| 1 of 2 seeds: 50 | 1 of 2 seeds: 0.96 |" in rows["gossip"]
    assert report.verdict(found) == (
        f"7 to 7 preemptions in a run. First: `{OURS}` with 2 seeds, `gossip` with 1 seed."
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"curve": []}, "no points"),
        ({"curve": [[1.0, 3.0], [1.0, 2.0], [2.0, 2.0]]}, "goes back"),
        ({"losses": [float("nan")]}, "a loss of nan"),
    ],
)
def test_records_that_make_no_sense_are_refused(change: dict[str, Any], said: str) -> None:
    bad = replace(entry(OURS, 50.0), figures={**figures(), **change})
    with pytest.raises(ValueError, match=said):
        report.results([bad])


def test_what_is_done_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hivemind the others run, and the report of what there is goes between the marks."""
    monkeypatch.setattr(tcp, "allowed", lambda: ["bbr"])
    asked: list[Run] = []

    def measure(run: Run, options: argparse.Namespace) -> dict[str, Any]:
        asked.append(run)
        return figures()

    study = replace(command.STUDY, measuring=one_by_one(measure))
    results = tmp_path / "results.jsonl"
    page = tmp_path / "moshpit.md"
    page.write_text(f"<!-- {report.NAME}: begin -->\n<!-- {report.NAME}: end -->\n")
    append(results, entry("hivemind", 70.0))
    given = ["--results", str(results), "--report", str(tmp_path), "--seeds", "1"]
    for _ in range(2):
        assert runner.main(study, given) == 0
    ours = [name for name, variant in VARIANTS.items() if variant.by != "hivemind"]
    assert [run.variant for run in asked] == ours
    assert (tmp_path / f"{report.NAME}.png").stat().st_size > 10_000
    kept = json.loads((tmp_path / f"{report.NAME}.json").read_text())
    assert set(kept["variants"]) == {*ours, "hivemind"}
    assert "| hivemind | 1 | 70 (70, 70) |" in page.read_text()
