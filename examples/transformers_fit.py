"""Transformers' Trainer on accelerate, which asks for gloo on CPUs: LOSSYCOLL_REPLACE=gloo.

LOSSYCOLL_REPLACE=gloo torchrun --nproc-per-node 2 --max-restarts 1 examples/transformers_fit.py

Two micro-batches a step, an evaluation each epoch, checkpoints, and a second training that resumes
from one. A rank is killed in it, torchrun starts all again, and they resume once more. DriftBound
holds the replicas together; it is attached by a callback, as Trainer makes its optimizer late.
"""

from typing import Any

import common
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import lossycoll

EPOCHS = 4


class KeepTogether(TrainerCallback):
    """One line, where Trainer has made its optimizer; and the kill."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **made: Any) -> None:
        if dist.get_backend() == "lossy":
            lossycoll.DriftBound(made["model"], made["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **made: Any) -> None:
        if state.epoch is not None and state.epoch > EPOCHS / 2 + 0.5:
            common.die_once()


class Model(nn.Module):
    """The examples' network, in Trainer's form."""

    def __init__(self) -> None:
        super().__init__()
        self.network = common.network()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.network(inputs)
        return {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}


class Rows(Dataset[dict[str, Tensor]]):
    """Trainer deals them to the ranks."""

    def __init__(self, seed: int, rows: int) -> None:
        self._inputs, self._targets = common.Task(seed).batch(rows)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"inputs": self._inputs[row], "labels": self._targets[row]}


def trainer(epochs: int) -> Trainer:
    return Trainer(
        Model(),
        TrainingArguments(
            str(common.scratch()),
            num_train_epochs=epochs,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=64,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_strategy="no",
            label_names=["labels"],
            disable_tqdm=True,
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=Rows(0, 2048),
        eval_dataset=Rows(9, 256),
        callbacks=[KeepTogether()],
    )


def main() -> None:
    common.backend()
    # Makes the process group. A Trainer that has evaluated doesn't wrap its model in DDP any more.
    before = trainer(EPOCHS).evaluate()["eval_loss"]
    if not common.attempt():
        trainer(EPOCHS // 2).train()
    second = trainer(EPOCHS)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == EPOCHS * 2048 // (2 * 32 * dist.get_world_size())
    after = second.evaluate()["eval_loss"]
    assert after < 0.3 * before, (before, after)
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, after)
    assert max(losses) == min(losses), losses  # Trainer's is a mean over all ranks
    lost = common.dropped()
    common.finish(
        f"attempt {common.attempt() + 1}, resumed, evaluation loss {before:.3f} -> {after:.3f}, "
        f"{common.fingerprint(second.model)}, {lost}"
    )


if __name__ == "__main__":
    main()
