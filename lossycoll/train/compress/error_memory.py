"""The rules of error feedback: what one rank remembers of one matrix.

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
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from .selection import Parts


@dataclass(frozen=True, slots=True)
class RowSum:
    index: Tensor  # int64 (k,), the rows
    values: Tensor  # (k, n), what is added to each of them


class ErrorMemory:
    """The rule ``none``: nothing is remembered.

    A step is :meth:`parts` (by which rows are chosen), :meth:`accumulate`, :meth:`select` and
    :meth:`update`. A rule that is not :attr:`ready` first needs a gradient that is sent whole, and
    :meth:`initialize`. Gradients are (m, n), an index is int64 (k,). From :meth:`hold` until
    :meth:`commit`, steps can be undone by :meth:`revert`.
    """

    names: ClassVar[tuple[str, ...]] = ()
    """Names of the memories, each a matrix as large as the gradient."""
    keeps_mean: ClassVar[bool] = False
    """Whether it adds up means, in which rounding would add up as well."""

    def __init__(self, momentum: float = 1.0) -> None:
        self._momentum = momentum  # that of the rule ``ef21m``
        self.tensors: dict[str, Tensor] = {}
        self.shape: tuple[int, ...] | None = None  # the gradient's, once it was met
        self.residual: Tensor | None = None  # what was lost of a gradient sent whole, for the next
        self._before: tuple[dict[str, Tensor], Tensor | None] | None = None
        """Tensors, but for rows of them, and residual at :meth:`hold`; None unless held."""
        self._changed: list[tuple[Tensor, RowSum]] = []
        """Rows of those tensors that have changed since, as they were."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_before": None, "_changed": []}

    @property
    def ready(self) -> bool:
        return True

    def move(self, device: torch.device) -> None:
        """Moves what is remembered to the gradient's device: after loading it may be elsewhere."""
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        if self.residual is not None:
            self.residual = self.residual.to(device)

    def parts(self, gradient: Tensor) -> Parts:
        """The addends of what is to be compressed of a gradient; changes nothing."""
        return [(gradient, 1.0)]

    def accumulate(self, gradient: Tensor) -> Tensor:
        """Takes a gradient in, and returns the matrix that :meth:`select` reads."""
        return gradient

    def select(self, accumulated: Tensor, index: Tensor, out: Tensor) -> None:
        """Writes the rows ``index`` of what is compressed to ``out``."""
        rows = out if out.dtype == accumulated.dtype else accumulated.new_empty(out.shape)
        torch.index_select(accumulated, 0, index, out=rows)
        self._subtract_sent(rows, index)
        if rows is not out:
            # A memory can exceed float16; what is cut off counts as not delivered.
            out.copy_(within(rows, out.dtype))

    def _subtract_sent(self, rows: Tensor, index: Tensor) -> None:
        """Takes from ``rows`` what all ranks have of them already."""

    def update(self, delivered: RowSum, applied: Sequence[RowSum], result: Tensor) -> None:
        """Ends a step: ``result``, maybe the gradient itself, becomes what is to be used.

        ``delivered`` are the rows that this rank sent, zeros where lost; ``applied`` add up to the
        means over all ranks.
        """
        self._replace(applied, result)

    def _replace(self, applied: Sequence[RowSum], result: Tensor) -> None:
        result.zero_()
        for rows in applied:
            result.index_add_(0, rows.index, rows.values)

    def initialize(self, gradient: Tensor, delivered: Tensor, mean: Tensor) -> None:
        """Takes in the first gradient, sent whole: what of it arrived, and its mean."""

    # ---- steps that may come to nothing ----

    def hold(self) -> None:
        self._before, self._changed = (dict(self.tensors), self.residual), []

    def commit(self) -> None:
        self._before, self._changed = None, []

    def revert(self) -> None:
        if self._before is None:
            return
        for tensor, rows in reversed(self._changed):
            tensor.index_copy_(0, rows.index, rows.values)
        self.tensors, self.residual = self._before
        self.commit()

    def _is_kept(self, name: str) -> bool:
        """True if a tensor must be restored by :meth:`revert`."""
        before = None if self._before is None else self._before[0].get(name)
        return before is not None and before is self.tensors[name]

    def _add_rows(self, name: str, rows: RowSum, factor: float = 1.0) -> None:
        tensor = self.tensors[name]
        if self._is_kept(name):
            found = tensor.index_select(0, rows.index)
            self._changed.append((tensor, RowSum(rows.index, found)))
        tensor.index_add_(0, rows.index, rows.values, alpha=factor)


class EF14Memory(ErrorMemory):
    """Remembers the error: what was not delivered."""

    names: ClassVar[tuple[str, ...]] = ("error",)

    def parts(self, gradient: Tensor) -> Parts:
        error = self.tensors.get("error")
        return [(gradient, 1.0)] if error is None else [(gradient, 1.0), (error, 1.0)]

    def accumulate(self, gradient: Tensor) -> Tensor:
        error = self.tensors.get("error")
        if error is None:
            self.tensors["error"] = gradient.clone()
        elif self._is_kept("error"):
            self.tensors["error"] = error + gradient
        else:
            error.add_(gradient)
        return self.tensors["error"]

    def update(self, delivered: RowSum, applied: Sequence[RowSum], result: Tensor) -> None:
        self._add_rows("error", delivered, -1.0)
        self._replace(applied, result)


class EF21Memory(ErrorMemory):
    """Remembers this rank's picture of its gradient, and the mean of all ranks' pictures."""

    names: ClassVar[tuple[str, ...]] = ("own", "all")
    keeps_mean: ClassVar[bool] = True

    @property
    def ready(self) -> bool:
        return bool(self.tensors)

    def parts(self, gradient: Tensor) -> Parts:
        return [(gradient, 1.0), (self.tensors["own"], -1.0)]

    def _subtract_sent(self, rows: Tensor, index: Tensor) -> None:
        rows.sub_(self.tensors["own"].index_select(0, index))

    def update(self, delivered: RowSum, applied: Sequence[RowSum], result: Tensor) -> None:
        self._add_rows("own", delivered)
        for rows in applied:
            self._add_rows("all", rows)
        result.copy_(self.tensors["all"])

    def initialize(self, gradient: Tensor, delivered: Tensor, mean: Tensor) -> None:
        self.tensors = {"own": delivered.clone(), "all": mean.clone()}


class EF21MMemory(EF21Memory):
    """EF21 of the running average of this rank's gradients (arXiv 2305.15155)."""

    names: ClassVar[tuple[str, ...]] = ("own", "all", "average")

    def parts(self, gradient: Tensor) -> Parts:
        eta = self._momentum
        parts = [(gradient, eta), (self.tensors["own"], -1.0)]
        return parts if eta == 1.0 else [*parts, (self.tensors["average"], 1.0 - eta)]

    def accumulate(self, gradient: Tensor) -> Tensor:
        average = self.tensors["average"]
        if self._is_kept("average"):
            self.tensors["average"] = average.lerp(gradient, self._momentum)
        else:
            average.lerp_(gradient, self._momentum)
        return self.tensors["average"]

    def initialize(self, gradient: Tensor, delivered: Tensor, mean: Tensor) -> None:
        super().initialize(gradient, delivered, mean)
        self.tensors["average"] = gradient.clone()


RULES: Final[Mapping[str, type[ErrorMemory]]] = {
    "none": ErrorMemory,
    "ef14": EF14Memory,
    "ef21": EF21Memory,
    "ef21m": EF21MMemory,
}


def memory_of(rule: str, momentum: float = 1.0) -> ErrorMemory:
    return RULES[rule](momentum)


def within(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` within the range of a type that may be narrower."""
    if values.dtype == dtype:
        return values
    limits = torch.finfo(dtype)
    return values.clamp(limits.min, limits.max)
