"""A compiled DDP model, with gradients that may lose packets.

torchrun --nproc-per-node 2 examples/compiled_ddp.py
COMPILER=inductor torchrun --nproc-per-node 2 examples/compiled_ddp.py

Compiled or not, DDP reduces its buckets in the backward pass as always; torch cuts the graph so
that each bucket can leave early. ``inductor`` is torch's default and needs a C++ compiler; the
example takes ``aot_eager``, which goes the same way through DDP and compiles in no time.
"""

import os

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

STEPS = 40
HIDDEN = 4096  # 2 MiB of gradient, for more than one bucket


class Network(nn.Module):
    """A class of one's own: torch takes its own ones, such as Sequential, as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = common.network(HIDDEN)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def example() -> str:
    compiler = os.environ.get("COMPILER", "aot_eager")
    model = DistributedDataParallel(Network(), bucket_cap_mb=1)
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(model, backend=counter)
    task = common.Task(seed=dist.get_rank())
    inputs, _ = task.batch()
    torch.testing.assert_close(compiled(inputs), Network()(inputs))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        losses.append(common.step(compiled, optimizer, task.batch()))
    assert losses[-1] < 0.2 * losses[0], losses
    graphs = counter.frame_count
    assert graphs > 1, f"{graphs} graphs"  # one for each bucket
    lost = common.dropped()
    return f"{compiler}, {graphs} graphs, loss {losses[0]:.3f} -> {losses[-1]:.3f}, {lost}"


if __name__ == "__main__":
    common.run(example)
