"""Variances of a swarm round by round, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt
import numpy as np

from lossycoll.plan.grid import Grid
from lossycoll.simulate.averaging import METHODS, variances

ROUNDS: Final = 16
SEEDS: Final = 20
LEAST: Final = 1e-16
"""Below it there is but rounding."""
LABELS: Final = {
    "moshpit": "Moshpit, peers stay in their cells",
    "moshpit_chunks": "Moshpit, peers move by the paper's rule",
    "random_groups": "random groups",
    "all_reduce": "one all-reduce of all",
    "sgp": "SGP",
    "gossip": "gossip on a ring",
}


def draw(peers: int, grid: Grid, failure: float, path: Path) -> None:
    """Writes the picture to ``path``, a PNG: the mean variance of ``SEEDS`` runs of each method."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, method in METHODS.items():
        runs = [variances(method, peers, grid, failure, ROUNDS, seed) for seed in range(SEEDS)]
        mean = np.maximum(np.mean(runs, axis=0), LEAST)
        axes.semilogy(mean, marker="o", markersize=3.5, label=LABELS[name])
    for target in (1e-4, 1e-9):
        axes.axhline(target, color="black", linewidth=0.7, linestyle=":")
    axes.set(xlabel="round", ylabel="variance of the peers' values", xlim=(0, ROUNDS))
    axes.set_title(f"{peers} peers, grid {grid}, {failure:.1%} of peers fail in each round")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    figure.savefig(path, dpi=130)
    plt.close(figure)
