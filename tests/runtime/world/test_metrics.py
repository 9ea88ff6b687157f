"""Metrics for Prometheus: names, bounded series, who tells, and the dashboard that draws them."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the package prometheus_client isn't installed")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lossycoll.runtime.engine import status_page
from lossycoll.runtime.world import metrics
from tests.runtime.world.test_job_status import peer, record
from tests.support.waiting import until

DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "grafana.json"
RECORDS = [record(0, 7), record(1, 6, waits=False), record(2, 7, state=status_page.STOPPED)]


def told(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by metric and labels."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def text_of(records: list[Any]) -> str:
    registry = CollectorRegistry()
    registry.register(metrics.JobCollector(lambda: records))
    return generate_latest(registry).decode()


def test_figures_are_told_by_rank_and_link() -> None:
    found = told(text_of(RECORDS))
    assert found["lossycoll_packets_missing_total"] == {("0",): 1, ("1",): 1, ("2",): 1}
    assert found["lossycoll_rank_state"]["2", "stopped"] == 1
    assert found["lossycoll_rank_state"]["2", "alive"] == 0
    assert found["lossycoll_call_seconds"] == {("0",): 2.0, ("1",): 0.0, ("2",): 2.0}
    assert found["lossycoll_waited_for"]["1",] == 2
    assert found["lossycoll_link_loss_ratio"]["3", "0"] == 0.2
    assert ("ab", "4") in found["lossycoll_job_info"]
    assert told(text_of([])) == {}


def test_names_and_units_are_as_prometheus_has_them() -> None:
    for name in told(text_of(RECORDS)):
        assert re.fullmatch(r"lossycoll_[a-z_]+", name)
        assert not re.search(r"_(ms|us|ns|kb|mb|percent)\b", name)


def test_series_are_bounded() -> None:
    many = replace(record(0, 7), world=1000, peers=tuple(map(peer, range(1000))))
    found = told(text_of([many]))
    assert len(found["lossycoll_link_loss_ratio"]) == metrics.MOST_LINKS
    assert sum(map(len, found.values())) < 300


def test_the_dashboard_is_one_and_draws_what_is_told() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert isinstance(dashboard["schemaVersion"], int)
    assert {"title", "uid", "panels", "templating", "time"} <= dashboard.keys()
    numbers, places = set(), set()
    names = set(told(text_of(RECORDS)))
    for panel in dashboard["panels"]:
        assert panel["type"] == "timeseries"
        assert panel["title"]
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        numbers.add(panel["id"])
        places.add((place["x"], place["y"]))
        for target in panel["targets"]:
            used = set(re.findall(r"lossycoll_\w+", target["expr"]))
            assert used
            assert used <= names, used - names
            assert target["refId"]
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert len(numbers) == len(places) == len(dashboard["panels"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "lossycoll-metrics"]


def test_one_process_serves_until_the_job_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LOOK_SECONDS", 0.01)
    port, over = _free_port(), threading.Event()
    for process in (0, 1):  # the second one finds the port taken
        metrics.tell(
            f"127.0.0.1:{port}", process, sealed=True, read=lambda: RECORDS, is_over=over.is_set
        )
    until(lambda: len(_threads()) == 1)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert "lossycoll_operations_total" in answer.read().decode()
    over.set()
    until(lambda: not _threads())
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_the_lowest_process_of_a_machine_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(metrics, "FILE_SECONDS", 0.02)
    over = threading.Event()
    for process in (0, 1):
        file = str(tmp_path / f"{process}.prom")
        metrics.tell(file, process, sealed=False, read=lambda: RECORDS, is_over=over.is_set)
    until((tmp_path / "0.prom").exists)
    over.set()
    until(lambda: not _threads())
    assert told((tmp_path / "0.prom").read_text())["lossycoll_job_info"]
    assert not (tmp_path / "1.prom").exists()
