"""Loss that nothing makes up for is said once while a job trains, and once at its end."""

from __future__ import annotations

import time

from tests.support.harness import init, run_ranks

LOSSY = {
    "LOSSYCOLL_INJECT": "loss=5%,seed=7",
    "LOSSYCOLL_DEADLINE_MIN": "0.02",
    "LOSSYCOLL_MTU": "1500",
    "LOSSYCOLL_LIVENESS": "1",
}
STEPS = 12


def train(method: str, seconds: float) -> tuple[int, float]:
    """Packets that were missing here, and the drift at the end."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import lossycoll

    init()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(400, 400))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if method == "bound":
        lossycoll.DriftBound(model, optimizer, repair=0, max_missing=0.5)
    torch.manual_seed(1 + dist.get_rank())
    end = time.monotonic() + seconds
    for step in range(10_000):
        optimizer.zero_grad()
        model(torch.randn(4, 400)).square().mean().backward()
        optimizer.step()
        done = torch.tensor([step >= STEPS and time.monotonic() > end])
        dist.broadcast(done, 0)
        if done:
            break
    out = lossycoll.stats().packets_missing, lossycoll.measure_drift(model).relative_rms
    dist.destroy_process_group()
    return out


def rank_plain(rank: int, world: int) -> tuple[int, float]:
    return train("none", seconds=3.0)


def rank_bound(rank: int, world: int) -> tuple[int, float]:
    return train("bound", seconds=1.0)


def test_plain_ddp_is_told_of_what_is_missing_and_of_the_method() -> None:
    outcomes = run_ranks(rank_plain, 2, LOSSY)
    for outcome in outcomes:
        assert not outcome.error, outcome
        missing, drift = outcome.value
        assert missing > 100
        assert drift > 0
    told = [
        line for line in outcomes[0].stderr.splitlines() if "of the packets were missing" in line
    ]
    assert len(told) == 2, outcomes[0].stderr
    first, last = told
    assert "at this rank so far" in first
    assert "at all ranks, now that the group ends" in last
    for line in told:
        assert "group 0: " in line
        assert "lossycoll.DriftBound(model, optimizer)" in line
    assert "of the packets were missing" not in outcomes[1].stderr


def test_a_job_with_a_method_that_makes_up_for_it_is_not() -> None:
    for outcome in run_ranks(rank_bound, 2, LOSSY):
        assert not outcome.error, outcome
        assert outcome.value[0] > 100
        assert "of the packets were missing" not in outcome.stderr, outcome.stderr
