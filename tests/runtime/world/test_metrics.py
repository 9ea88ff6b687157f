"""Metrics for Prometheus: names, bounded series, who tells, and the dashboard that draws them."""

from __future__ import annotations

import json
import os
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
from lossycoll.runtime.world.rank_states import RankState
from tests.runtime.world.test_job_status import peer, record, with_peer
from tests.support.waiting import until

DOCS = Path(__file__).resolve().parents[3] / "docs"
DASHBOARD, ALERTS, PAGE = DOCS / "grafana.json", DOCS / "alerts.yaml", DOCS / "monitor.md"
DEAD_LINK = with_peer(record(0, 7), 2, silence=2)
RECORDS = [DEAD_LINK, record(1, 6, waits=False), record(2, 7, state=status_page.STOPPED)]


def told(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by metric and labels."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def text_of(records: list[Any]) -> str:
    registry = CollectorRegistry()
    exporter = metrics.Exporter("", 0, sealed=True, read=lambda: records, is_over=lambda: False)
    registry.register(exporter)  # type: ignore[arg-type]
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
    assert found["lossycoll_dead_ranks"] == {("ab",): 0}
    assert told(text_of([])) == {}


def test_a_dead_link_and_a_dead_rank_of_another_machine_are_told() -> None:
    """Nothing tells the loss of a link that brings nothing, and a dead machine tells nothing."""
    assert "lossycoll_link_trouble" not in told(text_of([record(0, 7)]))
    here = with_peer(DEAD_LINK, 3, state=RankState.LOST)
    found = told(text_of([here]))
    assert found["lossycoll_link_trouble"] == {("2", "0", "nothing arrives there"): 1}
    assert found["lossycoll_dead_ranks"] == {("ab",): 1}
    (rank,) = metrics.line_of([here], 5.0)["ranks"]
    assert [link["rank"] for link in rank["link"] if link["trouble"]] == [2]


def test_names_and_units_are_as_prometheus_has_them() -> None:
    for name in told(text_of(RECORDS)):
        assert re.fullmatch(r"lossycoll_[a-z_]+", name)
        assert not re.search(r"_(ms|us|ns|kb|mb|percent)\b", name)


def test_series_are_bounded() -> None:
    many = replace(record(0, 7), world=1000, peers=tuple(map(peer, range(1000))))
    found = told(text_of([many]))
    assert len(found["lossycoll_link_loss_ratio"]) == metrics.MOST_LINKS
    assert sum(map(len, found.values())) < 300


def _labels() -> dict[str, set[str]]:
    """Labels by metric, as prometheus_client tells them."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text_of(RECORDS)):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_dashboard_is_one_and_draws_what_is_told() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert isinstance(dashboard["schemaVersion"], int)
    assert {"title", "uid", "panels", "templating", "time", "annotations"} <= dashboard.keys()
    (variable,) = dashboard["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    source = {"type": "prometheus", "uid": f"${{{variable['name']}}}"}
    numbers, places, drawn = set(), set(), set()
    labels = _labels()
    for panel in dashboard["panels"]:
        assert panel["type"] == "timeseries"
        assert panel["title"]
        assert {"legend", "tooltip"} <= panel["options"].keys()
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        numbers.add(panel["id"])
        places.add((place["x"], place["y"]))
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        for target in panel["targets"]:
            used = set(re.findall(r"lossycoll_\w+", target["expr"]))
            assert used
            assert used <= labels.keys(), used - labels.keys()
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown
            for name in used:
                assert shown <= labels[name], (name, shown)
            assert target["datasource"] == panel["datasource"] == source
        drawn |= used
    assert len(numbers) == len(places) == len(dashboard["panels"])
    assert {"lossycoll_waited_for", "lossycoll_link_loss_ratio"} <= drawn


def test_links_are_drawn_in_the_direction_that_is_told() -> None:
    """A figure of a link is of the path from ``rank`` to ``peer``."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    legends = [one["legendFormat"] for one in targets if "lossycoll_link_" in one["expr"]]
    # A dead link's trouble says itself which direction it is of.
    assert legends == [*["{{rank}} to {{peer}}"] * 3, "{{rank}} and {{peer}}: {{trouble}}"]


def _kept_by_grafana(given: Any, kept: Any, where: str = "") -> None:
    """Whatever Grafana's own types don't know, they drop."""
    if isinstance(given, dict):
        assert given.keys() <= kept.keys(), (where, given.keys() - kept.keys())
        for name, value in given.items():
            _kept_by_grafana(value, kept[name], f"{where}/{name}")
    elif isinstance(given, list):
        assert len(given) == len(kept), where
        for number, value in enumerate(given):
            _kept_by_grafana(value, kept[number], f"{where}/{number}")
    else:
        assert given == kept, where


def test_the_dashboard_has_grafanas_schema() -> None:
    """By the types that Grafana generates from its schemas."""
    package, reason = "grafana_foundation_sdk", "Grafana's types aren't installed"
    plugins: Any = pytest.importorskip(f"{package}.cog.plugins", reason=reason)
    encoder: Any = pytest.importorskip(f"{package}.cog.encoder", reason=reason)
    models: Any = pytest.importorskip(f"{package}.models.dashboard", reason=reason)
    timeseries: Any = pytest.importorskip(f"{package}.models.timeseries", reason=reason)
    prometheus: Any = pytest.importorskip(f"{package}.models.prometheus", reason=reason)
    plugins.register_default_plugins()
    text = DASHBOARD.read_text(encoding="utf-8")

    def kept(given: Any) -> Any:
        return json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(given)))

    dashboard = models.Dashboard.from_json(json.loads(text))
    assert dashboard.panels
    for panel in dashboard.panels:
        assert isinstance(panel.options, timeseries.Options)
        for target in panel.targets:
            assert isinstance(target, prometheus.Dataquery)
    _kept_by_grafana(json.loads(text), kept(json.loads(text)))
    wrong = json.loads(text)
    wrong["panels"][0]["fieldConfigs"] = wrong["panels"][0].pop("fieldConfig")
    with pytest.raises(AssertionError, match="fieldConfigs"):
        _kept_by_grafana(wrong, kept(json.loads(json.dumps(wrong))))


def _queries() -> list[str]:
    """Queries of the dashboard, of the alert rules, and of the page about both."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    drawn = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = re.findall(r"^ +expr: (.+)$", ALERTS.read_text(encoding="utf-8"), re.MULTILINE)
    table = (
        PAGE.read_text(encoding="utf-8").partition("| question | query |")[2].partition("\n\n")[0]
    )
    asked = [
        found for found in re.findall(r"`([^`]+)`", table) if re.search("lossycoll_|up{", found)
    ]
    return drawn + rules + asked


def test_queries_ask_for_what_is_told() -> None:
    told = _labels().keys() | {"up"}
    queries = _queries()
    assert len(queries) > 20
    for query in queries:
        assert set(re.findall(r"\b(?:lossycoll_\w+|up)\b", query)) <= told, query


def test_alerts_of_the_page_are_those_of_the_rules() -> None:
    rules = re.findall(r"alert: (\w+)", ALERTS.read_text(encoding="utf-8"))
    table = PAGE.read_text(encoding="utf-8").partition("| alert | fires when |")[2]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE)[: len(rules)] == rules


def test_queries_are_promql() -> None:
    promql = pytest.importorskip("promql_parser", reason="it isn't installed")
    for query in _queries():
        promql.parse(query)
    with pytest.raises(ValueError, match="unclosed"):
        promql.parse("sum(rate(lossycoll_bytes_sent_total[1m])")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "lossycoll-metrics"]


def _connects(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_one_process_serves_until_the_job_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "LOOK_SECONDS", 0.01)
    port, over = _free_port(), threading.Event()
    monkeypatch.setattr(metrics, "RETRY_SECONDS", 0.02)

    def text() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    first_over = threading.Event()
    for process, ends in enumerate((first_over, over)):  # the second one finds the port taken
        metrics.Exporter(
            f"127.0.0.1:{port}", process, sealed=True, read=lambda: RECORDS, is_over=ends.is_set
        ).start()
        until(lambda: _connects(port))
    assert "lossycoll_operations_total" in text()
    first_over.set()  # as if that rank had died
    until(lambda: len(_threads()) == 1)
    until(lambda: _connects(port))
    assert "lossycoll_operations_total" in text()
    assert not caplog.records
    over.set()
    until(lambda: not _threads())
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_port_that_another_program_has_is_told_once_and_taken_when_it_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(metrics, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(metrics, "ANSWER_SECONDS", 0.1)
    port, over = _free_port(), threading.Event()
    try:
        with socket.create_server(("127.0.0.1", port)):  # it never answers
            for process in (0, 1):
                metrics.Exporter(
                    f"127.0.0.1:{port}",
                    process,
                    sealed=True,
                    read=lambda: RECORDS,
                    is_over=over.is_set,
                ).start()
            until(lambda: bool(caplog.records), seconds=20)
        until(lambda: metrics._tells("127.0.0.1", port, "ab"))
    finally:
        over.set()  # or the threads would stay
    until(lambda: not _threads())
    (only,) = caplog.records
    assert "another program, or another job, has the port" in only.getMessage()


def test_the_lowest_process_of_a_machine_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(metrics, "FILE_SECONDS", 0.02)
    over = threading.Event()
    for process in (0, 1):
        file = str(tmp_path / f"{process}.prom")
        metrics.Exporter(
            file, process, sealed=False, read=lambda: RECORDS, is_over=over.is_set
        ).start()
    until((tmp_path / "0.prom").exists)
    over.set()
    until(lambda: not _threads())
    assert told((tmp_path / "0.prom").read_text())["lossycoll_job_info"]
    assert not (tmp_path / "1.prom").exists()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(metrics, "FILE_SECONDS", 0.02)
    monkeypatch.setattr(metrics, "FIRST_SECONDS", 0.02)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("state", [status_page.DEAD, status_page.STOPPED])
@pytest.mark.parametrize("name", ["job.prom", "job.jsonl"])
def test_the_next_process_writes_where_the_lowest_does_not_run(
    name: str, state: str, tmp_path: Path
) -> None:
    records, over = [record(0, 7, state=state), record(1, 7)], threading.Event()
    file = tmp_path / name
    metrics.Exporter(str(file), 1, sealed=False, read=lambda: records, is_over=over.is_set).start()
    try:
        until(lambda: file.exists() and file.stat().st_size)
    finally:
        over.set()
        until(lambda: not _threads())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["job.prom", "job.jsonl"])
def test_a_file_that_can_not_be_written_is_told_once_and_tried_again(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    over, file = threading.Event(), tmp_path / "away" / name
    metrics.Exporter(str(file), 0, sealed=False, read=lambda: RECORDS, is_over=over.is_set).start()
    try:
        until(lambda: bool(caplog.records))
        file.parent.mkdir()
        until(lambda: len(caplog.records) > 1)
    finally:
        over.set()
        until(lambda: not _threads())
    assert file.stat().st_size
    first, last = (one.getMessage() for one in caplog.records)
    assert first.startswith(f"metrics can't be written to {file}: No such file or directory")
    assert last == f"metrics are written to {file} again"


def test_a_line_that_was_cut_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a disk that has become full."""
    file, write = tmp_path / "job.jsonl", os.write
    lines = metrics.Exporter(
        str(file), 0, sealed=False, read=lambda: RECORDS, is_over=lambda: False
    )
    lines._add_line(RECORDS)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda end, data: write(end, data[:40]))
        with pytest.raises(OSError, match="No space left"):
            lines._add_line(RECORDS)
    lines._add_line(RECORDS)
    first, cut, last = file.read_text().splitlines()
    assert len(cut) == 40
    assert json.loads(first)["session"] == json.loads(last)["session"] == "ab"
