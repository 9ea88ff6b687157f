"""A model trained by a swarm: start it on as many machines as you have, when you like.

python examples/swarm.py --listen 0.0.0.0:7000             # the first machine
python examples/swarm.py --join FIRST:7000                 # every other one
python examples/swarm.py --join FIRST:7000 --checkpoint swarm.pt

A peer that comes takes the state of the others. Any may be killed, and started again. Ctrl-C ends
this one and nobody else.
"""

import argparse
import contextlib
import os
import time
from pathlib import Path

import common
import torch

import lossycoll

BATCH = 64
SAMPLES = 6400  # of all peers, from one change of the learning rate to the next


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--listen", default="", help="host:port of this machine, by which others join")
    add("--join", default="", help="host:port of machines that listen, with commas between them")
    add("--checkpoint", type=Path, help="file to go on from if it is there, and to write to")
    add("--steps", type=int, default=3000, help="of the swarm, then all end (%(default)s)")
    add("--every", type=int, default=10, help="steps from round to round (%(default)s)")
    add("--pause", type=float, default=0.05, help="seconds of a step, as if it computed")
    return parser.parse_args()


def begin(optimizer: lossycoll.MoshpitSGD, checkpoint: Path | None, is_alone: bool) -> int:
    """Takes what there is to go on from; returns the steps that it has had."""
    if checkpoint is not None and checkpoint.exists():
        optimizer.load(checkpoint)
        print(f"swarm: went on from {checkpoint}", flush=True)
    if not is_alone:
        caught = optimizer.catch_up()
        if caught is not None:
            peers = "peer" if caught.donors == 1 else "peers"
            print(
                f"swarm: took the state of {caught.donors} {peers}, {caught.bytes / 1024:.0f} KiB "
                f"in {caught.seconds:.1f} s, and was in round {caught.round}",
                flush=True,
            )
    return int(optimizer.state_dict()["steps"])


def train(swarm: lossycoll.Swarm, options: argparse.Namespace) -> None:
    model = common.network()
    averager = lossycoll.MoshpitAverager(swarm, model.parameters())
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = lossycoll.MoshpitSGD(model, inner, averager, every=options.every)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    step = begin(optimizer, options.checkpoint, is_alone=not options.join)
    task = common.Task(seed=os.getpid())
    while step < options.steps:
        loss = common.loss(model, task.batch())
        optimizer.zero_grad()
        loss.backward()
        report = optimizer.step(weight=BATCH)  # samples
        while scheduler.last_epoch < optimizer.samples // SAMPLES:  # of the swarm
            scheduler.step()
        step += 1
        time.sleep(options.pause)
        if report is None:
            continue
        missing = f", {len(report.missing)} missing" if report.missing else ""
        print(
            f"swarm: round {report.round}: {len(report.members)} peers{missing}, mean of "
            f"{report.contributions:.2f}, {1e3 * report.seconds:.0f} ms; step {step}, loss "
            f"{loss.item():.3f}, rate {scheduler.get_last_lr()[0]:.4f}"
            f"{report.failure and f'; failed: {report.failure}'}",
            flush=True,
        )
        if options.checkpoint is not None:
            optimizer.save(options.checkpoint)


if __name__ == "__main__":
    given = arguments()
    torch.manual_seed(0)
    places = given.join.split(",") if given.join else []
    with (
        contextlib.suppress(KeyboardInterrupt),
        lossycoll.Swarm(listen=given.listen, join=places) as joined,
    ):
        print(f"swarm: {joined.name} is in, with {len(joined.peers())} peers", flush=True)
        train(joined, given)
