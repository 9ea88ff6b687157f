"""Linear speed-up by ranks (arXiv 2510.26709, with EF21M): the error of noisy quadratics, and of a
network.

Rank i has ``|w - b_i|^2 / 2``, whose b_i differ widely and have the mean 0, and gradients with
noise of N(0, 1). SGD at a constant rate then stays around the optimum at a distance whose square
falls as 1 / N if all N ranks' noise is averaged, however sparse what is sent.

The network has a hidden layer, and learns what one of its own form says, by labels with such noise.
The ranks' objectives differ by linear terms whose sum is 0. Its error is what it says besides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from tests.support.arc_cases import Nodes

ROWS, COLUMNS, SKETCH_DIM = 32, 8, 2
RATE, MOMENTUM, APART = 0.05, 0.1, 3.0
"""Learning rate, EF21M's weight of the new gradient, standard deviation of the ranks' optima."""
RANKS: Final = (1, 2, 4, 8, 16)
SEEDS: Final = (1, 2, 3, 4, 5, 6)
STEPS, SKIP = 1500, 300
NETWORK: Final = "network"
HIDDEN, INPUTS, BATCH, JUDGED, PULL = 32, 16, 8, 256, 0.3
RULES: Final[Mapping[str, tuple[str, str, float]]] = {
    "dense": ("arc", "ef21m", 1.0),
    "ARC 0.25, ef21m": ("arc", "ef21m", 0.25),
    "ARC 0.25, ef14": ("arc", "ef14", 0.25),
}
"""Method, rule and ratio; all rows with EF21M are SGD with the same momentum."""


def error(rule: str, ranks: int, seed: int, steps: int = STEPS, skip: int = SKIP) -> float:
    """The mean square distance from the optimum of an element, after ``skip`` steps."""
    method, memory, ratio = RULES[rule]
    draw = torch.Generator().manual_seed(1000 * seed + ranks)
    optima = APART * torch.randn(ranks, ROWS, COLUMNS, generator=draw)
    optima -= optima.mean(0)
    nodes = Nodes(ranks, memory, method, ratio, SKETCH_DIM, MOMENTUM, seed)
    w, total = torch.zeros(ROWS, COLUMNS), 0.0
    for step in range(steps):
        noise = torch.randn(ranks, ROWS, COLUMNS, generator=draw)
        w -= RATE * nodes.used(w - optima + noise)
        total += float(w.square().mean()) if step >= skip else 0.0
    return total / (steps - skip)


def network_error(rule: str, ranks: int, seed: int, steps: int = STEPS, skip: int = SKIP) -> float:
    """The mean square of an output less the teacher's, on inputs that aren't trained."""
    method, memory, ratio = RULES[rule]
    draw = torch.Generator().manual_seed(1000 * seed + ranks)
    fixed = torch.Generator().manual_seed(seed)
    first = torch.randn(HIDDEN, INPUTS, generator=fixed) / INPUTS**0.5
    last = torch.randn(COLUMNS, HIDDEN, generator=fixed) / HIDDEN**0.5
    judged = torch.randn(JUDGED, INPUTS, generator=fixed)
    taught = (judged @ first.T).tanh() @ last.T
    w = [first.clone(), last.clone()]  # what is measured is how far noise drives it away
    all_nodes = [Nodes(ranks, memory, method, ratio, SKETCH_DIM, MOMENTUM, seed) for _ in w]
    pulls = [PULL * torch.randn(ranks, *one.shape, generator=draw) for one in w]
    total, times = 0.0, 0
    for step in range(steps):
        x = torch.randn(ranks, BATCH, INPUTS, generator=draw)
        noise = torch.randn(ranks, BATCH, COLUMNS, generator=draw)
        hidden = (x @ w[0].T).tanh()
        off = hidden @ w[1].T - (x @ first.T).tanh() @ last.T + noise
        back = (off @ w[1]) * (1 - hidden.square())
        gradients = (back.transpose(1, 2) @ x / BATCH, off.transpose(1, 2) @ hidden / BATCH)
        for one, nodes, gradient, pull in zip(w, all_nodes, gradients, pulls, strict=True):
            one.sub_(RATE * nodes.used(gradient + pull - pull.mean(0)))
        if step >= skip and step % 5 == 0:
            total += float(((judged @ w[0].T).tanh() @ w[1].T - taught).square().mean())
            times += 1
    return total / times


def measure_speedup(seed: int, task: str = "") -> list[dict[str, Any]]:
    """The errors of one seed, whose ranks and noise are the same for all rules."""
    measure = network_error if task == NETWORK else error

    def rows() -> Iterator[dict[str, Any]]:
        for ranks in RANKS:
            for rule in RULES:
                yield {"ranks": ranks, "rule": rule, "error": measure(rule, ranks, seed)}

    return list(rows())
