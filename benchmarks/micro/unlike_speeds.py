"""Loss per sample of a swarm whose peers have speeds of 1, 2 and 4, and of one of equal speeds.

    python -m benchmarks.micro.unlike_speeds [--seeds 1 2 3] [--report docs]

A small regression, three peers by threads over loopback, ``target_samples=448, delayed=True``.
Steps are taken by a clock, so both swarms see the same number of samples in the same time. A line
of JSON for each seed; the loss is that of the fastest peer after its round, on data of its own.
Then the table of all seeds, which ``--report`` puts into docs/moshpit.md.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Final

import torch
from torch import Tensor, nn

from benchmarks.common.tables import Table, add_report
from lossycoll import MoshpitAverager, MoshpitSGD, Swarm

SECRET: Final = "a secret of benchmarks"
UNLIKE: Final = (0.08, 0.04, 0.02)
EQUAL: Final = (0.24 / 7,) * 3
"""Seconds of a step of each peer: as many samples in a second as with UNLIKE."""
BATCH: Final = 16
TARGET: Final = 448
MARKS: Final = (4_000, 8_000, 16_000)
"""Samples of the swarm after which the loss is taken."""
INPUTS, HIDDEN, NOISE = 16, 32, 0.3
TABLE: Final = Table("moshpit.md", "unlike-speeds", "samples of all peers | mean | least, most")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


class Task:
    """What a fixed network says, with noise."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(11)
        self._first = torch.randn(INPUTS, HIDDEN, generator=draw) / 4
        self._second = torch.randn(HIDDEN, 1, generator=draw) / 5

    def batch(self, seed: int, count: int = BATCH) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        inputs = torch.randn(count, INPUTS, generator=draw)
        noise = NOISE * torch.randn(count, 1, generator=draw)
        return inputs, torch.tanh(inputs @ self._first) @ self._second + noise


def losses(pauses: Sequence[float], seed: int) -> tuple[dict[int, float], list[int]]:
    """The loss at each mark, and the steps that each peer took."""
    task, found, steps = Task(), dict[int, float](), [0] * len(pauses)
    inputs, labels = task.batch(10**6, 8192)
    barrier = threading.Barrier(len(pauses))

    def work(peer: int, swarm: Swarm) -> None:
        torch.manual_seed(seed)
        model = network()
        inside = torch.optim.AdamW(model.parameters(), lr=5e-3)
        averager = MoshpitAverager(swarm, model)
        optimizer = MoshpitSGD(
            model, inside, averager, target_samples=TARGET, delayed=True, timeout=20.0
        )
        averager.wait_for(len(pauses))
        barrier.wait()
        due = time.monotonic()
        while optimizer.samples < MARKS[-1]:
            due += pauses[peer]
            time.sleep(max(0.0, due - time.monotonic()))
            x, y = task.batch(seed * 10**7 + peer * 10**5 + steps[peer])
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            report = optimizer.step(weight=BATCH)
            steps[peer] += 1
            if report is None or peer != len(pauses) - 1:
                continue
            with torch.no_grad():
                loss = nn.functional.mse_loss(model(inputs), labels).item()
            for mark in MARKS:
                if optimizer.samples >= mark:
                    found.setdefault(mark, loss)
        optimizer.finish()

    with ExitStack() as stack:
        first = stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET, name="0"))
        swarms = [first] + [
            stack.enter_context(Swarm(join=[first.address], secret=SECRET, name=str(n)))
            for n in range(1, len(pauses))
        ]
        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(swarms)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found, steps


def rows(found: Sequence[Mapping[int, float]]) -> list[list[str]]:
    """Of the table: percent more, by mark, of each seed."""
    return [
        [
            f"{mark:,}",
            f"{fmean(one[mark] for one in found):+.1f}%",
            f"{min(one[mark] for one in found):+.1f}%, {max(one[mark] for one in found):+.1f}%",
        ]
        for mark in MARKS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add_report(parser, "moshpit.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for seed in args.seeds:
        unlike, steps = losses(UNLIKE, seed)
        equal, of_equal = losses(EQUAL, seed)
        more = {mark: 100 * (unlike[mark] / equal[mark] - 1) for mark in MARKS}
        percent = {mark: round(value, 2) for mark, value in more.items()}
        said = {"seed": seed, "steps": steps, "steps of equal": of_equal, "unlike": unlike}
        print(json.dumps({**said, "equal": equal, "percent more": percent}), flush=True)
        found.append(more)
    print(TABLE.report(args.report, rows(found)))


if __name__ == "__main__":
    main()
