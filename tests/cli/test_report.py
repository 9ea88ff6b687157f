"""`lossycoll report`: what lines of figures become, and what isn't one."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lossycoll.cli.main import main
from lossycoll.cli.report import charts_of, chosen, findings, read_files
from lossycoll.runtime.engine.status_record import Record
from lossycoll.runtime.world import metrics
from tests.runtime.world.test_job_status import peer, record
from tests.support.waiting import until

STEPS = 40


def line(step: int, session: str = "ab") -> dict[str, Any]:
    """Two ranks; the link from 0 to 1 loses a fifth, and rank 1 is stopped at the end."""
    is_last = step == STEPS - 1
    records = []
    for process in (0, 1):
        one = record(process, 7, waits=process == 0)
        stats = {
            "operations": step,
            "bytes_sent": 1_000_000 * step,
            "packets_received": 90 * step,
            "packets_missing": 10 * step * process,
        }
        peers = tuple(replace(link, loss=0.2 if process == 0 else 0.0) for link in one.peers)
        state = "stopped" if process and is_last else one.state
        records.append(replace(one, session=session, stats=stats, peers=peers, state=state))
    return metrics.line_of(records, 1000.0 + step)


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    return path


def test_a_page_has_loss_rates_and_who_was_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics.measured["drift"] = 0.01
    try:
        file = written(tmp_path / "job.jsonl", *map(line, range(STEPS)))
    finally:
        del metrics.measured["drift"]
    page = tmp_path / "page.html"
    assert main(["report", str(file), "--output", str(page)]) == 0
    said = capsys.readouterr().out
    assert "2 ranks, 39.0 s, 40 lines" in said
    assert "link from rank 0 to rank 1: lost 20.0% on average" in said
    assert "rank 1 was stopped at the end" in said
    assert "rank 1 was waited for" in said
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text
    assert "10.000%" in text  # of rank 1's packets
    job = chosen(read_files([file]), "")
    charts = {chart.title.partition(",")[0]: chart.series for chart in charts_of(job)}
    assert charts["Sent"]["rank 0"] == [(float(at), 1.0) for at in range(1, STEPS)]
    assert charts["Missing after recovery"] == {"rank 1": [(float(at), 0.1) for at in range(1, 40)]}
    assert {value for _, value in charts["Loss of links"]["0 to 1"]} == {0.2}
    assert charts["Drift of replicas"]["drift"][0] == (0.0, 0.01)


def test_what_is_no_figure_is_left_out_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = line(1)
    strange: list[Any] = [
        "", "{", "[]", "7", json.dumps({"ranks": []}), json.dumps(whole | {"ranks": [{}]}),
        json.dumps(whole | {"time": "x"}), json.dumps(whole | {"session": 7}), "\x00\xff",
    ]  # fmt: skip
    file = tmp_path / "job.jsonl"
    file.write_text("\n".join([*strange, json.dumps(whole)]), encoding="utf-8")
    assert chosen(read_files([file]), "").lines == 1
    file.write_text("\n".join(strange), encoding="utf-8")
    assert main(["report", str(file)]) == 1
    assert "LOSSYCOLL_METRICS=/path/job.jsonl" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
    two = written(tmp_path / "two.jsonl", line(1), line(1, "cd"))
    assert main(["report", str(two)]) == 1
    assert "--session: ab, cd" in capsys.readouterr().err
    assert chosen(read_files([two]), "cd").session == "cd"
    assert main(["report", str(two), "--session", "ef"]) == 1
    assert findings(chosen(read_files([written(file, line(0))]), "")) != []


def test_a_wait_ends_at_once(tmp_path: Path) -> None:
    """A rank in no call waits for nothing, also between two waits."""
    lines = [line(step) for step in range(5)]
    for one in lines[1:4]:
        one["ranks"][0] |= {"call": None, "call_seconds": None, "waits_for": []}
    job = chosen(read_files([written(tmp_path / "job.jsonl", *lines)]), "")
    (waits,) = (one.series["rank 0"] for one in charts_of(job) if one.title.startswith("Wait"))
    assert [value > 0 for _, value in waits] == [True, False, False, False, True]


def test_names_of_ranks_cannot_change_the_page(tmp_path: Path) -> None:
    bad = line(1)
    bad["ranks"][0]["host"] = "<script>alert(1)</script>"
    page = tmp_path / "page.html"
    assert main(["report", str(written(tmp_path / "a", bad)), "--output", str(page)]) == 0
    assert "<script>" not in page.read_text(encoding="utf-8")


def test_one_process_of_a_machine_appends_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "FIRST_SECONDS", 0.02)
    monkeypatch.setattr(metrics, "LOOK_SECONDS", 0.01)
    over = threading.Event()
    records: list[Record] = [record(0, 7), record(1, 7)]
    files = [tmp_path / f"{process}.jsonl" for process in (0, 1)]
    for process, file in enumerate(files):
        metrics.Exporter(
            str(file), process, sealed=False, read=lambda: records, is_over=over.is_set
        ).start()  # fmt: skip
    until(lambda: files[0].exists() and files[0].read_text().count("\n") > 2)
    over.set()
    until(lambda: not any(t.name == "lossycoll-metrics" for t in threading.enumerate()))
    job = chosen(read_files(files[:1]), "")
    assert sorted(job.ranks) == [0, 1]
    assert not files[1].exists()
    assert files[0].stat().st_mode & 0o777 == 0o600


def test_nothing_is_drawn_across_times_without_packets(tmp_path: Path) -> None:
    """A job that waits misses nothing, and its last share isn't the one of the time between."""
    lines = [line(step) for step in (1, 2, 2, 3)]
    for number, one in enumerate(lines):
        one["time"] = 1000.0 + number
    job = chosen(read_files([written(tmp_path / "job.jsonl", *lines)]), "")
    (chart,) = (one for one in charts_of(job) if one.title.startswith("Missing"))
    shares = [share for _, share in chart.series["rank 1"]]
    assert shares[0] == shares[2] == 0.1
    assert math.isnan(shares[1])
    assert main(["report", str(tmp_path / "job.jsonl"), "--output", str(tmp_path / "p.html")]) == 0


def test_series_of_a_line_are_bounded() -> None:
    one = record(0, 7)
    many = replace(one, world=1000, peers=tuple(map(peer, range(1000))))
    (rank,) = metrics.line_of([many], 0.0)["ranks"]
    assert len(rank["link"]) == metrics.MOST_LINKS


def test_dead_links_and_ranks_whose_machine_went_silent_are_found(tmp_path: Path) -> None:
    """No rank on the machine of a killed one tells of it, and a dead link has no known loss."""
    lines = [line(step) for step in range(STEPS)]
    for one in lines[20:]:
        one["ranks"] = one["ranks"][:1]  # rank 1 was killed
    lines[5]["ranks"][0]["link"][0]["trouble"] = "nothing comes"
    del lines[6]["ranks"][0]["link"][0]["trouble"]  # as 0.1 wrote
    found = findings(chosen(read_files([written(tmp_path / "job.jsonl", *lines)]), ""))
    assert "rank 1 told nothing in the last 20.0 s: had it ended?" in found
    assert "link from rank 1 to rank 0: was dead" in found
    assert not any("rank 0 told nothing" in one for one in found)
