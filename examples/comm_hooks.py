"""Built-in communication hooks: gradients as float16, as bfloat16, as PowerSGD's factors.

torchrun --nproc-per-node 2 examples/comm_hooks.py

Compressed gradients may lose packets, as any may; PowerSGD's factors must not: factors that differ
between ranks no longer fit together. So it has a reliable group. PowerSGD also issues collectives
when earlier ones complete: with several buckets in another order on each rank, unless the group
keeps its futures in order. Gloo has no such thing: there it fails.

DDP refuses the name of bf16_compress_hook without NCCL, though a CPU can do all that is in it:
hence the function here.
"""

from collections.abc import Callable

import common
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import lossycoll

STEPS = 40


def bfloat16(group: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.bf16_compress_hook(group, bucket)


def train(hook: Callable, state: object = None, group: dist.ProcessGroup | None = None) -> float:
    """The last loss, as a share of the first. Several buckets, as larger models have them."""
    model = DistributedDataParallel(common.network(), process_group=group, bucket_cap_mb=0.05)
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    task = common.Task(seed=dist.get_rank())
    losses = []
    for _ in range(STEPS):
        losses.append(common.step(model, optimizer, task.batch()))
    assert losses[-1] < 0.5 * losses[0], (hook.__name__, losses)
    return losses[-1] / losses[0]


def example() -> str:
    options = None
    if dist.get_backend() == "lossy":
        options = lossycoll.Options(futures="in_order", delivery="reliable")
    in_order = dist.new_group(pg_options=options)
    power = powerSGD_hook.PowerSGDState(
        in_order, matrix_approximation_rank=8, start_powerSGD_iter=4, min_compression_rate=1
    )
    shares = {
        "fp16": train(default_hooks.fp16_compress_hook),
        "bf16": train(bfloat16),
        "PowerSGD": train(powerSGD_hook.powerSGD_hook, power, in_order),
    }
    text = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
    return f"last loss over first: {text}; {common.dropped()}"


if __name__ == "__main__":
    common.run(example)
