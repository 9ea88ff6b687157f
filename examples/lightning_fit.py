"""Lightning's Trainer: training, validation and epoch metrics over all ranks.

torchrun --nproc-per-node 2 --max-restarts 1 examples/lightning_fit.py

Lightning makes the process group itself. It averages metrics with AVG, integers among them; those
and all metrics below 16 KiB are exact, and only gradients lose packets. ``sync_dist=True`` is what
makes a metric one of all ranks. Two micro-batches make a step. A rank is killed in the middle of
the training, torchrun starts all again, and they resume from the checkpoint. DriftBound holds the
replicas together; it is attached where Lightning has made its optimizer.
"""

import logging
import warnings
from typing import Any

import common
import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lossycoll

EPOCHS, ROWS, BATCH, MICRO_BATCHES = 4, 1024, 32, 2
DIES_IN = 2
Batch = tuple[Tensor, Tensor]


class Model(LightningModule):
    """The examples' network, with metrics that need all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.network = common.network()
        self.validated: list[float] = []

    def on_train_start(self) -> None:
        if dist.get_backend() == "lossy":
            lossycoll.DriftBound(self.trainer.model, self.trainer.optimizers[0])

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

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.current_epoch == DIES_IN:
            common.die_once()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["validated"] = self.validated

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.validated = checkpoint["validated"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.005)


def loader(seed: int, rows: int) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*common.Task(seed).batch(rows)), batch_size=BATCH)


def fit(backend: str, rank: int, world: int) -> str:
    model, folder = Model(), common.scratch()
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=EPOCHS,
        accumulate_grad_batches=MICRO_BATCHES,
        use_distributed_sampler=False,  # the data is each rank's own
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    kept = str(folder / "last.ckpt") if common.attempt() else None
    trainer.fit(model, loader(rank, ROWS), loader(100 + rank, 128 + 64 * rank), ckpt_path=kept)
    assert dist.get_backend() == backend
    # The sanity check's metrics aside, all ranks have seen the same, and it became better.
    seen = torch.tensor(model.validated)
    assert common.spread(seen) == 0, seen
    assert seen[-1] < 0.5 * seen[0], seen
    assert trainer.global_step == EPOCHS * ROWS // (BATCH * MICRO_BATCHES)
    rows = trainer.callback_metrics["rows"]
    assert rows == sum(128 + 64 * r for r in range(world)), rows
    return (
        f"attempt {common.attempt() + 1}, validation loss {seen[0]:.3f} -> {seen[-1]:.3f}, "
        f"alike on all ranks, {common.fingerprint(model)}"
    )


def main() -> None:
    backend = common.backend()
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    lightning.seed_everything(0)
    environment = lightning.fabric.plugins.environments.TorchElasticEnvironment()
    rank, world = environment.global_rank(), environment.world_size()
    summary = fit(backend, rank, world)
    common.finish(f"{summary}, {common.dropped()}")


if __name__ == "__main__":
    main()
