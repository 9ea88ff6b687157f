"""How the benchmark's backends take turns, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

LEAST_ROUNDS = 3
MOST_ROUNDS = 2000
WARM_UP_ROUNDS = 2


def in_turns(
    names: Sequence[str], once: Callable[[str], float], seconds: float
) -> dict[str, list[float]]:
    """Calls ``once(name)``, which returns the seconds it took, in rounds of all names.

    The rounds fill about ``seconds`` by rank 0's clock, after some that don't count. All ranks of
    the default group do the same number. Returns the times by name.
    """
    taken: dict[str, list[float]] = {name: [] for name in names}

    def one_round(number: int) -> None:
        # The order turns around each time, so that nobody always runs second.
        for name in names if number % 2 == 0 else reversed(names):
            taken[name].append(once(name))

    started = time.perf_counter()
    for number in range(WARM_UP_ROUNDS):
        one_round(number)
    a_round = (time.perf_counter() - started) / WARM_UP_ROUNDS
    rounds = torch.tensor(min(MOST_ROUNDS, max(LEAST_ROUNDS, int(seconds / a_round))))
    dist.broadcast(rounds, src=0)
    for times in taken.values():
        times.clear()
    for number in range(int(rounds)):
        one_round(number)
    return taken
