"""A rank is killed, its launcher starts it again, and it comes back into the job that went on.

python examples/rejoin.py

This process is the launcher: it has the store, starts three ranks, kills one of them, and starts
whatever ends by a signal. The ranks train with DDP over lossycoll.
"""

import os
import signal
import subprocess
import sys
import time

import common
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lossycoll

SEATS = 3
AFTER = 30  # steps in the group that is whole again
VICTIM = 1
KILLED_AFTER = 20  # steps
PAUSE = 0.05  # seconds of a step, as if it computed
SECONDS = 240  # at most, of all


def launch() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("step", "0")

    def start(slot: int) -> subprocess.Popen[bytes]:
        env = {**os.environ, "SEAT": str(slot), "STORE_PORT": str(store.port)}
        return subprocess.Popen([sys.executable, __file__], env=env)

    ranks = [start(slot) for slot in range(SEATS)]
    end, killed = time.monotonic() + SECONDS, False
    try:
        while any(rank.poll() is None for rank in ranks):
            if time.monotonic() > end:
                raise SystemExit(f"rejoin: no end within {SECONDS} s")
            if not killed and int(store.get("step")) >= KILLED_AFTER:
                ranks[VICTIM].kill()
                killed = True
            for slot, rank in enumerate(ranks):
                if (rank.poll() or 0) < 0:
                    print(f"rejoin: slot {slot} ended by {signal.Signals(-rank.returncode).name}")
                    ranks[slot] = start(slot)
            time.sleep(0.05)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"rejoin: ranks ended with {[rank.returncode for rank in ranks]}")


def train(slot: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # Before it asks to be let in: the others would stand still meanwhile.
    model = common.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with lossycoll.ElasticWorld(store, slot, SEATS) as world:
        task, losses, changes = common.Task(seed=slot), [], []
        began = -1
        whole = step = 0  # whole: the step at which all were together again; 0: not yet
        while not whole or step < whole + AFTER:
            try:
                step = world.share(model, optimizer)
                began = step if began < 0 else began
                whole = step
                ddp = DistributedDataParallel(model)
                while not whole or step < whole + AFTER:
                    losses.append(common.step(ddp, optimizer, task.batch()))
                    step += 1
                    if slot == 0:
                        store.set("step", str(step))
                    time.sleep(PAUSE)
                    if change := world.boundary(step):
                        changes.append(change)
                        break
            except lossycoll.PeerLostError as error:
                changes.append(world.recover(error, step))
        assert losses[-1] < losses[0], losses
        dropped = common.dropped()
        if slot == VICTIM:
            assert began > KILLED_AFTER, began
            print(
                f"rejoin: slot {slot} came back before step {began}, loss {losses[-1]:.3f}",
                flush=True,
            )
        elif slot == 0:
            assert changes, "nobody came back"
            assert changes[-1].slots == tuple(range(SEATS))
            pause = sum(change.seconds for change in changes)
            print(
                f"rejoin: slot 0 had {step} steps and paused {pause:.2f} s, loss "
                f"{losses[-1]:.3f}, {dropped}",
                flush=True,
            )


if __name__ == "__main__":
    if "SEAT" in os.environ:
        train(int(os.environ["SEAT"]), int(os.environ["STORE_PORT"]))
    else:
        launch()
