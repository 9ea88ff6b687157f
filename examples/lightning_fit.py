"""Lightning's Trainer and Fabric: training, validation and epoch metrics over all ranks.

torchrun --nproc-per-node 2 examples/lightning_fit.py

Lightning makes the process group itself. It averages metrics with AVG, integers among them; those
and all metrics below 16 KiB are exact, and only gradients lose packets. ``sync_dist=True`` is what
makes a metric one of all ranks.
"""

import logging
import tempfile
import warnings

import common
import lightning
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4
Batch = tuple[Tensor, Tensor]


class Model(LightningModule):
    """The examples' network, with metrics that need all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.network = common.network()
        self.validated: list[float] = []

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.network(batch[0]), batch[1])
        self.log("train", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        loss = nn.functional.mse_loss(self.network(batch[0]), batch[1])
        self.log("valid", loss, sync_dist=True)
        # Each rank has another number of rows: what Lightning weighs an epoch's means by.
        rows = torch.tensor(len(batch[0]))
        self.log("rows", rows.float(), reduce_fx="sum", sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["valid"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.005)


def loader(seed: int, rows: int) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*common.Task(seed).batch(rows)), batch_size=64)


def fit(backend: str, rank: int, world: int) -> tuple[Model, str]:
    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=world,
            strategy=DDPStrategy(process_group_backend=backend),
            max_epochs=EPOCHS,
            use_distributed_sampler=False,  # the data is each rank's own
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        trainer.fit(model, loader(rank, 1024), loader(100 + rank, 128 + 64 * rank))
        assert dist.get_backend() == backend
        # The sanity check's metrics aside, all ranks have seen the same, and it became better.
        seen = torch.tensor(model.validated)
        assert common.spread(seen) == 0, seen
        assert seen[-1] < 0.5 * seen[0], seen
        rows = trainer.callback_metrics["rows"]
        assert rows == sum(128 + 64 * r for r in range(world)), rows
    first, last = model.validated[0], model.validated[-1]
    return model, f"validation loss {first:.3f} -> {last:.3f}, alike on all ranks"


def average(backend: str, rank: int, world: int) -> None:
    """What Fabric reduces: a mean of integers is one that is truncated, as NCCL's is."""
    fabric = Fabric(
        accelerator="cpu", devices=world, strategy=FabricDDPStrategy(process_group_backend=backend)
    )
    fabric.launch()
    model = common.network()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.005))
    task = common.Task(seed=rank)
    losses = []
    for _ in range(20):
        inputs, targets = task.batch()
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    total = fabric.all_reduce(torch.tensor(float(rank)), reduce_op="sum")
    assert total == sum(range(world)), total
    if backend == "lossy":
        counts = torch.tensor([rank + 1, -rank - 1])
        dist.all_reduce(counts, dist.ReduceOp.AVG)
        mean = sum(range(1, world + 1)) // world
        assert counts.tolist() == [mean, -mean], counts


def main() -> None:
    backend = common.backend()
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    lightning.seed_everything(0)
    environment = lightning.fabric.plugins.environments.TorchElasticEnvironment()
    rank, world = environment.global_rank(), environment.world_size()
    summary = fit(backend, rank, world)[1]
    average(backend, rank, world)
    lost = common.dropped()
    if rank == 0:
        print(f"lightning_fit: {summary}, {lost}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
