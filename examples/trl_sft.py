"""TRL's SFTTrainer with PEFT's LoRA: accumulation, evaluation, checkpoints, and a kill.

LOSSYCOLL_REPLACE=gloo torchrun --nproc-per-node 2 --max-restarts 1 examples/trl_sft.py

The model, its tokenizer and the sentences are made here. A rank is killed in the middle of the
training, torchrun starts all again, and they go on from the checkpoint. DriftBound holds the
replicas of the adapters together; TRL's Trainer makes its optimizer late.
"""

from __future__ import annotations

import random
from typing import Any

import common
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

import lossycoll

WORDS = 32
EPOCHS = 3


class KeepTogether(TrainerCallback):
    """One line, where the trainer has made its optimizer; and the kill."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **made: Any) -> None:
        if dist.get_backend() == "lossy":
            lossycoll.DriftBound(made["model"], made["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **made: Any) -> None:
        if state.epoch is not None and state.epoch > 1.5:
            common.die_once()


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{word}": word for word in range(WORDS)} | {"[PAD]": WORDS, "[EOS]": WORDS + 1}
    made = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]", unk_token="[PAD]"
    )


def sentences(seed: int, rows: int) -> Dataset:
    """Each word tells the next one."""
    draws = random.Random(seed)
    texts = []
    for _ in range(rows):
        word, said = draws.randrange(WORDS), []
        for _ in range(12):
            said.append(f"w{word}")
            word = (5 * word + 3) % WORDS
        texts.append(" ".join(said))
    return Dataset.from_dict({"text": texts})


def trainer() -> SFTTrainer:
    shape = LlamaConfig(
        vocab_size=WORDS + 2,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=WORDS,
        eos_token_id=WORDS + 1,
    )
    torch.manual_seed(0)
    return SFTTrainer(
        LlamaForCausalLM(shape),
        SFTConfig(
            str(common.scratch()),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=2e-2,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_strategy="no",
            max_length=32,
            gradient_checkpointing=False,
            bf16=False,
            disable_tqdm=True,
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=sentences(0, 1024),
        eval_dataset=sentences(9, 128),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[KeepTogether()],
    )


def main() -> None:
    common.backend()
    kept = get_last_checkpoint(str(common.scratch())) if common.attempt() else None
    assert bool(kept) == bool(common.attempt())
    # One that has evaluated doesn't wrap its model in DDP any more.
    before = trainer().evaluate()["eval_loss"]
    trained = trainer()
    trained.train(resume_from_checkpoint=kept)
    after = trained.evaluate()["eval_loss"]
    assert after < 0.7 * before, (before, after)
    lost = common.dropped()
    common.finish(
        f"attempt {common.attempt() + 1}, evaluation loss {before:.3f} -> {after:.3f}, "
        f"{common.fingerprint(trained.model)}, {lost}"
    )


if __name__ == "__main__":
    main()
