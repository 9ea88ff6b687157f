"""What the tests of ARC-Top-K share: all nodes of a training in one process, and its objectives."""

from __future__ import annotations

import torch
from torch import Tensor

from lossycoll.train.compress import selection
from lossycoll.train.compress.error_memory import RowSum, memory_of
from lossycoll.train.compress.selection import kept_rows

BLOCKS, BLOCK = 200, 10
NOISE_BLOCKS, SIGNAL = 150, 150
XI, GAMMA, TARGET = 100.0, 5.0, 1.0
OPTIMUM = (TARGET - XI * GAMMA) / (1 + GAMMA**2)


def shifted_gradients(w: Tensor, signs: Tensor) -> Tensor:
    """The robust shifted objective: half of the nodes pull the noise blocks one way, half the
    other. ``w`` (200, 10), ``signs`` (nodes,) of +-1; returns (nodes, 200, 10).

    f_i = |w_s - 1|^2 / 2 + sum_b |w_b - (xi_i + gamma_i w_s)|^2 / 300 over the 150 noise blocks b.
    """
    out = torch.zeros(len(signs), BLOCKS, BLOCK)
    sign = signs.view(-1, 1, 1)
    gap = w[:NOISE_BLOCKS] - (XI * sign + GAMMA * sign * w[SIGNAL])
    out[:, :NOISE_BLOCKS] = gap / NOISE_BLOCKS
    out[:, SIGNAL] = w[SIGNAL] - TARGET - GAMMA * signs.view(-1, 1) * gap.mean(1)
    return out


def distance(w: Tensor) -> float:
    best = torch.zeros_like(w)
    best[SIGNAL] = OPTIMUM
    return float((w - best).norm())


class Nodes:
    """``nodes`` ranks with matrices (rows, columns) and one memory rule, in one process.

    All nodes' matrices stand side by side, (rows, nodes * columns), in one memory: its rules are by
    element, and rows are chosen for all alike. For "topk" they stand below each other.
    """

    def __init__(
        self, nodes: int, rule: str, method: str, ratio: float, sketch_dim: int = 2,
        momentum: float = 1.0, seed: int = 1,
        whole_first: bool = True,
    ) -> None:  # fmt: skip
        self.nodes, self.method, self.ratio, self.dim = nodes, method, ratio, sketch_dim
        self.memory = memory_of(rule, momentum)
        self.seed, self.step, self.whole_first = seed, 0, whole_first

    def used(self, gradients: Tensor) -> Tensor:
        """What a step uses, (rows, columns), of ``gradients`` (nodes, rows, columns)."""
        self.step += 1
        nodes, rows, columns = gradients.shape
        if self.method == "dense":
            return gradients.mean(0)
        if self.method == "topk":
            return self._own_rows(gradients)
        flat = gradients.transpose(0, 1).reshape(rows, nodes * columns)
        if not self.memory.ready and self._begin(flat, gradients.mean(0).repeat(1, nodes)):
            return gradients.mean(0)
        k = kept_rows(rows, self.ratio)
        draw = selection.generator(self.seed, self.step)
        if self.method == "arc":
            v = selection.directions(columns, self.dim, draw, flat).repeat(1, nodes)
            index = selection.best(
                selection.scores(selection.sketch(self.memory.parts(flat), v)), k
            )
        else:
            index = selection.random_rows(rows, k, draw)
        accumulated = self.memory.accumulate(flat)
        sent = flat.new_empty(k, nodes * columns)
        self.memory.select(accumulated, index, sent)
        mean = sent.view(k, nodes, columns).mean(1).repeat(1, nodes)
        self.memory.update(RowSum(index, sent), [RowSum(index, mean)], flat)
        return flat[:, :columns].clone()

    def _begin(self, flat: Tensor, mean: Tensor) -> bool:
        """Whether the first gradient is sent whole; otherwise it is as if it had been zero."""
        start = flat if self.whole_first else torch.zeros_like(flat)
        self.memory.initialize(flat, start, mean if self.whole_first else start)
        return self.whole_first

    def _own_rows(self, gradients: Tensor) -> Tensor:
        nodes, rows, columns = gradients.shape
        flat = gradients.reshape(nodes * rows, columns)
        if not self.memory.ready and self._begin(flat, gradients.mean(0).repeat(nodes, 1)):
            return gradients.mean(0)
        k = kept_rows(rows, self.ratio)
        found = selection.row_scores(self.memory.parts(flat)).view(nodes, rows)
        own = torch.cat([selection.best(found[i], k) + i * rows for i in range(nodes)])
        accumulated = self.memory.accumulate(flat)
        sent = flat.new_empty(nodes * k, columns)
        self.memory.select(accumulated, own, sent)
        everywhere = torch.cat([own % rows + i * rows for i in range(nodes)])
        applied = RowSum(everywhere, (sent / nodes).repeat(nodes, 1))
        self.memory.update(RowSum(own, sent), [applied], flat)
        return flat[:rows].clone()


def shifted_run(
    method: str, ratio: float, at: tuple[int, ...], nodes: int = 10, sketch_dim: int = 2
) -> list[float]:
    """Distances to the optimum after the steps ``at``: EF21 with heavy-ball momentum of 0.5, from
    zero memories, as the paper's script has it."""
    signs = torch.ones(nodes)
    signs[nodes // 2 :] = -1
    noise = torch.Generator().manual_seed(42)
    made = Nodes(nodes, "ef21", method, ratio, sketch_dim, whole_first=False)
    w = torch.zeros(BLOCKS, BLOCK)
    velocity = torch.zeros(nodes, BLOCKS, BLOCK)
    out = []
    for step in range(1, max(at) + 1):
        gradients = shifted_gradients(w, signs)
        gradients += 1e-3 * torch.randn(gradients.shape, generator=noise)
        velocity = 0.5 * velocity + gradients
        w = w - 1e-3 * made.used(velocity)
        if step in at:
            out.append(distance(w))
    return out
