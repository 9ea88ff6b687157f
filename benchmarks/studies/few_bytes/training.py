"""One run: ``python -m benchmarks.studies.few_bytes.training SETTINGS``, SETTINGS as JSON.

All peers are in this process, each with an engine of its own, over the loopback of a network
namespace that is nobody else's. So its counter has all bytes that they send, headers and the
directory's messages included. Prints the figures as JSON.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lossycoll import MoshpitAverager, MoshpitSGD, Swarm
from lossycoll.cli.demo import corpus as demo_data
from lossycoll.cli.demo.model import ByteGPT, next_byte_loss
from lossycoll.cli.demo.worker import ADAMW, Validation, learning_rate
from lossycoll.options.fields import Options

from .runs import PEERS, VARIANTS, Run

OUTER: Final = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
TIMEOUT: Final = 120.0
WEIGHTS: Final = threading.Lock()
"""Held while weights are drawn: torch has one generator."""
JUDGED_AT_ONCE: Final = 64
"""Windows of held-out text."""
CURVE: Final = 300
"""Steps between two losses on the way, where a round ends."""
COUNTERS: Final = Path("/proc/self/net/dev")


class Peer:
    """A peer's training, and its rounds."""

    def __init__(self, run: Run, number: int, text: Tensor, swarm: Swarm) -> None:
        how, config = VARIANTS[run.variant], run.train()
        self._text, self._config = text, config
        self._batches = torch.Generator().manual_seed(config.seed * 10_007 + number + 1)
        with WEIGHTS:
            torch.manual_seed(config.seed)
            self.model = ByteGPT(config.layers, config.width, config.context)
        model = self.model
        averager = MoshpitAverager(swarm, model.parameters(), wire=how.wire, max_missing=0.0)
        self.optimizer = MoshpitSGD(
            model,
            torch.optim.AdamW(model.parameters(), **ADAMW, fused=True),
            averager,
            every=run.every,
            outer=lambda p: torch.optim.SGD(p, **OUTER),  # type: ignore[arg-type]
            average=how.average,
            fragments=how.fragments,
            timeout=TIMEOUT,
        )

    def backward(self, step: int) -> None:
        """Gradients of the next batch."""
        config = self._config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, config.steps)
        inputs, targets = demo_data.draw(self._text, config.batch, config.context, self._batches)
        self.optimizer.zero_grad()
        next_byte_loss(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]

    def values(self) -> list[Tensor]:
        """Copies of the parameters."""
        return [p.detach().clone() for p in self.model.parameters()]


def sent_bytes() -> int:
    """Bytes that this network namespace's loopback has carried."""
    (line,) = [one for one in COUNTERS.read_text().splitlines() if one.strip().startswith("lo:")]
    return int(line.split()[9])


def mean_model(peers: list[Peer]) -> ByteGPT:
    """The mean of all peers' models."""
    model = copy.deepcopy(peers[0].model)
    with torch.no_grad():
        for parameter, *same in zip(model.parameters(), *(p.values() for p in peers), strict=True):
            parameter.copy_(torch.stack(same).mean(0))
    return model


def apart(peers: list[Peer]) -> float:
    """How far outer parameters of two peers are from one another, against their own size."""
    anchors = [torch.cat([a.flatten() for a in p.optimizer.state_dict()["anchor"]]) for p in peers]
    size = float(anchors[0].norm())
    return max(float((one - anchors[0]).norm()) / size for one in anchors)


def measure(run: Run) -> dict[str, Any]:
    """Trains; what a run's line has."""
    torch.set_num_threads(1)
    curve, kept, failed, members = [], 0.0, 0, []
    with ExitStack() as stack, ThreadPoolExecutor(PEERS) as pool:
        how = Options(link="udp")  # else they would share memory
        first = stack.enter_context(Swarm("127.0.0.1:0", name="0", options=how))
        swarms = [first]
        swarms += [
            stack.enter_context(Swarm(join=[first.address], name=str(n), options=how))
            for n in range(1, PEERS)
        ]
        corpus = demo_data.load(run.seed)
        judge = Validation(corpus.validation, replace(run.train(), batch=JUDGED_AT_ONCE))
        pairs = enumerate(swarms)
        peers = list(pool.map(lambda one: Peer(run, one[0], corpus.train, one[1]), pairs))
        begin = sent_bytes()
        for step in range(1, run.budget.steps + 1):
            for peer in peers:
                peer.backward(step - 1)
            if step % run.every:
                for peer in peers:
                    peer.optimizer.step()
                continue
            for report in pool.map(lambda peer: peer.optimizer.step(), peers):
                assert report is not None
                kept = max(kept, report.kept)
                failed += bool(report.failure)
                members.append(len(report.members))
            if step % CURVE == 0:
                sent = sent_bytes() - begin
                curve.append([step, sent, judge.loss(mean_model(peers))])
        return {
            "bytes": sent_bytes() - begin,
            "loss": judge.loss(mean_model(peers)),
            "apart": apart(peers),
            "curve": curve,
            "kept": kept,
            "failed": failed,
            "members": statistics.fmean(members),
        }


if __name__ == "__main__":
    print(json.dumps(measure(Run.of(json.loads(sys.argv[1])))))
