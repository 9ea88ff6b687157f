"""What one of eight peers costs that lies: python -m benchmarks.micro.liars --report docs

A small regression, eight peers by threads over loopback, with ``max_norm``. Peer 0 sends what it
has, 1000 times that, or the negative; or it isn't there. A line of JSON for each seed: the loss of
the other peers on data that nobody has seen, in percent above that of eight honest peers without
``max_norm``. Then the table of all seeds, which ``--report`` puts into docs/moshpit.md.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.common.tables import Table, add_report
from lossycoll import MoshpitAverager, MoshpitSGD, Swarm

SECRET: Final = "a secret of benchmarks"
PEERS: Final = 8
EVERY: Final = 4
BATCH: Final = 64
NOISE: Final = 0.3
UNSEEN: Final = 16384
NORMS: Final = {"parameters": 2.0, "gradients": 3.0}
HONEST, AWAY = "what it has", "nothing: it isn't there"
LIES: Final[dict[str, Callable[[Any], Any]]] = {
    HONEST: lambda values: values,
    AWAY: lambda values: values,
    "1000 times that": lambda values: 1000 * values,
    "the negative": lambda values: -values,
}
STUDENT: Final = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""97.5% quantiles of Student's t, by the number of seeds; beyond: 2.3."""
TABLE: Final = Table(
    "moshpit.md",
    "liar",
    "steps | it sends | parameters, `max_norm=2`: mean | least, most "
    "| gradients, `max_norm=3`: mean | least, most",
)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


def data(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 8, generator=draw)
    noise = NOISE * torch.randn(rows, 1, generator=draw)
    return inputs, torch.tanh(inputs[:, :3].sum(1, keepdim=True)) + noise


@dataclass(frozen=True)
class Case:
    """A training. ``average``: as of :class:`MoshpitSGD`. ``lie``: of LIES; peer 0 tells it.
    ``max_norm``: as of :class:`MoshpitAverager`. ``steps`` are each peer's."""

    average: str
    lie: str
    max_norm: float | None
    steps: int
    seed: int = 11


def swarm_of(stack: ExitStack, peers: int) -> list[Swarm]:
    first = stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET, name="0"))
    return [first] + [
        stack.enter_context(Swarm(join=[first.address], secret=SECRET, name=str(number)))
        for number in range(1, peers)
    ]


def trained(case: Case, swarms: Sequence[Swarm]) -> tuple[float, Counter[int]]:
    """The loss of the honest peers' models on data that nobody has seen, and how often they refused
    values of each peer. RuntimeError: a peer has failed, or a round lacked one."""
    away = case.lie == AWAY
    models = [network(case.seed) for _ in swarms]
    refused: Counter[int] = Counter()
    failed: list[str] = []

    def train(number: int) -> None:
        own = models[number]
        averager = MoshpitAverager(
            swarms[number], own.parameters(), max_norm=case.max_norm, max_missing=0.0
        )
        honestly = averager._member.average

        def lies(values: Any, *given: Any) -> Any:
            honest = values.copy()
            values[:] = LIES[case.lie](values)
            report = honestly(values, *given)
            values[:] = honest
            return report

        if number == 0 and case.lie not in (HONEST, AWAY):
            averager._member.average = lies  # type: ignore[method-assign,assignment]
        inner = torch.optim.Adam(own.parameters(), lr=0.003)
        optimizer = MoshpitSGD(
            own, inner, averager, every=EVERY, average=case.average, timeout=30.0
        )
        averager.wait_for(len(swarms))
        for step in range(case.steps):
            inputs, targets = data((case.seed * 100 + number + away) * 100_000 + step, BATCH)
            optimizer.zero_grad()
            nn.functional.mse_loss(own(inputs), targets).backward()  # type: ignore[no-untyped-call]
            report = optimizer.step(weight=BATCH)
            if report is not None and number:
                refused.update(report.refused)
                if report.failure or len(report.members) < len(swarms):
                    failed.append(f"peer {number}: {report}")

    def run(number: int) -> None:
        try:
            train(number)
        except Exception as error:  # of a thread
            failed.append(f"peer {number}: {error!r}")

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(swarms))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise RuntimeError("; ".join(failed[:3]))
    inputs, targets = data(-1 - case.seed, UNSEEN)
    with torch.no_grad():
        honest = models if away else models[1:]
        found = [float(nn.functional.mse_loss(one(inputs), targets)) for one in honest]
    return fmean(found), refused


Percents = Mapping[str, Mapping[str, float]]


def percents(seed: int, steps: int) -> tuple[Percents, Counter[str]]:
    """Percent more than without a liar and without ``max_norm``: by what is averaged, and by the
    lie. And how often honest peers were refused, by what is averaged."""

    def run(average: str, lie: str, max_norm: float | None) -> tuple[float, Counter[int]]:
        with ExitStack() as stack:
            case = Case(average, lie, max_norm, steps, seed)
            return trained(case, swarm_of(stack, PEERS - (lie == AWAY)))

    out: dict[str, dict[str, float]] = {}
    falsely: Counter[str] = Counter()
    for average, norm in NORMS.items():
        honest, _ = run(average, HONEST, None)
        out[average] = {}
        for lie in LIES:
            loss, refused = run(average, lie, norm)
            out[average][lie] = 100 * (loss / honest - 1)
            falsely[average] += sum(refused.values()) - refused[0] * (lie not in (HONEST, AWAY))
    return out, falsely


def margin(values: Sequence[float]) -> float:
    """Half of the 95% interval of the mean."""
    if len(values) < 2:
        return float("inf")
    return float(STUDENT.get(len(values), 2.3) * stdev(values) / len(values) ** 0.5)


def rows(steps: int, found: Sequence[Percents]) -> list[list[str]]:
    """Of the table, for trainings of so many steps. ``found``: by seed."""
    out = []
    for lie in LIES:
        row = [f"{steps}", lie]
        for average in NORMS:
            values = [one[average][lie] for one in found]
            row.append(f"{fmean(values):+.2f}% ± {margin(values):.2f}")
            row.append(f"{min(values):+.2f}%, {max(values):+.2f}%")
        out.append(row)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    add("--steps", type=int, nargs="+", default=[100, 400], help="of each peer (%(default)s)")
    add_report(parser, TABLE.page)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for steps in args.steps:
        found = []
        for seed in args.seeds:
            percent, refused = percents(seed, steps)
            found.append(percent)
            said = {"steps": steps, "seed": seed, **percent, "honest peers refused": refused}
            print(json.dumps(said), flush=True)
        table += rows(steps, found)
    below = f"{len(args.seeds)} seeds; ± is the 95% interval of the mean."
    print(TABLE.report(args.report, table, below))


if __name__ == "__main__":
    main()
