"""What one rank remembers of one matrix: the rules of error feedback.

``g``: this rank's gradient; C: what is delivered of what was chosen, c; mean: over the ranks.

    none     c = C(g)                                               use mean(c)
    ef14     c = C(g + e);   e <- g + e - c                         use mean(c)
    ef21     c = C(g - own); own <- own + c; all <- all + mean(c)   use all
    ef21m    h <- (1 - eta) h + eta g, then ef21 of h

EF14 is of Seide et al. (Interspeech 2014) and Karimireddy et al. (arXiv 1901.09847), EF21 of
Richtarik et al. (arXiv 2106.05203), EF21M of Fatkhullin et al. (arXiv 2305.15155); all in the form
of ARC-Top-K (arXiv 2510.26709, eq. 11a-c). EF21 begins with the whole gradient: own = h = g, and
all = mean(own).

A row that was chosen and lost on the way isn't part of C: it stays in e, or in h - own. So ``all``
is the mean of the ranks' ``own`` at any loss, and nothing is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from .selection import Parts

RULES: Final = ("none", "ef14", "ef21", "ef21m")
NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "none": (),
    "ef14": ("error",),
    "ef21": ("own", "all"),
    "ef21m": ("own", "all", "average"),
}
"""What a rule remembers, each a matrix as large as the gradient."""

Applied = Sequence[tuple[Tensor, Tensor]]
"""What all ranks apply: indices of rows, (k,), and what is added to them, (k, n)."""


class Memory:
    """Of one matrix. ``momentum``: eta of EF21M, the weight of the new gradient."""

    def __init__(self, rule: str, momentum: float = 1.0) -> None:
        self.rule = rule
        self._momentum = momentum
        self.tensors: dict[str, Tensor] = {}

    @property
    def begun(self) -> bool:
        """Whether rows can be chosen. EF21 first needs a whole gradient (:meth:`begin`)."""
        return self.rule in ("none", "ef14") or bool(self.tensors)

    def parts(self, gradient: Tensor) -> Parts:
        """What is to be compressed, (m, n), as a sum; changes nothing."""
        held = self.tensors
        if self.rule == "ef14" and held:
            return [(gradient, 1.0), (held["error"], 1.0)]
        if self.rule == "ef21":
            return [(gradient, 1.0), (held["own"], -1.0)]
        if self.rule == "ef21m":
            eta = self._momentum
            parts = [(gradient, eta), (held["own"], -1.0)]
            return parts if eta == 1.0 else [*parts, (held["average"], 1.0 - eta)]
        return [(gradient, 1.0)]

    def take(self, gradient: Tensor) -> Tensor:
        """Takes a gradient in; returns that of which :meth:`rows` chooses."""
        held = self.tensors
        if self.rule == "ef14":
            if held:
                return held["error"].add_(gradient)
            held["error"] = gradient.clone()
            return held["error"]
        if self.rule == "ef21m":
            return held["average"].lerp_(gradient, self._momentum)
        return gradient

    def rows(self, taken: Tensor, index: Tensor, out: Tensor) -> None:
        """c, the rows ``index`` (k,) of what is compressed, into ``out`` (k, n). ``taken``: what
        :meth:`take` returned."""
        chosen = out if out.dtype == taken.dtype else taken.new_empty(out.shape)
        torch.index_select(taken, 0, index, out=chosen)
        if self.rule in ("ef21", "ef21m"):
            chosen.sub_(self.tensors["own"].index_select(0, index))
        if chosen is not out:
            out.copy_(chosen)

    def settle(self, index: Tensor, delivered: Tensor, applied: Applied, result: Tensor) -> None:
        """Of the rows ``index`` that were sent ``delivered`` (k, n) got there, 0 where it didn't.

        ``applied``: what all ranks got. ``result`` (m, n) becomes what is to be used; it may be
        the gradient.
        """
        held = self.tensors
        if self.rule == "ef14":
            held["error"].index_add_(0, index, delivered, alpha=-1)
        if self.rule in ("none", "ef14"):
            result.zero_()
            for rows, values in applied:
                result.index_add_(0, rows, values)
            return
        held["own"].index_add_(0, index, delivered)
        for rows, values in applied:
            held["all"].index_add_(0, rows, values)
        result.copy_(held["all"])

    def begin(self, gradient: Tensor, delivered: Tensor, mean: Tensor) -> None:
        """The first gradient was sent whole: ``delivered`` of it got there, all have ``mean``."""
        self.tensors = {"own": delivered.clone(), "all": mean.clone()}
        if self.rule == "ef21m":
            self.tensors["average"] = gradient.clone()
