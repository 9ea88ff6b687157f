"""torchft's Manager trains over lossycoll while replicas are killed and come back.

python examples/torchft_manager.py

This process is the launcher: it runs torchft's lighthouse, starts three replicas, kills one of them
every few seconds, and starts it again. Needs torchft (pip install torchft).
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

REPLICAS = 3
STEPS = int(os.environ.get("STEPS", "150"))
KILL_SECONDS = float(os.environ.get("KILL_SECONDS", "10"))
PAUSE = 0.1  # seconds of a step, as if it computed
SECONDS = 240  # at most, of all


def launch() -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000)
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(number: int) -> subprocess.Popen[bytes]:
        env = {**os.environ, "REPLICA": str(number), "TORCHFT_LIGHTHOUSE": address}
        env["STORE_PORT"] = str(store.port)
        return subprocess.Popen([sys.executable, __file__], env=env)

    replicas = [start(number) for number in range(REPLICAS)]
    end, killed, due = time.monotonic() + SECONDS, 0, time.monotonic() + KILL_SECONDS

    def all_train() -> bool:
        return store.check([f"trains/{replica.pid}" for replica in replicas])

    try:
        while all(replica.poll() != 0 for replica in replicas):
            if time.monotonic() > end:
                raise SystemExit(f"torchft_manager: no end within {SECONDS} s")
            if time.monotonic() > due and all_train():
                victim = 1 + killed % (REPLICAS - 1)
                replicas[victim].kill()
                killed, due = killed + 1, time.monotonic() + KILL_SECONDS
            for number, replica in enumerate(replicas):
                if (replica.poll() or 0) < 0:
                    print(f"replica {number} ended by {signal.Signals(-replica.returncode).name}")
                    replicas[number] = start(number)
                elif replica.poll():
                    raise SystemExit(f"torchft_manager: replica {number} failed")
            time.sleep(0.05)
    finally:
        for replica in replicas:
            if replica.poll() is None:
                replica.kill()
            replica.wait()
        lighthouse.shutdown()
    if not killed:
        raise SystemExit("torchft_manager: nobody was killed")
    print(f"torchft_manager: {killed} kills, {STEPS} steps")


def train() -> None:
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper

    import lossycoll

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    inner = torch.optim.Adam(model.parameters(), lr=1e-2)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=lossycoll.torchft_process_group(timeout=20),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        timeout=timedelta(seconds=20),
        replica_id=f"replica_{os.environ['REPLICA']}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    optimizer = OptimizerWrapper(manager, inner)
    launcher = dist.TCPStore(
        "127.0.0.1", int(os.environ["STORE_PORT"]), is_master=False, wait_for_workers=False
    )
    first = last = None
    data = torch.Generator().manual_seed(os.getpid())
    try:
        while manager.current_step() < STEPS:
            time.sleep(PAUSE)
            batch = torch.randn(64, 20, generator=data)
            optimizer.zero_grad()
            loss = (model(batch) - batch.sin().sum(1, keepdim=True)).square().mean()
            loss.backward()
            works = [manager.allreduce(each.grad) for each in model.parameters()]
            for work in works:
                work.wait()
            optimizer.step()
            launcher.set(f"trains/{os.getpid()}", "")
            first, last = loss.item() if first is None else first, loss.item()
        print(f"replica {os.environ['REPLICA']}: loss {first:.3f} -> {last:.3f}")
        if not last < 0.5 * first and first > 2:
            raise SystemExit(f"the loss did not fall: {first:.3f} -> {last:.3f}")
    finally:
        manager.shutdown(wait=False)


if __name__ == "__main__":
    train() if "REPLICA" in os.environ else launch()
