"""The log: one line per event, whose fields can be read back, at the level that was asked for."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator

import pytest

from lossycoll.options.fields import Options
from lossycoll.runtime.core import logfmt
from lossycoll.runtime.engine.failures import Where
from tests.support.harness import Outcome, init, run_ranks

WHERE = Where(1, 4)


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    level, handlers = logfmt.log.level, list(logfmt.log.handlers)
    yield
    logfmt.log.setLevel(level)
    logfmt.log.handlers[:] = handlers


def fields(line: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in shlex.split(line))


def test_values_are_quoted_where_they_have_to_be() -> None:
    line = logfmt.line({"a": 1, "b": 0.12345678, "c": "two words", "d": "", "e": 'a="b"\n'})
    assert line == r'a=1 b=0.123457 c="two words" d="" e="a=\"b\"\n"'


def test_an_event_is_a_line_and_has_its_fields_as_data(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lossycoll"):
        logfmt.event(logging.INFO, WHERE, "failed", seq=3, why="no reason")
        logfmt.event(logging.DEBUG, WHERE, "begin", seq=4)
    (record,) = caplog.records
    assert record.getMessage() == 'rank=1 world=4 event=failed seq=3 why="no reason"'
    assert vars(record)["fields"] == {
        "rank": 1,
        "world": 4,
        "event": "failed",
        "seq": 3,
        "why": "no reason",
    }


@pytest.mark.parametrize(
    ("given", "torchs", "level"),
    [
        ({}, "", logging.INFO),
        ({}, "INFO", logging.INFO),
        ({}, "DETAIL", logging.DEBUG),
        ({"log": "warning"}, "DETAIL", logging.WARNING),
        ({"log": "debug"}, "", logging.DEBUG),
        ({"log": "off"}, "DETAIL", logging.CRITICAL + 1),
    ],
)
def test_the_level_is_the_options_or_else_that_of_torch(
    given: dict[str, str], torchs: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", torchs)
    logfmt.show(Options(**given))
    assert logfmt.log.level == level


def rank_logs(rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    import lossycoll

    init()
    dist.all_reduce(torch.ones(60_000))
    dist.broadcast(torch.ones(3), 1)
    with pytest.raises(lossycoll.MismatchError):
        dist.all_reduce(torch.ones(10 + rank))


def logged(outcome: Outcome) -> list[dict[str, str]]:
    assert not outcome.error, str(outcome)
    prefix = "lossycoll: "
    lines = [line for line in outcome.stderr.splitlines() if line.startswith(prefix)]
    return [fields(line.removeprefix(prefix)) for line in lines]


@pytest.mark.parametrize("env", [{"LOSSYCOLL_LOG": "debug"}, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}])
def test_debug_tells_of_each_operation_and_of_the_failure(env: dict[str, str]) -> None:
    inject = {"LOSSYCOLL_INJECT": "loss=0.2,seed=7", "LOSSYCOLL_MTU": "1500"}
    for outcome in run_ranks(rank_logs, 2, {**env, **inject}):
        found = logged(outcome)
        assert {(one["rank"], one["world"]) for one in found} == {(str(outcome.rank), "2")}
        (ready,) = [one for one in found if one["event"] == "ready"]
        assert ready["address"].startswith("127.0.0.1:")
        assert ready["inject"] == inject["LOSSYCOLL_INJECT"]
        reduced = [
            one for one in found if one.get("call") == "all_reduce float32[60000] SUM (lossy)"
        ]
        assert [one["event"] for one in reduced] == ["begin", "end"]
        begin, end = reduced
        streams = [one for one in found if one["event"] == "stream" and one["op"] == end["op"]]
        assert [one["peer"] for one in streams] == [str(1 - outcome.rank)] * 2
        short = sum(int(one["packets"]) - int(one["arrived"]) for one in streams)
        assert short == int(end["missing"])
        for one in streams:
            times = [float(one[name]) for name in ("first", "last", "end")]
            assert 0 < times[0] <= times[1] <= times[2] <= float(end["seconds"]) * 1.001
            assert float(one["gap"]) <= times[1]
            lossy = int(one["arrived"]) < int(one["packets"])
            assert one["cause"] == ("LOSS" if lossy else "COMPLETE")
        assert begin["seq"] == end["seq"]
        assert begin["op"] == end["op"]
        assert begin["ranks"] == "2"
        assert end["code"] == "OK"
        assert int(end["missing"]) > 0, "nothing was lost"
        assert float(end["seconds"]) > 0
        (failed,) = [one for one in found if one["event"] == "failed"]
        assert failed["type"] == "MismatchError"
        assert "float32[10]" in failed["why"]
        assert "float32[11]" in failed["why"]


def test_info_tells_of_groups_only() -> None:
    for outcome in run_ranks(rank_logs, 2):
        assert [one["event"] for one in logged(outcome)] == ["ready", "failed"]
