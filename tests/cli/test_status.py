"""A job seen from outside: ranks that are late, stopped, killed or hold the GIL; and strangers."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lossycoll.cli.main import EXIT_USAGE, main
from lossycoll.cli.status import Unreachable, as_text, find_jobs
from tests.support.command_line import run_lossycoll
from tests.support.harness import Ranks, free_port, init, note
from tests.support.waiting import until

WORLD = 4
LATE = 2
HAS_METRICS = importlib.util.find_spec("prometheus_client") is not None
SECRET = "a secret of tests"
Job = dict[str, Any]


def rank_waits(rank: int, world: int) -> str:
    """Calls, then one more, for which the late rank takes until its parent lets it."""
    import torch
    import torch.distributed as dist

    from lossycoll.errors import LossyError

    init(float(os.environ.get("PATIENCE", "60")))
    t = torch.ones(20_000)
    for _ in range(5):
        dist.all_reduce(t)
    dist.barrier()
    note("all are here")
    if rank == LATE or world == 2:
        _be_late(os.environ.get("HOW", "sleeps"))
    try:
        dist.all_reduce(t)
        dist.barrier()
    except LossyError as error:
        return type(error).__name__
    dist.destroy_process_group()
    return ""


def _be_late(how: str) -> None:
    go = Path(os.environ["GO"])
    if how == "gil":
        import ctypes

        libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the GIL
        while not go.exists():
            libc.usleep(3_000_000)
    else:
        until(go.exists, seconds=120)


class Watched:
    """A job of ranks that wait for one; its pages are in a folder of its own."""

    def __init__(self, folder: Path, how: str = "sleeps", **env: str) -> None:
        self.go = folder / "go"
        self.ranks = Ranks(
            rank_waits,
            WORLD,
            {"XDG_RUNTIME_DIR": str(folder), "HOW": how, "GO": str(self.go), **env},
        )
        for rank in range(WORLD):
            self.ranks.wait_for(rank, "all are here")

    def until(self, holds: Callable[[Job], bool], place: str | None = None) -> Job:
        """The first status for which that holds."""
        found: list[Job] = []

        def look() -> bool:
            found[:] = find_jobs(place)
            return bool(found) and holds(found[0])

        until(look)
        return found[0]

    def waits(self, *, but: tuple[int, ...] = (LATE,)) -> Job:
        """The status once all others wait."""
        others = [rank for rank in range(WORLD) if rank not in but]
        return self.until(lambda job: all(job["ranks"][rank]["call"] for rank in others))

    def end(self, but: tuple[int, ...] = ()) -> list[str]:
        self.go.touch()
        ended = self.ranks.collect(90, but)
        assert [one.error for one in ended] == [""] * len(ended), [str(one) for one in ended]
        return [one.value for one in ended]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def _waits_for(job: Job) -> list[list[int]]:
    return [rank["waits_for"] for rank in job["ranks"]]


def _told_by_the_command(place: str) -> None:
    said = run_lossycoll("status", place, "--json", "--stacks")
    assert said.returncode == 0, said.stderr
    ranks = json.loads(said.stdout)["jobs"][0]["ranks"]
    assert [rank["waits_for"] for rank in ranks] == [[LATE], [LATE], [], [LATE]]
    assert "_be_late" in ranks[LATE]["stacks"]
    assert "all_reduce" in ranks[0]["stacks"]
    assert not any("thread lossycoll-" in (rank["stacks"] or "") for rank in ranks)


def _told_by_the_log(ranks: Ranks) -> None:
    """Each rank that waits logs a line, and again after twice the time."""
    for rank in (0, 1, 3):
        until(lambda rank=rank: len(_lines(ranks, rank)) > 1, seconds=60)  # type: ignore[misc]
        first, second = _lines(ranks, rank)[:2]
        assert 'call="all_reduce float32[20000] SUM (lossy)"' in first
        assert f" waits_for={LATE} " in first
        assert f"rank {LATE} is alive, in no call; its last one" in first
        assert "in _be_late" in first or "in until" in first
        assert _seconds(first) >= 0.5
        assert _seconds(second) >= 2 * _seconds(first) - 0.11  # they are rounded
    assert not _lines(ranks, LATE)


def _lines(ranks: Ranks, rank: int) -> list[str]:
    return [line for line in ranks.output(rank).splitlines() if "event=waits" in line]


def _seconds(line: str) -> float:
    return float(line.partition(" seconds=")[2].split()[0])


def _strangers_change_nothing(place: str) -> None:
    host, _, port = place.rpartition(":")
    open_ones = [socket.create_connection((host, int(port)), 5) for _ in range(100)]
    try:
        for one in open_ones[::2]:
            one.sendall(bytes(range(256)) * 3)
        found = find_jobs(place)[0]
    finally:
        for one in open_ones:
            one.close()
    assert _waits_for(found) == [[LATE], [LATE], [], [LATE]]


def _is_told_stopped_while_it_is(watched: Watched) -> None:
    watched.ranks.signal(1, signal.SIGSTOP)
    job = watched.until(lambda job: job["ranks"][1]["state"] == "stopped")
    assert _waits_for(job) == [[LATE], [LATE], [], [LATE]]
    by_port = find_jobs(job["ranks"][0]["control"])[0]
    assert by_port["ranks"][1]["state"] == "stopped"
    assert "rank 1 is stopped" in as_text([by_port])
    with pytest.raises(Unreachable, match="gives no answer"):
        find_jobs(job["ranks"][1]["control"])
    watched.ranks.signal(1, signal.SIGCONT)
    watched.until(lambda job: job["ranks"][1]["state"] == "alive")


def test_late_and_stopped_ranks_are_named_whatever_strangers_do(tmp_path: Path) -> None:
    watched = Watched(
        tmp_path,
        LOSSYCOLL_LIVENESS="60",
        LOSSYCOLL_WARN_AFTER="0.5",
        LOSSYCOLL_METRICS=f"127.0.0.1:{(port := free_port())}" if HAS_METRICS else "",
    )
    with watched.ranks:
        job = watched.waits()
        place = job["ranks"][0]["control"]
        for found in (job, find_jobs(place)[0], find_jobs(job["ranks"][LATE]["control"])[0]):
            assert _waits_for(found) == [[LATE], [LATE], [], [LATE]]
            assert [rank["state"] for rank in found["ranks"]] == ["alive"] * WORLD
            assert [rank["rank"] for rank in found["ranks"]] == list(range(WORLD))
            first, late = found["ranks"][0], found["ranks"][LATE]
            assert "all_reduce float32[20000]" in first["call"]
            assert late["call"] is None
            assert "barrier" in late["last_call"]["call"]
            assert first["call_number"] == late["last_call"]["call_number"] + 1
            assert [link["rank"] for link in first["link"]] == [1, 2, 3]
        assert f"rank {LATE}, which is alive: 3 wait for it" in as_text([job])
        _told_by_the_command(place)
        _told_by_the_log(watched.ranks)
        if HAS_METRICS:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                assert f'lossycoll_waited_for{{rank="{LATE}"}} 3.0' in answer.read().decode()
        _strangers_change_nothing(job["ranks"][1]["control"])
        _is_told_stopped_while_it_is(watched)
        assert watched.end() == [""] * WORLD
    assert find_jobs(None) == []


def test_a_killed_coordinator_is_dead_and_the_others_still_tell(tmp_path: Path) -> None:
    watched = Watched(tmp_path, LOSSYCOLL_ON_PEER_LOSS="continue")
    with watched.ranks:
        job = watched.waits()
        place = job["ranks"][3]["control"]
        watched.ranks.signal(0, signal.SIGKILL)
        watched.ranks.processes[0].wait()
        for found in (find_jobs(None)[0], find_jobs(place)[0]):
            assert [rank["state"] for rank in found["ranks"]] == ["dead", *["alive"] * 3]
            assert _waits_for(found)[1] == [LATE, 0] or _waits_for(found)[1] == [LATE]
        with pytest.raises(Unreachable, match="nobody can be reached"):
            find_jobs(job["ranks"][0]["control"])
        # Without its page, too, once the others have given it up.
        next((tmp_path / "lossycoll").glob("*.0.*")).unlink()
        told = watched.until(lambda job: not job["ranks"][0]["tells"], place)
        assert told["ranks"][0]["state"] in ("alive", "silent", "dead")
        watched.until(lambda job: job["ranks"][0]["state"] == "dead", place)
        assert watched.end(but=(0,)) == [""] * 3


def test_a_rank_that_holds_its_gil_is_told_of_and_nothing_without_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, "gil", LOSSYCOLL_LIVENESS="60", LOSSYCOLL_SECRET=SECRET)
    monkeypatch.setenv("LOSSYCOLL_SECRET", SECRET)
    with watched.ranks:
        job = watched.waits()
        place = job["ranks"][0]["control"]
        for found in (job, find_jobs(place)[0]):
            assert found["ranks"][LATE]["state"] == "alive"
            assert "barrier" in found["ranks"][LATE]["last_call"]["call"]
            assert _waits_for(found)[0] == [LATE]
        for other in (SECRET[::-1], None):
            if other is None:
                monkeypatch.delenv("LOSSYCOLL_SECRET")
            else:
                monkeypatch.setenv("LOSSYCOLL_SECRET", other)
            with pytest.raises(Unreachable, match="secret"):
                find_jobs(place)
        assert watched.end() == [""] * WORLD


def test_a_job_without_pages_says_so(tmp_path: Path) -> None:
    watched = Ranks(
        rank_waits,
        2,
        {
            "XDG_RUNTIME_DIR": str(tmp_path),
            "GO": str(tmp_path / "go"),
            "LOSSYCOLL_STATUS": "off",
            "LOSSYCOLL_PORT_RANGE": f"{(port := free_port())}-{port + 20}",
        },
    )
    with watched:
        for rank in range(2):
            watched.wait_for(rank, "all are here")
        assert find_jobs(None) == []
        with pytest.raises(Unreachable, match="LOSSYCOLL_STATUS=off"):
            _ask_first(port, 20)
        (tmp_path / "go").touch()
        assert all(one.error == "" for one in watched.collect(90))


def _ask_first(port: int, more: int) -> None:
    """Asks the first rank of a range of ports."""
    for one in range(port, port + more):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", one)) == 0:
                find_jobs(f"127.0.0.1:{one}")
                return
    raise AssertionError("no rank listens there")


@pytest.mark.parametrize("says", [b"", b"HTTP/1.0 400 Bad Request\r\n\r\n", bytes(range(256))])
def test_a_port_that_is_not_lossycolls(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    from lossycoll.runtime.world import queries

    monkeypatch.setattr(queries, "FIRST_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def serve() -> None:
            try:
                one, _ = server.accept()
            except OSError:
                return
            taken.append(one)
            one.sendall(says)
            if says:
                time.sleep(0.05)
                one.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(Unreachable, match="isn't a rank or a swarm's directory"):
                find_jobs(f"127.0.0.1:{server.getsockname()[1]}")
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for one in taken:
                one.close()
    assert taken


def test_what_is_no_place_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "nowhere"]) == EXIT_USAGE
    assert "'nowhere' is no HOST:PORT" in capsys.readouterr().err
    for command in (["status", "a..b:29400"], ["doctor", "--peer", "a..b:29400"]):
        assert main(command) == 1
        said = capsys.readouterr()
        assert "nobody can be" in said.out + said.err
    assert main(["status"]) == 0
    assert "no job or swarm of this user" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"jobs": [], "swarms": [], "directories": []}
