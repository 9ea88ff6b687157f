"""One step of one bucket: gradients in, what is to be used of all ranks' out, in place.

Three collectives at most: the sketches of all matrices in one sum; the chosen rows of all of them,
and whatever is sent whole, in one mean; and for the method ``topk`` a gather of indices and values.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import torch
from torch import Tensor

from ...errors import NonFiniteError
from . import selection
from .error_memory import Memory
from .rows import Form, as_matrix, kept_rows
from .settings import Settings
from .transport import Transport


@dataclass
class Traffic:
    """Numbers (not bytes) that this rank has handed to collectives, by what they are."""

    whole: int = 0
    sketch: int = 0
    rows: int = 0
    indices: int = 0
    flags: int = 0
    lost: int = 0
    """Of those in ``rows`` and ``whole``, what didn't get there and is still remembered."""
    bytes: int = 0


@dataclass(eq=False)
class Item:
    """One gradient. ``form``: as what matrix, None to send it whole. ``memory``: where rows are
    chosen. ``name``: as errors call it."""

    key: str
    name: str
    gradient: Tensor
    form: Form | None
    memory: Memory | None
    work: Tensor = field(init=False)
    """As a matrix (m, n), of at least 32 bits; the gradient's own memory where that has them."""
    index: Tensor = field(init=False)
    bad: bool = False

    def __post_init__(self) -> None:
        form = self.form or Form(1, self.gradient.numel())
        matrix = as_matrix(self.gradient, form)
        self.work = matrix.float() if matrix.element_size() < 4 else matrix

    @property
    def sparse(self) -> bool:
        return self.memory is not None and self.memory.begun

    def finish(self) -> None:
        """What ``work`` has become is the gradient."""
        if self.work.dtype != self.gradient.dtype:
            assert self.form is not None or self.gradient.numel() == self.work.numel()
            as_matrix(self.gradient, Form(*self.work.shape)).copy_(self.work)


@torch.no_grad()
def reduce_whole(flat: Tensor, transport: Transport, traffic: Traffic) -> None:
    """The mean over the ranks of ``flat``, in place; over a lossy group of what arrived, and the
    same on all ranks."""
    traffic.whole += flat.numel()
    traffic.bytes += flat.numel() * flat.element_size()
    if not transport.may_lose:
        transport.sum_(flat)
        flat.div_(transport.world)
        return
    values = transport.room(flat.numel(), flat)
    values[: flat.numel()].copy_(flat)
    mean, _ = transport.mean(values, feedback=False)
    flat.copy_(mean[: flat.numel()])


class Reduction:
    """Of ``items``, in one order on all ranks, which are of one type and on one device.

    ``owed``: by key, what was sent whole and lost. ``step``: its number, to draw from. What is
    drawn for an item doesn't depend on the others, since buckets change and a step should not.
    """

    def __init__(
        self,
        items: Sequence[Item],
        settings: Settings,
        transport: Transport,
        owed: MutableMapping[str, Tensor],
        traffic: Traffic,
        step: int,
    ) -> None:
        self._items = [item for item in items if item.gradient.numel()]
        self._sparse = [item for item in self._items if item.sparse]
        self._whole = [item for item in self._items if not item.sparse]
        self._settings = settings
        self._transport = transport
        self._owed = owed
        self._traffic = traffic
        self._step = step

    @torch.no_grad()
    def run(self) -> None:
        """Raises NonFiniteError on all ranks alike, if the settings say so."""
        if not self._items:
            return
        self._choose()
        good = [item for item in self._sparse if not item.bad]
        own = self._settings.method == "topk"
        self._exchange([] if own else good)
        if own:
            self._gather(good)
        for item in self._sparse:
            if item.bad:
                item.work.fill_(math.nan)
        for item in self._items:
            item.finish()

    # ---- which rows ----

    def _choose(self) -> None:
        """Sets what is not a number on any rank to bad, and the rows of the others."""
        settings, like = self._settings, self._items[0].work
        dim = settings.sketch_dim if settings.method == "arc" else 0
        sizes = [max(1, dim * len(item.work)) for item in self._sparse]
        flags = int(bool(self._whole) and self._transport.may_lose)
        vector = like.new_empty(sum(sizes) + flags, dtype=settings.sketch_dtype)
        if not len(vector):
            return
        pieces = torch.split(vector[: sum(sizes)], sizes)
        if dim and self._sparse:
            widest = max(item.work.shape[1] for item in self._sparse)
            draw = selection.generator(settings.seed, self._step)
            v = selection.directions(widest, dim, draw, like)
            for item, piece in zip(self._sparse, pieces, strict=True):
                found = selection.sketch(_parts(item), v[:, : item.work.shape[1]])
                piece.copy_(found.view(-1))
        else:
            for item, piece in zip(self._sparse, pieces, strict=True):
                piece.fill_(_flag(item.work))
        if flags:
            vector[-1] = sum(_flag(item.work) for item in self._whole)
        self._transport.sum_(vector)
        self._traffic.sketch += sum(sizes) if dim else 0
        self._traffic.flags += flags if dim else len(vector)
        self._traffic.bytes += vector.numel() * vector.element_size()
        if not bool(vector.isfinite().all()):
            for item, piece in zip(self._sparse, pieces, strict=True):
                item.bad = not bool(piece.isfinite().all())
            for item in self._whole:
                item.bad = bool(flags) and not bool(vector[-1].isfinite())
            self._refuse()
        for item, piece in zip(self._sparse, pieces, strict=True):
            if not item.bad:
                item.index = self._rows_of(item, piece)

    def _rows_of(self, item: Item, piece: Tensor) -> Tensor:
        rows = len(item.work)
        k = kept_rows(rows, self._settings.ratio)
        if self._settings.method == "arc":
            summed = piece.view(-1, rows)
            wide = summed.float() if summed.element_size() < 4 else summed
            return selection.best(selection.scores(wide), k)
        if self._settings.method == "topk":
            return selection.best(selection.row_scores(_parts(item)), k)
        draw = selection.generator(self._settings.seed, self._step, crc32(item.key.encode()))
        return selection.random_rows(rows, k, draw).to(item.work.device)

    def _refuse(self) -> None:
        bad = [item.name for item in self._items if item.bad]
        if bad and self._settings.on_nonfinite == "raise":
            listed = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
            raise NonFiniteError(
                f"{self._transport}: the gradient of {listed} holds NaN or infinity on some rank; "
                f"lower the learning rate or clip, or take on_nonfinite='pass', which hands NaN to "
                f"the optimizer of all ranks and leaves the memory of errors as it was"
            )

    # ---- what is sent ----

    def _exchange(self, chosen: Sequence[Item]) -> None:
        """Sends rows and what is sent whole; ``chosen`` have rows in it."""
        sizes = [len(item.index) * item.work.shape[1] for item in chosen]
        sizes += [item.work.numel() for item in self._whole]
        if not sizes:
            return
        taken = [_memory(item).take(item.work) for item in chosen]
        values = self._transport.room(sum(sizes), self._items[0].gradient)
        pieces = torch.split(values[: sum(sizes)], sizes)
        for item, source, piece in zip(chosen, taken, pieces, strict=False):
            _memory(item).rows(source, item.index, piece.view(len(item.index), -1))
        for item, piece in zip(self._whole, pieces[len(chosen) :], strict=True):
            piece.copy_(item.work.view(-1))
            if item.key in self._owed:
                piece.add_(self._owed[item.key])
        feedback = self._settings.error_feedback != "none"
        mean, lost = self._transport.mean(values, feedback=feedback)
        delivered = values if lost is None else values.masked_fill(lost, 0)
        self._note(sum(sizes[: len(chosen)]), sum(sizes[len(chosen) :]), values, lost)
        means = torch.split(mean[: sum(sizes)], sizes)
        arrived = torch.split(delivered[: sum(sizes)], sizes)
        for item, got, used in zip(chosen, arrived, means, strict=False):
            like, shape = item.work, (len(item.index), -1)
            applied = [(item.index, used.view(shape).to(like.dtype))]
            _memory(item).settle(item.index, got.view(shape).to(like.dtype), applied, like)
        for item, sent, got, used in zip(
            self._whole, *(part[len(chosen) :] for part in (pieces, arrived, means)), strict=True
        ):
            self._settle_whole(item, sent, got, used)
        self._refuse()

    def _settle_whole(self, item: Item, sent: Tensor, delivered: Tensor, mean: Tensor) -> None:
        shape, dtype = item.work.shape, item.work.dtype
        first = item.memory is not None
        if not item.bad and (first or self._settings.on_nonfinite == "raise"):
            item.bad = not bool(mean.isfinite().all())
        if not item.bad and first:
            assert item.memory is not None
            parts = (part.view(shape).to(dtype) for part in (delivered, mean))
            item.memory.begin(item.work, *parts)
        elif not item.bad and self._settings.error_feedback != "none":
            missed = sent - delivered if sent.data_ptr() != delivered.data_ptr() else None
            if missed is not None:
                self._owed[item.key] = missed
            else:
                self._owed.pop(item.key, None)
        if item.bad and self._transport.may_lose:
            item.work.fill_(math.nan)
        else:
            item.work.copy_(mean.view(shape))

    def _note(self, rows: int, whole: int, values: Tensor, lost: Tensor | None) -> None:
        self._traffic.rows += rows
        self._traffic.whole += whole
        self._traffic.bytes += (rows + whole) * values.element_size()
        if lost is not None:
            self._traffic.lost += int(lost[: rows + whole].sum())

    def _gather(self, chosen: Sequence[Item]) -> None:
        """Each rank's own rows and their indices go to all; nothing is lost."""
        if not chosen:
            return
        sizes = [len(item.index) * item.work.shape[1] for item in chosen]
        counts = [len(item.index) for item in chosen]
        values = self._items[0].gradient.new_empty(sum(sizes))
        for item, piece in zip(chosen, torch.split(values, sizes), strict=True):
            taken = _memory(item).take(item.work)
            _memory(item).rows(taken, item.index, piece.view(len(item.index), -1))
        indices = torch.cat([item.index for item in chosen]).int()
        all_values = torch.split(self._transport.stack(values), sizes, dim=1)
        all_indices = torch.split(self._transport.stack(indices), counts, dim=1)
        self._traffic.rows += sum(sizes)
        self._traffic.indices += sum(counts)
        self._traffic.bytes += values.numel() * values.element_size() + 4 * sum(counts)
        for item, own, found, places in zip(
            chosen, torch.split(values, sizes), all_values, all_indices, strict=True
        ):
            like, shape = item.work, (len(item.index), -1)
            applied = [
                (places[rank].long(), found[rank].view(shape).to(like.dtype) / len(found))
                for rank in range(len(found))
            ]
            _memory(item).settle(item.index, own.view(shape).to(like.dtype), applied, like)


def _memory(item: Item) -> Memory:
    assert item.memory is not None
    return item.memory


def _parts(item: Item) -> selection.Parts:
    return _memory(item).parts(item.work)


def _flag(tensor: Tensor) -> float:
    """0, or NaN where something isn't a number."""
    low, high = torch.aminmax(tensor)  # one pass, and NaN gets through
    return float((low - low) + (high - high))
