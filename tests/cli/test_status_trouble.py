"""What an operator finds by docs/operate.md: several troubles at once, two hosts, and strangers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lossycoll.cli.status import Unreachable, as_text, find_jobs
from lossycoll.runtime.world import queries
from tests.cli.test_status import LATE, WORLD, Job, Watched, _waits_for, own_folder  # noqa: F401
from tests.failures.test_network import ENDS, Cable, _enter, cable  # noqa: F401
from tests.support.command_line import run_lossycoll
from tests.support.harness import Ranks, init, note
from tests.support.waiting import until

COMMAND = (sys.executable, "-m", "lossycoll.cli")
IN = ("ip", "netns", "exec")
SLEEPER, STOPPED, READER = 1, 2, 3
"""The ranks that are late, stopped, and wait for a DataLoader."""


def rank_in_trouble(rank: int, world: int) -> str:
    """Calls with a link that loses, then each rank has a trouble of its own."""
    import torch
    import torch.distributed as dist

    init(300)
    t = torch.ones(200_000)
    for _ in range(40):
        dist.all_reduce(t)
    dist.barrier()
    note("all are here")
    go = Path(os.environ["GO"])
    if rank == SLEEPER:
        _prepare_for_long(go)
    elif rank == READER:
        _read_batch()
    elif rank == STOPPED:
        signal.pause()
    dist.all_reduce(t)
    dist.barrier()
    dist.destroy_process_group()
    return ""


def _prepare_for_long(go: Path) -> None:
    until(go.exists, seconds=600)


def _read_batch() -> None:
    """As a training script does it; the loader's worker is stuck."""
    from torch.utils.data import DataLoader

    for _ in DataLoader(StuckData(), batch_size=1, num_workers=1):
        break


class StuckData:
    """A dataset whose first item comes when the test ends."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, item: int) -> int:
        until(Path(os.environ["GO"]).exists, seconds=600)
        return item


def _said(*words: str) -> str:
    said = run_lossycoll(*words)
    assert said.returncode == 0, said.stderr
    return said.stdout


def test_four_troubles_at_once_are_found_by_the_page(tmp_path: Path) -> None:
    """One rank is late, one stopped, one link loses a fifth, one DataLoader is stuck. Only commands
    of docs/operate.md are used."""
    go = tmp_path / "go"
    env = {
        "XDG_RUNTIME_DIR": str(tmp_path),
        "GO": str(go),
        "LOSSYCOLL_LIVENESS": "300",
        "LOSSYCOLL_INJECT": "seed=7,link=0-3:0.2",
    }
    with contextlib.ExitStack() as stack:
        stack.callback(go.touch)  # the loader's worker outlives a rank that is killed
        ranks = stack.enter_context(Ranks(rank_in_trouble, WORLD, env))
        for rank in range(WORLD):
            ranks.wait_for(rank, "all are here")
        ranks.signal(STOPPED, signal.SIGSTOP)
        until(lambda: find_jobs(None)[0]["ranks"][0]["call"] is not None)
        until(lambda: len(find_jobs(None)[0]["ranks"][0]["waits_for"]) == 3)
        text = _said("status", "--stacks")
        first = text.splitlines()[:8]
        assert any(one.startswith(f"  rank {SLEEPER}, which is alive: 1 wait") for one in first)
        assert any(one.startswith(f"  rank {STOPPED}, which is stopped: 1 wait") for one in first)
        assert any(one.startswith(f"  rank {READER}, which is alive: 1 wait") for one in first)
        assert any(one.startswith("  link from rank 0 to rank 3: loses ") for one in first)
        stacks = {
            rank: text.partition(f"\nrank {rank} ")[2].partition(f"\nrank {rank + 1} ")[0]
            for rank in range(WORLD)
        }
        assert "_prepare_for_long" in stacks[SLEEPER]
        assert "dataloader.py" in stacks[READER]
        assert "no stacks: the rank is stopped" in stacks[STOPPED]
        assert "all_reduce" in stacks[0]
        table = _said("top", "--once")
        ranks_shown = [line.split()[0] for line in table.splitlines() if line[:5].strip().isdigit()]
        assert ranks_shown == ["2", "1", "3", "0"]  # stopped, late, late, waiting


# ---- two hosts ----


def rank_elsewhere(rank: int, world: int) -> str:
    """One that waits in its own network, or is late there."""
    _enter(os.environ["NAMESPACE"])
    import torch
    import torch.distributed as dist

    init()
    t = torch.ones(1000)
    dist.all_reduce(t)
    dist.barrier()
    note("all are here")
    if rank == 2:
        until(Path(os.environ["GO"]).exists, seconds=600)
    dist.all_reduce(t)
    dist.barrier()
    dist.destroy_process_group()
    return ""


def _asked_in(namespace: str, place: str, folder: Path) -> Job:
    said = subprocess.run(
        [*IN, namespace, *COMMAND, "status", place, "--json"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    found: Job = json.loads(said.stdout)["jobs"][0]
    return found


def test_a_rank_of_one_host_is_asked_from_the_other(
    cable: Cable,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Each host has a folder of pages of its own; rank 2 is alone on the second one."""
    folders = [tmp_path / side for side in "ab"]
    for folder in folders:
        folder.mkdir(0o700)
    env = {"MASTER_ADDR": ENDS[0], "LOSSYCOLL_INTERFACE": "cable", "GO": str(tmp_path / "go")}
    homes = {
        rank: {
            "NAMESPACE": cable.names[rank == 2],
            "XDG_RUNTIME_DIR": str(folders[rank == 2]),
        }
        for rank in range(3)
    }
    with Ranks(rank_elsewhere, 3, env, per_rank=homes, own_store=True) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "all are here", 100)
        places = {}
        for folder in folders:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("XDG_RUNTIME_DIR", str(folder))
                places |= {r["rank"]: r["control"] for r in find_jobs(None)[0]["ranks"]}
                if folder is folders[0]:
                    until(lambda: find_jobs(None)[0]["ranks"][0]["call"] is not None)
                    assert find_jobs(None)[0]["ranks"][2]["tells"] is False
                    first = find_jobs(None)[0]["ranks"][0]["control"]
        for namespace, place in ((cable.names[1], first), (cable.names[0], places[2])):
            for _ in range(3):  # a busy machine's rank may answer after the question's deadline
                found = _asked_in(namespace, place, tmp_path)
                if all(rank["tells"] for rank in found["ranks"]):
                    break
            assert _waits_for(found) == [[2], [2], []]
            assert [rank["tells"] for rank in found["ranks"]] == [True] * 3
            assert [rank["control"].partition(":")[0] for rank in found["ranks"]] == [
                ENDS[0], ENDS[0], ENDS[1]
            ]  # fmt: skip
        (tmp_path / "go").touch()
        assert [one.error for one in ranks.collect(90)] == [""] * 3


# ---- strangers ----


@contextlib.contextmanager
def _half_open(host: str, port: int, count: int) -> Iterator[int]:
    """Connections that never say anything, as many as the system gives; and some that say half."""
    with contextlib.ExitStack() as stack:
        made = 0
        for number in range(count):
            try:
                one = stack.enter_context(socket.create_connection((host, port), 2))
            except OSError:
                break
            made += 1
            if number % 2:
                one.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f")
        yield made


def _flood(host: str, ports: list[int], count: int) -> int:
    """Random datagrams to each of the ports; returns how many left."""
    draw, sent = random.Random(7), 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for number in range(count):
            with contextlib.suppress(OSError):
                sender.sendto(
                    draw.randbytes(draw.randrange(1, 200)), (host, ports[number % len(ports)])
                )
                sent += 1
    return sent


def _scan(host: str, ports: range) -> int:
    """A port scan; returns how many are open."""
    found = 0
    for port in ports:
        with socket.socket() as probe:
            found += probe.connect_ex((host, port)) == 0
    return found


@pytest.mark.parametrize(
    ("datagrams", "connections"),
    [(20_000, 200), pytest.param(1_000_000, 1000, marks=pytest.mark.long)],
)
def test_strangers_change_neither_the_job_nor_the_answer(
    datagrams: int, connections: int, tmp_path: Path
) -> None:
    watched = Watched(tmp_path, LOSSYCOLL_LIVENESS="60", LOSSYCOLL_LINK="udp", PATIENCE="1000")
    with watched.ranks:
        job = watched.waits()
        place = job["ranks"][0]["control"]
        host, _, port = place.rpartition(":")
        data = [int(rank["address"].rpartition(":")[2]) for rank in _ready(watched.ranks)]
        with _half_open(host, int(port), connections) as made:
            assert made > connections // 2
            assert _scan(host, range(int(port) - 20, int(port) + 20)) >= 1
            flood = threading.Thread(target=_flood, args=(host, data, datagrams))
            flood.start()
            while flood.is_alive():
                found = find_jobs(place)[0]
                assert _waits_for(found) == [[LATE], [LATE], [], [LATE]]
                assert [rank["state"] for rank in found["ranks"]] == ["alive"] * WORLD
                flood.join(0.5)
        assert watched.end() == [""] * WORLD


def _ready(ranks: Ranks) -> list[dict[str, str]]:
    """What each rank's line of its start says."""
    found = []
    for rank in range(WORLD):
        line = next(one for one in ranks.output(rank).splitlines() if "event=ready" in one)
        found.append(dict(word.split("=", 1) for word in line.split() if "=" in word))
    return found


def test_another_version_and_a_job_that_ends_while_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path)
    with watched.ranks:
        place = watched.waits()["ranks"][0]["control"]
        with monkeypatch.context() as patch:
            patch.setitem(queries.ANSWER.versions, "status", 99)
            with pytest.raises(Unreachable, match="status of version 1, wanted 99"):
                find_jobs(place)
        watched.go.touch()
        seen: set[str] = set()
        while any(process.poll() is None for process in watched.ranks.processes):
            for where in (None, place):
                try:
                    for job in find_jobs(where):
                        as_text([job])
                        seen.add("answer")
                except Unreachable as error:
                    seen.add(str(error))
            time.sleep(0.01)
        assert watched.end() == [""] * WORLD
    with pytest.raises(Unreachable, match="nobody can be reached"):
        find_jobs(place)
    assert seen
