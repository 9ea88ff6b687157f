"""The published table: mean rounds until the variance is below 1e-9 and 1e-4, of 10 runs on a grid
of 32x32, for all-reduce, gossip, SGP, random groups and Moshpit.

Ryabinin et al., "Moshpit SGD", NeurIPS 2021: the output of averaging_experiments/plot_results.ipynb
in its repository, yandex-research/moshpit-sgd.
"""

from __future__ import annotations

from typing import Final

COLUMNS: Final = ("all_reduce", "gossip", "sgp", "random_groups", "moshpit")
_ROWS: Final = """
512 0     1.0 1.0   50 50 47.6 15.6 6.1 3.0 8.2 3.6
512 0.001 1.6 1.6   50 50 47.6 15.6 6.3 3.0 8.5 3.3
512 0.005 10.9 10.9 50 50 47.8 15.6 6.3 3.0 8.8 3.9
512 0.01  41.7 41.7 50 50 47.8 15.6 6.6 3.0 8.8 3.9
768 0     1.0 1.0   50 50 43.2 13.8 6.2 3.0 6.0 3.0
768 0.001 1.8 1.8   50 50 43.2 13.8 6.5 3.0 6.0 3.0
768 0.005 28.7 28.7 50 50 43.2 14.1 6.6 3.0 6.6 3.0
768 0.01  50 50     50 50 43.9 14.2 7.0 3.0 6.9 3.0
900 0     1.0 1.0   50 50 45.0 14.7 6.4 3.0 5.0 2.9
900 0.001 1.8 1.8   50 50 45.0 14.7 6.3 3.0 5.1 2.9
900 0.005 50 50     50 50 45.2 14.7 6.7 3.0 5.9 3.1
900 0.01  50 50     50 50 45.6 14.9 7.0 3.1 6.5 3.0
"""


def published() -> dict[tuple[int, float], dict[str, tuple[float, float]]]:
    """(peers, failure) to the rounds of each method, to 1e-9 and to 1e-4."""
    found = {}
    for row in _ROWS.split("\n")[1:-1]:
        peers, failure, *rounds = row.split()
        pairs = [(float(a), float(b)) for a, b in zip(rounds[::2], rounds[1::2], strict=True)]
        found[int(peers), float(failure)] = dict(zip(COLUMNS, pairs, strict=True))
    return found
