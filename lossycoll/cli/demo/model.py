"""The demo's model: a decoder-only transformer over bytes, as plain as it gets."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
HEAD_WIDTH = 32


class Block(nn.Module):
    """Causal self-attention, then a two-layer network; each is added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.network_norm = nn.LayerNorm(width, bias=False)
        self.network_in = nn.Linear(width, 4 * width, bias=False)
        self.network_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        hidden = functional.gelu(self.network_in(self.network_norm(x)))
        out: Tensor = x + self.network_out(hidden)
        return out

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # (batch, length, 3 * width) -> three times (batch, heads, length, HEAD_WIDTH)
        query, key, value = (
            part.view(batch, length, self.heads, HEAD_WIDTH).transpose(1, 2)
            for part in self.query_key_value(x).split(width, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class ByteGPT(nn.Module):
    """Maps bytes (batch, length) to the logits of the byte that follows each."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            # The sum over 2 * layers residual branches should keep the variance of one.
            is_branch_end = name.endswith(("attention_out.weight", "network_out.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if is_branch_end else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.token(tokens) + self.position(positions))
        return functional.linear(self.norm(x), self.token.weight)


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
