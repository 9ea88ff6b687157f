"""What stands in the place of packets that no reduction reached, through a group."""

from __future__ import annotations

import pytest

from tests.support.harness import init, run_good

FILLED = {"own": "own_filled", "zero": "zero_filled", "keep": "kept"}
"""The figure that counts it, by the option's value."""
ELEMENTS = 100_000


def rank_sums(rank: int, world: int) -> dict[str, tuple[dict[str, int], list[float]]]:
    """By the option's value: the report's figures, and the values that the sum left."""
    import torch
    import torch.distributed as dist

    import lossycoll

    init(pg_options={"inject": "loss=0.5,seed=3"})
    out = {}
    for value in FILLED:
        with lossycoll.lossy(on_missing=value):
            tensor = torch.full((ELEMENTS,), float(rank + 1))
            dist.all_reduce(tensor)
        report = lossycoll.last_report()
        assert report is not None
        figures = {name: getattr(report, name) for name in FILLED.values()}
        out[value] = figures, tensor.unique().tolist()
    dist.destroy_process_group()
    return out


@pytest.mark.parametrize("world", [2])
def test_what_is_missing_is_filled_as_the_option_says(world: int) -> None:
    for rank, out in enumerate(run_good(rank_sums, world)):
        own = float(rank + 1)
        # The mean of those that arrived, times the world; what is missing: twice the own, 0, as is.
        sums = {2.0, 3.0, 4.0}
        filled = {"own": {2 * own}, "zero": {0.0}, "keep": {own}}
        for value, (figures, values) in out.items():
            assert figures[FILLED[value]] > 0, figures
            assert sum(figures.values()) == figures[FILLED[value]], figures
            assert filled[value] <= set(values) <= sums | filled[value], (rank, value, values)
