"""A doctor that asks a running job: its control ports, and what its ranks measure."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from lossycoll.cli import status
from lossycoll.cli.doctor.checks import Severity
from lossycoll.cli.doctor.peer import control, job
from lossycoll.cli.main import main
from tests.support.harness import Ranks, free_port, init, note
from tests.support.waiting import until

SECRET = "a secret of tests"
HEALTHY = ["job", "TCP (control)", "rank 0 to rank 1", "rank 1 to rank 0"]


def rank_goes_deaf(rank: int, world: int) -> None:
    """Rank 1 hears nothing of rank 0 from its parent's word on."""
    import torch
    import torch.distributed as dist

    import lossycoll
    from tests.support.deaf_sockets import drop_from

    def reached(step: str) -> None:
        note(step)
        until((folder / step).exists)

    folder = Path(os.environ["GO"])
    init(60)
    port = int(lossycoll.stats().peers[1 - rank].address.rpartition(":")[2])
    dist.all_reduce(torch.ones(100_000))
    dist.barrier()
    reached("healthy")
    if rank == 1:
        assert drop_from([port])
    for _ in range(3):
        dist.all_reduce(torch.ones(100_000))
    until(lambda: any(peer.silence for peer in lossycoll.stats().peers))
    reached("deaf")
    if rank == 1:
        drop_from([])


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code = main(["doctor", *words, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is (code == 0)
    assert answer["options"] == {}
    return {one["name"]: one for one in answer["checks"]}


def test_a_running_job_tells_of_its_ports_and_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(control, "HELLO_SECONDS", 0.5)
    env = {
        "XDG_RUNTIME_DIR": str(tmp_path),
        "GO": str(tmp_path),
        "LOSSYCOLL_LINK": "udp",
        "LOSSYCOLL_SECRET": SECRET,
        "LOSSYCOLL_DEADLINE_MAX": "1",
    }
    with Ranks(rank_goes_deaf, 2, env) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "healthy")
        monkeypatch.setenv("LOSSYCOLL_SECRET", SECRET)
        place = status.find_jobs(None)[0]["ranks"][1]["control"]
        host, _, port = place.rpartition(":")
        checks = told(capsys, "--peer", place)
        assert list(checks) == HEALTHY
        assert f"2 ranks; `lossycoll status {place}` tells more" in checks["job"]["found"]
        assert checks["TCP (control)"]["found"].startswith("all 2 ports of the ranks")
        for name in HEALTHY[2:]:
            assert checks[name]["found"].startswith("round trip "), checks
            assert " lost, " in checks[name]["found"]
        (one,) = told(capsys, "--peer", host, "--peer-port", port).values()
        assert one["found"].endswith(f"--peer {place}"), "who looks for a doctor asks no job"
        monkeypatch.delenv("LOSSYCOLL_SECRET")
        (one,) = told(capsys, "--peer", place).values()
        assert one["status"] == "fail"
        assert "has a secret (LOSSYCOLL_SECRET)" in one["found"]
        monkeypatch.setenv("LOSSYCOLL_SECRET", SECRET)
        (tmp_path / "healthy").touch()
        for rank in range(2):
            ranks.wait_for(rank, "deaf")

        def is_told() -> object:
            checks = told(capsys, "--peer", place)
            dead, good = (checks[name] for name in HEALTHY[2:])
            assert checks["TCP (control)"]["status"] == "ok"
            return dead["status"] == "fail" and "unknown" in good["found"]

        until(is_told)
        dead, good = (told(capsys, "--peer", place)[name] for name in HEALTHY[2:])
        assert dead["found"].startswith(("nothing arrives there; ", "nothing comes; "))
        assert " 100.00% lost" in dead["found"]
        assert "pass UDP" in dead["advice"]
        assert good["found"] == "loss unknown, as nothing comes back"
        (tmp_path / "deaf").touch()
        assert [one.error for one in ranks.collect(90)] == ["", ""]


def test_ports_that_are_closed_and_ranks_that_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = ("127.0.0.1", free_port())
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer: Any = "0123456789abcdef", (server.getsockname(), closed), []
        monkeypatch.setattr(status, "ask", lambda place: answer)
        found = {one.name: one for one in job.examine("127.0.0.1:1")}
    reached = found["TCP (control)"]
    assert reached.status is Severity.FAIL
    named = f"not rank 1 at 127.0.0.1:{closed[1]} (connection refused)"
    assert reached.found == f"1 of 2 ports are reached from here; {named}"
    assert found["links"].status is Severity.WARN
    assert "LOSSYCOLL_STATUS=off" in found["links"].advice


def test_ports_of_many_ranks_are_tried_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    async def connect(host: str, port: int) -> Any:
        opened.append(len(opened) - closed.call_count)
        await asyncio.sleep(0)
        if port == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return None, writer

    closed = Mock()
    writer = Mock(close=closed, wait_closed=AsyncMock(side_effect=ConnectionResetError))
    monkeypatch.setattr(asyncio, "open_connection", connect)
    assert asyncio.run(job._try([("h", 2)] * 500)) == [""] * 500
    assert max(opened) < job.MOST_CONNECTIONS
    troubles = asyncio.run(job._try([("h", 1), ("h", 2)]))
    assert troubles == ["too many open files", ""]
    found = job._reached([(7, ("127.0.0.1", 1))] * 2, troubles)
    assert found.status is Severity.OK, "no firewall did it"
    assert "may open no more files" in found.found
    found = job._reached([(7, ("127.0.0.1", 1))], ["no answer"])
    assert found.found.endswith("; not rank 7 at 127.0.0.1:1 (no answer)")


def test_the_worst_links_of_many_have_lines_and_the_dead_are_no_wonder() -> None:
    def link(rank: int, loss: float, trouble: str = "", by: str = "udp") -> dict[str, Any]:
        figures = {"loss": loss, "rtt_seconds": 0.002, "queue_seconds": 0.0}
        return {"rank": rank, "by": by, "trouble": trouble, **figures}

    links = [link(1, 0.0, by="shared_memory"), link(2, 0.0, "nothing arrives there")]
    links += [link(3 + n, n / 1000) for n in range(40)]
    ranks = [{"rank": rank, "state": "alive", "link": []} for rank in range(43)]
    ranks[0]["link"] = links
    found = list(job._links({"ranks": ranks}))
    assert (found[0].name, found[0].status) == ("rank 0 to rank 2", Severity.FAIL)
    assert found[1].found == "round trip 2.0 ms, 3.90% lost, 0.0 ms in queues"
    assert found[1].name == "rank 0 to rank 42"
    assert "bring" in found[1].advice
    assert len(found) == job.MOST_LINKS + 1
    assert found[-1].found.startswith("9 more")
    links[1]["trouble"] = "no data comes"
    first = next(iter(job._links({"ranks": ranks})))
    assert first.name == "rank 2 to rank 0"
    assert first.found == "no data comes; rank 2 tells nothing of it"
    links[1]["trouble"] = "nothing arrives there"
    ranks[2]["state"] = "dead"
    assert all(one.status is not Severity.FAIL for one in job._links({"ranks": ranks}))
    first = next(iter(job._links({"ranks": ranks}, lost={2})))
    assert (first.status, first.found[-14:]) == (Severity.FAIL, "rank 2 is dead")
    ranks[2]["state"] = "left"
    assert all(one.status is not Severity.FAIL for one in job._links({"ranks": ranks}, lost={2}))
    ranks[0]["link"] = links[1:3]
    (fine, left) = job._links({"ranks": ranks})
    assert (fine.status, left.found[-15:]) == (Severity.OK, "rank 2 has left")
    links[1]["trouble"], ranks[2]["state"] = "", "silent"
    (silent, fine) = job._links({"ranks": ranks})
    assert (silent.status, silent.found[-16:]) == (Severity.WARN, "rank 2 is silent")
    ranks[0]["link"] = links[:1]
    assert [one.found for one in job._links({"ranks": ranks})] == [
        "none between hosts: the ranks share memory"
    ]
