"""torchft's Manager trains over lossycoll while replicas are killed and come back.

python examples/torchft_manager.py                   # gradients are averaged in each step
python examples/torchft_manager.py --method diloco   # fragments of the model, every few steps
KILLS=0 python examples/torchft_manager.py --replicas 2 --backend gloo   # torchft's own group

This process is the launcher: it runs torchft's lighthouse, starts three replicas, kills one of them
every 10 seconds and starts it again. It takes the state of a replica that lives. The training ends
when the last one trains again. Without kills all train the same steps in each run, so the hashes of
two backends can be compared.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import common
import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

import lossycoll

KILLS = int(os.environ.get("KILLS", "2"))
KILL_SECONDS = float(os.environ.get("KILL_SECONDS", "10"))
SECONDS = 400
"""Most that all may take after the first replicas have started."""
MORE = 40
"""Steps after the last replica has come back; without kills, all."""
PAUSE = 0.02
"""Seconds of a step, as if it computed."""
MICRO_BATCHES = 2
MISSING = {"max_missing": 0.01}
"""Options of each quorum's group. DriftBound needs a group that stays."""


class Job:
    """What the launcher and its replicas tell each other."""

    def __init__(self, port: int = 0) -> None:
        self.store = dist.TCPStore("127.0.0.1", port, is_master=port == 0, wait_for_workers=False)
        if port == 0:
            self.store.set("last", str(1 << 30 if KILLS else MORE))

    def step_of(self, pid: int) -> int:
        """Steps that a replica has done; 0: it doesn't train yet."""
        key = f"step/{pid}"
        return int(self.store.get(key)) if self.store.check([key]) else 0


def launch(method: str, count: int) -> None:
    least = 2 if KILLS else count
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=least, join_timeout_ms=1000)
    port = lighthouse.address().rpartition(":")[2]
    job = Job()

    def start(number: int) -> subprocess.Popen[bytes]:
        env = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
        env |= {"REPLICA": str(number), "STORE_PORT": str(job.store.port)}
        return subprocess.Popen([sys.executable, *sys.argv], env=env)

    replicas = [start(number) for number in range(count)]
    killed, due, end = 0, None, time.monotonic() + SECONDS
    try:
        while not all(replica.poll() == 0 for replica in replicas):
            if time.monotonic() > end:
                raise SystemExit(f"torchft_manager: no end within {SECONDS} s, {killed} kills")
            steps = [job.step_of(replica.pid) for replica in replicas]
            if all(steps) and due is None:
                due = time.monotonic() + KILL_SECONDS
                if 0 < killed == KILLS:
                    job.store.set("last", str(max(steps) + MORE))
            if due is not None and killed < KILLS and time.monotonic() > due:
                victim = replicas[1 + killed % (count - 1)]
                victim.kill()
                victim.wait()  # else its steps would be taken for those of who comes in its place
                killed, due = killed + 1, None
            for number, replica in enumerate(replicas):
                status = replica.poll() or 0
                if status < 0:
                    name = signal.Signals(-status).name
                    print(f"replica {number} ended by {name}", flush=True)
                    replicas[number] = start(number)
                elif status:
                    raise SystemExit(f"torchft_manager: replica {number} failed")
            time.sleep(0.05)
    finally:
        for replica in replicas:
            replica.kill()
            replica.wait()
        lighthouse.shutdown()
    print(f"torchft_manager: {method}, {killed} kills, all came back", flush=True)


def quorum_group(backend: str) -> Any:
    if backend == "gloo":
        return ProcessGroupGloo(timeout=timedelta(seconds=20))
    return lossycoll.torchft_process_group(timeout=20, options=MISSING)


def train(method: str, backend: str, number: str, job: Job) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = common.network()
    inner = torch.optim.Adam(model.parameters(), lr=5e-3)

    def load(state: dict[str, dict[str, Any]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    group = quorum_group(backend)
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        use_async_quorum=method != "diloco",
        timeout=timedelta(seconds=20),
        replica_id=f"replica_{number}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    task, held_out = common.Task(seed=int(number)), common.Task(9).batch(256)
    before, first, dropped = common.loss(model, held_out).item(), -1, 0

    def steps(optimizer: Any) -> None:
        nonlocal dropped, first
        while manager.current_step() < int(job.store.get("last")):
            time.sleep(PAUSE)
            optimizer.zero_grad()
            for _ in range(MICRO_BATCHES):
                (common.loss(model, task.batch(32)) / MICRO_BATCHES).backward()
            if method == "ddp":
                for work in [manager.allreduce(each.grad) for each in model.parameters()]:
                    work.wait()
            optimizer.step()
            if first < 0:
                first = manager.current_step() - 1
            job.store.set(f"step/{os.getpid()}", str(manager.current_step()))
        if backend == "lossy":
            dropped = lossycoll.stats(group.parent).packets_injected

    try:
        if method == "diloco":
            fragments = [model[0], model[2]]
            # One for each: a common one would step the other fragment by its batch's gradient. A
            # rate of 1.0 without momentum gives the mean of all replicas.
            outer = [torch.optim.SGD(each.parameters(), lr=1.0) for each in fragments]
            with DiLoCo(manager, fragments, inner, outer, sync_every=10, fragment_sync_delay=2):
                steps(inner)
        else:
            steps(OptimizerWrapper(manager, inner))
    finally:
        manager.shutdown(wait=False)
    after = common.loss(model, held_out).item()
    print(  # by one write: the replicas share the output
        f"replica {number}: went on from step {first}, "
        f"evaluation loss {before:.3f} -> {after:.3f}, "
        f"{common.fingerprint(model)}, {dropped} packets dropped\n",
        end="",
        flush=True,
    )
    assert after < 0.4 * before, (before, after)
    injecting = backend == "lossy" and os.environ.get("LOSSYCOLL_INJECT")
    assert dropped > 0 or not injecting, "nothing was lost"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="ddp", choices=["ddp", "diloco"])
    parser.add_argument("--backend", default="lossy", choices=["lossy", "gloo"])
    parser.add_argument("--replicas", type=int, default=3, choices=[2, 3])
    asked = parser.parse_args()
    if "REPLICA" in os.environ:
        job = Job(int(os.environ["STORE_PORT"]))
        train(asked.method, asked.backend, os.environ["REPLICA"], job)
    else:
        launch(asked.method, asked.replicas)
