"""BatchNorm's buffers and a static graph, with activation checkpointing.

torchrun --nproc-per-node 2 examples/ddp_buffers.py

Before each forward DDP copies the buffers from rank 0. Copies are never lossy, so all ranks
normalise alike in evaluation, even where lost packets let their weights drift apart a little.
"""

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 60


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(common.FEATURES, common.HIDDEN), nn.ReLU())
        self.norm = nn.BatchNorm1d(common.HIDDEN)
        self.last = nn.Linear(common.HIDDEN, common.FEATURES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self.first, inputs, use_reentrant=False)
        return self.last(self.norm(hidden))


def example() -> str:
    torch.manual_seed(0)
    net = Normalised()
    model = DistributedDataParallel(net, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    task = common.Task(seed=dist.get_rank())
    losses = []
    for _ in range(STEPS):
        losses.append(common.step(model, optimizer, task.batch()))
    assert losses[-1] < 0.3 * losses[0], losses

    model(task.batch()[0])  # what training has changed goes out with the next forward
    before = [common.spread(buffer.float()) for buffer in net.buffers()]
    model.eval()
    with torch.no_grad():
        model(task.batch()[0])
    after = [common.spread(buffer.float()) for buffer in net.buffers()]
    assert max(before) > 0, before
    assert max(after) == 0, after
    lost = common.dropped()
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, buffers equal after a forward, {lost}"


if __name__ == "__main__":
    common.run(example)
