"""Tensor parallel inference whose activations travel in few bits (Flash Communication).

torchrun --nproc-per-node 2 examples/flash_inference.py

A small decoder learns Python's own source text, the same on each rank. Then its layers are split:
heads and hidden units over the ranks, so that each block adds up partial sums twice. A scope
around a forward pass says how these sums travel. Each way is judged by the perplexity of text that
the model hasn't seen, and by the time until the first token of a prompt.
"""

import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import lossycoll

# As if each rank were a host: within one, nothing is encoded.
os.environ.setdefault("LOSSYCOLL_LINK", "udp")

BYTES, WIDTH, HEADS, BLOCKS, CONTEXT = 256, 128, 4, 2, 64
STEPS, BATCH = 150, 16
WINDOWS = 32  # of text that the model hasn't seen: sums of 1 MiB
PROMPTS, TIMES = 32, 9  # sums of 1 MiB
WAYS: dict[str, dict[str, object]] = {
    "float32": {},
    "bf16": {"wire": "bf16"},
    "int8": {"wire": "int8"},
    "int6": {"wire": "int6"},
    "int5": {"wire": "int5"},
    "int4": {"wire": "int4", "wire_group": 32},
    "int3, spikes": {"wire": "int3", "wire_group": 32, "wire_spikes": 1},
    "int2, spikes": {"wire": "int2", "wire_group": 32, "wire_spikes": 1},
}


class Block(nn.Module):
    """Attention and a perceptron; ``heads`` are those of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normal = self.before(x)
        parts = [
            layer(normal).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.total(self.out(seen.transpose(1, 2).reshape(batch, length, -1)))
        return x + self.total(self.down(functional.gelu(self.up(self.between(x)))))

    def total(self, part: Tensor) -> Tensor:
        """The sum over the ranks, where the block is split."""
        if self.heads < HEADS:
            dist.all_reduce(part)
        return part


class Decoder(nn.Module):
    """int64[batch, length] of bytes -> float32[batch, length, 256], the next ones' logits."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        logits: Tensor = self.head(self.last(self.blocks(x)))
        return logits


def windows(text: Tensor, count: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """(bytes, the next ones), both int64[count, CONTEXT]."""
    begins = torch.randint(len(text) - CONTEXT - 1, (count,), generator=draws)
    rows = torch.stack([text[begin : begin + CONTEXT + 1] for begin in begins])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def learn(text: Tensor) -> Decoder:
    """A decoder that has learnt, the same on every rank."""
    torch.manual_seed(0)
    model, draws = Decoder(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, STEPS + 1):
        loss = loss_of(model, windows(text, BATCH, draws))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0 and dist.get_rank() == 0:
            print(f"training: step {step} of {STEPS}, loss {loss.item():.2f}", flush=True)
    return model.eval()


def split(model: Decoder) -> None:
    """Leaves each rank its part of every block."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for block in model.blocks:
        for layer in (block.query, block.key, block.value, block.up):  # by columns
            for parameter in (layer.weight, layer.bias):
                parameter.data = parameter.data.chunk(world, 0)[rank].contiguous()
        for layer in (block.out, block.down):  # by rows; one rank adds the bias
            layer.weight.data = layer.weight.data.chunk(world, 1)[rank].contiguous()
            layer.bias.data.mul_(rank == 0)
        block.heads = HEADS // world


def scope(how: dict[str, object]) -> AbstractContextManager[None]:
    return lossycoll.reliable(lossy_min_bytes=0, **how)


class Judged(NamedTuple):
    """One way: perplexity, bytes that this rank has sent for it, and milliseconds."""

    perplexity: float
    sent: int
    first_token: float
    sums: float  # those of a first token alone, one after another


@torch.no_grad()
def judge(model: Decoder, unseen: tuple[Tensor, Tensor]) -> Judged:
    before = bytes_sent()
    perplexity = math.exp(loss_of(model, unseen))
    sent = bytes_sent() - before
    prompts = unseen[0][:PROMPTS]
    activations = torch.randn(PROMPTS, CONTEXT, WIDTH)

    def sums() -> None:
        for _ in range(2 * BLOCKS):
            dist.all_reduce(activations.clone())

    token = milliseconds(lambda: model(prompts)[:, -1].argmax(-1))
    return Judged(perplexity, sent, token, milliseconds(sums))


def milliseconds(do: Callable[[], object]) -> float:
    """The median."""
    taken = []
    for _ in range(TIMES):
        dist.barrier()
        begin = time.perf_counter()
        do()
        taken.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(taken)


def bytes_sent() -> int:
    return lossycoll.stats().bytes_sent if dist.get_backend() == "lossy" else 0


def example() -> str:
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    everything = b"".join(path.read_bytes() for path in sources)
    text = torch.frombuffer(bytearray(everything), dtype=torch.uint8).long()
    known, unknown = text[: -len(text) // 10], text[-len(text) // 10 :]
    model = learn(known)
    unseen = windows(unknown, WINDOWS, torch.Generator().manual_seed(2))
    with torch.no_grad():
        alone = math.exp(loss_of(model, unseen))
    split(model)
    found = {}
    for name, how in WAYS.items() if dist.get_backend() == "lossy" else [("float32", {})]:
        with scope(how):
            found[name] = judge(model, unseen)
    plain = found["float32"]
    assert math.isclose(plain.perplexity, alone, rel_tol=1e-4), (plain, alone)
    if dist.get_rank() == 0:
        for name, one in found.items():
            change = f"{one.perplexity / plain.perplexity - 1:+.2%}"
            fewer = f"{plain.sent / one.sent:.1f} times fewer bytes, " if one.sent else ""
            faster = (plain.first_token / one.first_token, plain.sums / one.sums)
            print(
                f"{name:>14}: perplexity {one.perplexity:.3f} ({change}), {fewer}"
                f"first token {one.first_token:.1f} ms ({faster[0]:.2f}x), "
                f"its sums {one.sums:.1f} ms ({faster[1]:.2f}x)"
            )
    if "int4" not in found:
        return f"perplexity {plain.perplexity:.3f}, {common.dropped()}"
    int4 = found["int4"]
    worse = int4.perplexity / plain.perplexity - 1
    assert worse < 0.02, f"int4 changes the perplexity by {worse:+.2%}"
    rest = f"{worse:+.2%} with int4 in {plain.sent / int4.sent:.1f} times fewer bytes"
    return f"perplexity {plain.perplexity:.3f}, {rest}, {common.dropped()}"


if __name__ == "__main__":
    common.run(example)
