"""torchrun's agents come and go: one is killed with its rank, and another one takes its place."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lossycoll.cli.launcher import on_one_machine
from tests.support.harness import free_port
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]


def agent(folder: Path, port: int, name: str) -> subprocess.Popen[bytes]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("LOSSYCOLL_")}
    env |= {k: v for k, v in on_one_machine().items() if v is not None}
    env |= {"LOSSYCOLL_LOG": "warning", "PYTHONPATH": str(ROOT)}
    # Else a newcomer asks in vain for the store's address, which agents publish once only.
    env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
                *("--nproc-per-node", "1", "--max-restarts", "9", "--rdzv-backend", "c10d"),
                *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic"),
                *("--rdzv-conf", "last_call_timeout=8,keep_alive_interval=3"),
                *("--local-addr", "127.0.0.1", "-m", "tests.support.elastic_rank", str(folder)),
            ],
            cwd=ROOT,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_agent_comes_back(tmp_path: Path) -> None:
    port = free_port()
    agents: list[subprocess.Popen[bytes]] = []

    def progress() -> list[tuple[int, int, int]]:
        """World, first step and step of each line."""
        path = tmp_path / "progress"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines]  # type: ignore[misc]

    def logs() -> str:
        return "".join(each.read_text() for each in tmp_path.glob("*.log"))

    def kill(one: subprocess.Popen[bytes]) -> None:
        worker = tmp_path / f"worker-{one.pid}"
        one.kill()
        one.wait()
        if worker.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(worker.read_text()), signal.SIGKILL)

    try:
        agents.append(agent(tmp_path, port, "first"))
        until(lambda: listens(port), "the rendezvous' store is the first agent's", seconds=120)
        agents.append(agent(tmp_path, port, "second"))
        until(lambda: progress() and progress()[-1][0] == 2, "two ranks", seconds=180)
        kill(agents.pop())
        until(lambda: progress()[-1][0] == 1, "one rank", seconds=180)
        agents.append(agent(tmp_path, port, "third"))
        until(lambda: progress()[-1][0] == 2, "two ranks again", seconds=180)
        (tmp_path / "stop").touch()
        assert [each.wait(60) for each in agents] == [0, 0], logs()
    finally:
        for each in agents:
            kill(each)
    steps = [step for _, _, step in progress()]
    assert steps == sorted(steps), steps  # nothing was done twice
    assert progress()[-1][1] > 0, "the last world began at step 0"
    assert "lost rank" in logs()
