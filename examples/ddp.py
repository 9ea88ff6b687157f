"""The smallest DDP job: fits a linear map to noisy data.

torchrun --nproc-per-node 2 examples/ddp.py --backend lossy
LOSSYCOLL_INJECT="loss=0.1,seed=7" torchrun --nproc-per-node 2 examples/ddp.py
"""

import argparse
import gc

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FEATURES = 128  # 64 KiB of gradient: tensors below 16 KiB are always sent reliably


def train(steps: int) -> float:
    torch.manual_seed(0)  # the same truth and the same first weights on every rank
    truth = torch.randn(FEATURES, FEATURES)
    model = DistributedDataParallel(torch.nn.Linear(FEATURES, FEATURES, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=16.0)

    torch.manual_seed(1 + dist.get_rank())  # but data of its own
    for _ in range(steps):
        inputs = torch.randn(256, FEATURES)
        targets = inputs @ truth + 0.1 * torch.randn(256, FEATURES)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="lossy")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()

    dist.init_process_group(backend=options.backend)
    loss = train(options.steps)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: last loss {loss:.4f}")
    assert loss < 1, "it began with 128"
    # DDP's wrapper is part of a reference cycle. While it lives, so do gloo's threads, and those
    # can abort the process while the interpreter is going down.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
