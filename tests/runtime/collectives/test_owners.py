"""Who reduces what is drawn anew for every operation, on all ranks alike."""

from __future__ import annotations

from tests.support.harness import init, run_good

SUMS = 6


def rank_owns(rank: int, world: int) -> list[bool]:
    """By sum: whether this rank reduced the first half. Nothing arrives, so what it has reduced is
    its own, and the rest is 0."""
    import torch
    import torch.distributed as dist

    init(pg_options={"inject": "loss=1", "on_missing": "zero"})
    first = []
    for _ in range(SUMS):
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor)
        halves = tensor[0].item(), tensor[-1].item()
        assert sorted(halves) == [0.0, float(world)]
        first.append(halves[0] != 0)
    dist.destroy_process_group()
    return first


def test_owners_change_from_sum_to_sum() -> None:
    zero, one = run_good(rank_owns, 2)
    assert [mine != theirs for mine, theirs in zip(zero, one, strict=True)] == [True] * SUMS
    assert len(set(zero)) == 2
