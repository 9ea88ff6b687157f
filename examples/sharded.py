"""ShardedOptimizer: gradients and weights may lose packets, and each rank keeps its share of the
optimizer's state. The model isn't wrapped.

torchrun --nproc-per-node 3 examples/sharded.py

A packet of weights that is lost leaves the old ones until the next step's come, or until they are
`max_age` steps old and are sent again. So replicas differ a little, and never for long.
"""

import common
import torch
import torch.distributed as dist

import lossycoll

STEPS = 60


def example() -> str:
    model = common.network()
    optimizer = lossycoll.ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.005, max_age=2
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=0.001)
    task = common.Task(seed=dist.get_rank())
    losses, difference = [], 0.0
    for _ in range(STEPS):
        losses.append(common.step(model, optimizer, task.batch()))
        schedule.step()
        difference = max(difference, common.spread(common.parameters(model)))
        assert len(optimizer.ages()) <= 2 + 1, optimizer.ages()
    assert losses[-1] < 0.2 * losses[0], losses
    assert difference < 0.1, difference  # of weights of about 0.1, in steps of at most 0.005

    optimizer.consolidate_state_dict(to=0)  # which makes replicas equal first
    assert common.spread(common.parameters(model)) == 0
    if dist.get_rank() == 0:
        plain = torch.optim.AdamW(model.parameters())
        plain.load_state_dict(optimizer.state_dict())  # the plain optimizer's format
        assert len(plain.state) == len(list(model.parameters()))
    lost = common.dropped()
    return (
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, replicas differed by at most "
        f"{difference:.3f}, are equal after consolidation, {lost}"
    )


if __name__ == "__main__":
    common.run(example)
