"""The log: one line per event, whose fields can be read back, at the level that was asked for."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest

from lossycoll.errors import PeerLostError
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


class Kind(IntEnum):
    ONE = 1


def test_a_records_fields_are_what_json_has(caplog: pytest.LogCaptureFixture) -> None:
    where = Where(1, 4, group="mesh_tp")
    with caplog.at_level(logging.INFO, "lossycoll"):
        logfmt.event(
            logging.INFO,
            where,
            "failed",
            why=PeerLostError("lost rank 2", peer=2),
            kind=Kind.ONE,
            ranks=(1, 2),
            share=np.float64(0.5),
            count=np.int64(3),
            at=Path("/tmp"),
            of={1: {2}, "none": None, "yes": True},
        )
    (record,) = caplog.records
    fields = vars(record)["fields"]
    assert json.loads(json.dumps(fields)) == fields
    assert fields == {
        "rank": 1,
        "world": 4,
        "event": "failed",
        "why": "lost rank 2",
        "kind": 1,
        "ranks": [1, 2],
        "share": 0.5,
        "count": 3,
        "at": "/tmp",
        "of": {"1": [2], "none": None, "yes": True},
        "group": "mesh_tp",
    }
    assert all(type(value) in (str, int, float, list, dict) for value in fields.values())
    assert 'why="lost rank 2"' in record.getMessage()


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


PREFIX = " lossycoll: "


def logged(outcome: Outcome) -> list[dict[str, str]]:
    assert not outcome.error, str(outcome)
    told = [line.partition(PREFIX) for line in outcome.stderr.splitlines() if PREFIX in line]
    for time, _, _ in told:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}", time)
    return [fields(line) for _, _, line in told]


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


def rank_mesh(rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import lossycoll

    init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with lossycoll.reliable(wire="int8"):
        for _ in range(2):
            dist.all_reduce(torch.ones(60_000), group=mesh.get_group("tp"))


@pytest.mark.parametrize("level", ["info", "debug"])
def test_a_meshs_groups_are_debug_and_name_themselves(level: str) -> None:
    for outcome in run_ranks(rank_mesh, 4, {"LOSSYCOLL_LOG": level}):
        assert not outcome.error, outcome
        lines = [line for line in outcome.stderr.splitlines() if "event=ready" in line]
        ready = [fields(line.partition(PREFIX)[2]) for line in lines]
        assert ready[0]["group"] == "0"
        assert "ranks" not in ready[0]
        row, column = outcome.rank % 2, outcome.rank // 2
        inner = [f"{row},{row + 2}", f"{2 * column},{2 * column + 1}"]
        assert [one["ranks"] for one in ready[1:]] == (inner if level == "debug" else [])
        assert len({one["group"] for one in ready}) == len(ready)
        told = outcome.stderr.count("wire=int8 changes nothing here: all ranks share a host")
        assert told == (outcome.rank in (0, 2)), outcome.stderr
