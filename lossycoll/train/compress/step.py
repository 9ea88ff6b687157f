"""One step of one bucket: gradients in, what is to be used of all ranks' out, in place.

Three collectives at most: the sketches of all matrices in one sum; the chosen rows of all of them,
and whatever is sent whole, in one mean; and for the method ``topk`` a gathering of indices and
values.

Over a lossy group a mean goes in two halves. The first, to the owners, may lose packets, and each
sender learns which of its contributions the owners gave up (docs/streams.md, "Reporting loss to the
sender"). The second, back from the owners, loses nothing. So all ranks have one mean, bit for bit,
and each knows what of its own is in it: error feedback needs no more.

Both halves may travel in few bits. What rounding takes from a contribution isn't in the mean. What
it adds to a mean counts as the owner's contribution: so the mean is always that of what counts as
delivered, and error feedback makes up for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from lossycoll.errors import NonFiniteError, OptionError
from lossycoll.options.ranges import is_number, is_whole
from lossycoll.plan.codec import codec_of
from lossycoll.train.common.collectives import Collectives, check_all_took_part
from lossycoll.train.common.delivery import Wire, rounded_to
from lossycoll.train.common.models import is_finite

from . import selection
from .error_memory import RULES, ErrorMemory, RowSum, within
from .selection import MatrixShape, as_matrix, kept_rows

METHODS: Final = ("arc", "randk", "topk")
"""Rows by a common sketch, rows drawn at random, and each rank's own largest entries."""
SKETCH_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ON_NONFINITE: Final = ("pass", "raise")
DENSE_BELOW: Final = 1024


@dataclass(frozen=True)
class ARCTopKSettings:
    ratio: float = 0.2  # mu, the share of each matrix's rows that is sent, above 0 up to 1
    sketch_dim: int = 4  # r, numbers of a row's sketch
    start_iter: int = 1000  # steps that send gradients whole before the first that chooses rows
    error_feedback: str = "ef14"  # the rule, one of RULES
    momentum: float = 0.9  # eta of the rule ``ef21m``, above 0 up to 1
    method: str = "arc"  # how rows are chosen, one of METHODS
    # the type in which sketches are summed; None: the gradient's, or float32 where that has fewer
    # bits
    sketch_dtype: torch.dtype | None = None
    dense_below: int = DENSE_BELOW  # a gradient of fewer elements is sent whole
    on_nonfinite: str = "pass"  # what becomes of NaN and infinity: ``"pass"`` or ``"raise"``
    seed: int = 0  # of what is drawn
    wire: str | None = None  # how rows, and what is sent whole, travel; None: as the group has it

    def __post_init__(self) -> None:
        for name in ("ratio", "momentum"):
            value = getattr(self, name)
            if not (is_number(value) and 0 < value <= 1):
                raise OptionError(f"{name} is {value!r}, wanted a number above 0, up to 1")
        for name, least in (("sketch_dim", 1), ("start_iter", 0), ("dense_below", 0), ("seed", 0)):
            value = getattr(self, name)
            if not is_whole(value, least):
                raise OptionError(f"{name} is {value!r}, wanted a whole number from {least} on")
        for name, known in (
            ("error_feedback", RULES),
            ("method", METHODS),
            ("on_nonfinite", ON_NONFINITE),
        ):
            value = getattr(self, name)
            if value not in known:
                raise OptionError(f"{name} is {value!r}, wanted one of {', '.join(known)}")
        if self.sketch_dtype is not None and self.sketch_dtype not in SKETCH_DTYPES:
            listed = ", ".join(str(dtype) for dtype in SKETCH_DTYPES)
            raise OptionError(f"sketch_dtype is {self.sketch_dtype!r}, wanted None or {listed}")
        Wire.of(self.wire)

    @property
    def sketch_size(self) -> int:
        """Numbers that ranks sum for each row to choose by; 0 if rows are chosen otherwise."""
        return self.sketch_dim if self.method == "arc" else 0

    @property
    def own_rows(self) -> bool:
        return self.method == "topk"


@dataclass
class TrafficCounts:
    """Numbers (not bytes) that this rank has handed to collectives, by what they are."""

    whole: int = 0  # of gradients that are sent whole
    sketch: int = 0  # of sketches
    rows: int = 0  # of chosen rows
    indices: int = 0  # of the rows that a rank has chosen by itself
    flags: int = 0  # that say whether something isn't finite
    lost: int = 0
    """Of those in ``rows`` and ``whole``, what was not delivered as it is: what is missing is still
    remembered."""
    bytes: int = 0  # all of these, in bytes


@dataclass(eq=False)
class BucketGradient:
    key: str  # by which it is known from one step to the next
    name: str  # name in errors
    tensor: Tensor  # this rank's; replaced by what is to be used
    shape: MatrixShape | None  # the matrix whose rows are chosen; None to send the gradient whole
    memory: ErrorMemory
    matrix: Tensor = field(init=False)
    """The gradient as (m, n), of at least 32 bits; shares its memory where that has them."""
    index: Tensor = field(init=False)  # the rows that are sent: int64 (k,)
    nonfinite: bool = False  # whether it holds NaN or infinity on any rank

    def __post_init__(self) -> None:
        shape = self.shape or MatrixShape(1, self.tensor.numel())
        matrix = as_matrix(self.tensor, shape)
        self.matrix = matrix.float() if matrix.element_size() < 4 else matrix

    @property
    def sends_rows(self) -> bool:
        return self.shape is not None and self.memory.ready

    @property
    def parts(self) -> selection.Parts:
        return self.memory.parts(self.matrix)

    @property
    def selected(self) -> int:
        return len(self.index) * self.matrix.shape[1]

    def select(self, out: Tensor) -> None:
        """Takes the gradient into the memory, and writes the rows to send to ``out``, (k * n,)."""
        accumulated = self.memory.accumulate(self.matrix)
        self.memory.select(accumulated, self.index, out.view(len(self.index), -1))

    def rows_of(self, index: Tensor, values: Tensor) -> RowSum:
        """Elements (k * n,) as rows ``index``, int64 (k,), of the matrix, in its type."""
        return RowSum(index, values.view(len(index), -1).to(self.matrix.dtype))

    def write_back(self) -> None:
        if self.matrix.dtype != self.tensor.dtype:
            as_matrix(self.tensor, MatrixShape(*self.matrix.shape)).copy_(self.matrix)


REMEDY: Final = (
    "The errors that a lost rank still owed are lost with it: restart with the ranks that are "
    "left, or call reset() on all of them and use a group of theirs"
)


class Mean(NamedTuple):
    """The mean of all ranks' vectors."""

    values: Tensor  # (n,), the same on all ranks
    # (n,), what of this rank's vector is in the mean; its vector itself where nobody wants to know,
    # or nothing was lost
    delivered: Tensor


def padded(collectives: Collectives, numel: int, like: Tensor) -> Tensor:
    """A vector of ``numel`` uninitialized elements, and zeros up to a multiple of the world."""
    chunk = -(-numel // collectives.world)
    out = like.new_empty(chunk * collectives.world)
    out[numel:].zero_()
    return out


def mean(collectives: Collectives, flat: Tensor, *, feedback: bool) -> Mean:
    """The mean over the ranks of (n,), which :func:`padded` made and which stays.

    With ``feedback`` what is lost counts as zero and is reported; otherwise the mean is over the
    contributions that arrived.
    """
    if is_exact(collectives, flat):
        total = flat.clone()
        exact_mean(collectives, total)
        return Mean(total, flat)
    own = flat.new_empty(len(flat) // collectives.world)
    delivered = flat
    if feedback:
        # Of a host it is the sum that is sent, and found there afterwards.
        sent = flat.clone()
        report = collectives.reduce_scatter_reported(own, sent)
        report.wait()
        check_all_took_part(collectives, REMEDY)
        missed = report.missed
        delivered = flat if missed is None else flat - missed
    else:
        collectives.reduce_scatter_mean(own, flat.clone()).wait()
        check_all_took_part(collectives, REMEDY)
    encoding = collectives.parameter_encoding(own)
    if encoding != "same":
        exact = own.clone()
        rounded_to(own, own, encoding, collectives.block_elements(own, encoding))
        if feedback:
            delivered = flat.clone() if delivered is flat else delivered
            part = delivered.view(collectives.world, -1)[collectives.rank]
            part.add_(own - exact, alpha=collectives.world)
    return Mean(collectives.all_gather_parameters(own).view(-1), delivered)


def exact_mean(collectives: Collectives, flat: Tensor) -> None:
    """Replaces (n,) by the mean over the ranks, of whom none may be lost."""
    narrow = flat.dtype is torch.float16  # whose sum could overflow; bfloat16 has float32's range
    if narrow:
        flat.div_(collectives.world)
    collectives.all_reduce(flat).wait()
    check_all_took_part(collectives, REMEDY)
    if not narrow:
        flat.div_(collectives.world)


def is_exact(collectives: Collectives, like: Tensor) -> bool:
    """True if nothing is lost, nor travels in few bits; the same on all ranks."""
    encodings = collectives.gradient_encoding(like), collectives.parameter_encoding(like)
    return not collectives.may_lose and encodings == ("same", "same")


def sent_bytes(collectives: Collectives, like: Tensor, count: int) -> int:
    encoding = collectives.gradient_encoding(like)
    if encoding == "same":
        return count * like.element_size()
    return codec_of(encoding, "f32").wire_bytes(count)


@torch.no_grad()
def mean_whole(flat: Tensor, collectives: Collectives, counts: TrafficCounts) -> None:
    counts.whole += flat.numel()
    counts.bytes += sent_bytes(collectives, flat, flat.numel())
    if is_exact(collectives, flat):
        exact_mean(collectives, flat)
        return
    values = padded(collectives, flat.numel(), flat)
    values[: flat.numel()].copy_(flat)
    flat.copy_(mean(collectives, values, feedback=False).values[: flat.numel()])


class BucketStep:
    """Compresses and averages ``gradients``: of one type and device, in one order on all ranks.

    What is drawn for a gradient depends on ``step``, its number, and on the gradient's key, but not
    on the other gradients: buckets change from run to run, and a step should not.
    """

    def __init__(
        self,
        gradients: Sequence[BucketGradient],
        settings: ARCTopKSettings,
        collectives: Collectives,
        counts: TrafficCounts,
        step: int,
    ) -> None:
        self._gradients = [g for g in gradients if g.tensor.numel()]
        self._in_rows = [g for g in self._gradients if g.sends_rows]
        self._whole = [g for g in self._gradients if not g.sends_rows]
        self._settings = settings
        self._collectives = collectives
        self._counts = counts
        self._step = step
        self._like = _like_sent(gradients[0], settings)
        """A tensor of the type in which means are formed."""
        self._exact = is_exact(collectives, self._like)
        """Whether the mean is that of what is sent, element by element."""

    @torch.no_grad()
    def run(self) -> None:
        """Raises NonFiniteError, on all ranks, if the settings say so."""
        if not self._gradients:
            return
        self._choose_rows()
        chosen = [gradient for gradient in self._in_rows if not gradient.nonfinite]
        if self._settings.own_rows:
            self._average([])
            self._gather(chosen)
        else:
            self._average(chosen)
        for gradient in self._in_rows:
            if gradient.nonfinite:
                gradient.matrix.fill_(math.nan)
        for gradient in self._gradients:
            gradient.write_back()

    # ---- which rows ----

    def _choose_rows(self) -> None:
        """Sets the rows of each matrix that is finite on all ranks.

        What all ranks add up for that: a sketch of each matrix, or a flag where no sketch is used,
        and one flag for all that is sent whole. A flag is NaN where something isn't finite.
        """
        dim = self._settings.sketch_size
        sizes = [max(1, dim * len(gradient.matrix)) for gradient in self._in_rows]
        # In an exact mean NaN shows by itself, but only after memories have changed.
        flagged = bool(self._whole) and (not self._exact or self._raises)
        like = self._gradients[0].matrix
        vector = like.new_empty(sum(sizes) + flagged, dtype=self._settings.sketch_dtype)
        if not len(vector):
            return
        found = list(zip(self._in_rows, torch.split(vector[: sum(sizes)], sizes), strict=True))
        if dim and found:
            widest = max(gradient.matrix.shape[1] for gradient in self._in_rows)
            draw = selection.generator(self._settings.seed, self._step)
            v = selection.directions(widest, dim, draw, like)
        for gradient, part in found:
            if dim:
                columns = gradient.matrix.shape[1]
                part.copy_(selection.sketch(gradient.parts, v[:, :columns]).view(-1))
            else:
                part.fill_(_nonfinite_flag(gradient.matrix))
        if flagged:
            vector[-1] = sum(_nonfinite_flag(gradient.matrix) for gradient in self._whole)
        self._collectives.all_reduce(vector).wait()
        check_all_took_part(self._collectives, REMEDY)
        self._counts.sketch += sum(sizes) if dim else 0
        self._counts.flags += flagged if dim else len(vector)
        self._counts.bytes += vector.numel() * vector.element_size()
        if not bool(vector.isfinite().all()):
            for gradient, part in found:
                gradient.nonfinite = not bool(part.isfinite().all())
            for gradient in self._whole:
                gradient.nonfinite = flagged and not bool(vector[-1].isfinite())
            self._refuse_nonfinite()
        for gradient, part in found:
            if not gradient.nonfinite:
                gradient.index = self._best_rows(gradient, part)

    def _best_rows(self, gradient: BucketGradient, summed: Tensor) -> Tensor:
        rows = len(gradient.matrix)
        k = kept_rows(rows, self._settings.ratio)
        if self._settings.sketch_size:
            sketch = summed.view(-1, rows)
            wide = sketch.float() if sketch.element_size() < 4 else sketch
            return selection.best(selection.scores(wide), k)
        if self._settings.own_rows:
            return selection.best(selection.row_scores(gradient.parts), k)
        draw = selection.generator(self._settings.seed, self._step, crc32(gradient.key.encode()))
        return selection.random_rows(rows, k, draw).to(gradient.matrix.device)

    @property
    def _raises(self) -> bool:
        return self._settings.on_nonfinite == "raise"

    def _refuse_nonfinite(self) -> None:
        bad = [gradient.name for gradient in self._gradients if gradient.nonfinite]
        if bad and self._raises:
            listed = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
            raise NonFiniteError(
                f"{self._collectives}: the gradient of {listed} holds NaN or infinity on some "
                f"rank; lower the learning rate or clip, or take on_nonfinite='pass', which hands "
                f"NaN to the optimizer of all ranks and leaves the memory of errors as it was"
            )

    # ---- what is sent ----

    def _average(self, chosen: Sequence[BucketGradient]) -> None:
        rows = [gradient.selected for gradient in chosen]
        sizes = [*rows, *(gradient.matrix.numel() for gradient in self._whole)]
        end = sum(sizes)
        if not end:
            return
        sent = padded(self._collectives, end, self._like)
        parts = torch.split(sent[:end], sizes)
        for gradient, part in zip(chosen, parts[: len(rows)], strict=True):
            gradient.select(part)
        for gradient, part in zip(self._whole, parts[len(rows) :], strict=True):
            if gradient.nonfinite:
                part.zero_()  # in few bits it would spoil its neighbours
            else:
                part.copy_(within(self._whole_of(gradient), sent.dtype))
        feedback = self._settings.error_feedback != "none"
        averaged = mean(self._collectives, sent, feedback=feedback)
        self._counts.rows += sum(rows)
        self._counts.whole += end - sum(rows)
        self._counts.bytes += sent_bytes(self._collectives, sent, end)
        if averaged.delivered is not sent:
            self._counts.lost += int((averaged.delivered[:end] != sent[:end]).sum())
        delivered, used = (
            torch.split(flat[:end], sizes) for flat in (averaged.delivered, averaged.values)
        )
        ended = list(zip([*chosen, *self._whole], delivered, used, strict=True))
        for gradient, _, part in ended:
            if self._raises or (gradient.shape is not None and not gradient.sends_rows):
                gradient.nonfinite |= not bool(part.isfinite().all())
        self._refuse_nonfinite()  # before anything is remembered
        for gradient, own, part in ended[: len(rows)]:
            arrived, means = (gradient.rows_of(gradient.index, each) for each in (own, part))
            gradient.memory.update(arrived, [means], gradient.matrix)
        for gradient, own, part in ended[len(rows) :]:
            self._use_whole(gradient, own, part, all_arrived=averaged.delivered is sent)

    def _whole_of(self, gradient: BucketGradient) -> Tensor:
        """What is to be sent of a gradient that is sent whole, (n,), and what was lost of it."""
        values, residual = gradient.matrix.view(-1), gradient.memory.residual
        return values if residual is None else values + residual

    def _use_whole(
        self, gradient: BucketGradient, delivered: Tensor, used: Tensor, *, all_arrived: bool
    ) -> None:
        """The mean of what was sent whole is used, and what was lost of it is kept."""
        matrix, memory = gradient.matrix, gradient.memory
        if not gradient.nonfinite:
            if gradient.shape is not None:
                parts = (part.view(matrix.shape) for part in (delivered, used))
                memory.initialize(matrix, *(part.to(matrix.dtype) for part in parts))
            elif self._settings.error_feedback != "none":
                lost = None if all_arrived else self._whole_of(gradient) - delivered
                memory.residual = lost
        if gradient.nonfinite and not self._exact:
            matrix.fill_(math.nan)
        else:
            matrix.copy_(used.view(matrix.shape))

    def _gather(self, chosen: Sequence[BucketGradient]) -> None:
        """Each rank's own rows of ``chosen`` and their indices go to all; nothing is lost."""
        if not chosen:
            return
        sizes = [gradient.selected for gradient in chosen]
        values = self._gradients[0].tensor.new_empty(sum(sizes))
        own = torch.split(values, sizes)
        for gradient, part in zip(chosen, own, strict=True):
            gradient.select(part)
        indices = torch.cat([gradient.index for gradient in chosen]).int()
        all_values = torch.split(self._collectives.all_gather(values), sizes, dim=1)
        counts = [len(gradient.index) for gradient in chosen]
        all_indices = torch.split(self._collectives.all_gather(indices), counts, dim=1)
        self._counts.rows += len(values)
        self._counts.indices += len(indices)
        self._counts.bytes += values.numel() * values.element_size() + 4 * len(indices)
        for gradient, part, *found in zip(chosen, own, all_indices, all_values, strict=True):
            rows = [gradient.rows_of(i.long(), each) for i, each in zip(*found, strict=True)]
            applied = [RowSum(each.index, each.values / self._collectives.world) for each in rows]
            sent = gradient.rows_of(gradient.index, part)
            gradient.memory.update(sent, applied, gradient.matrix)


def _like_sent(gradient: BucketGradient, settings: ARCTopKSettings) -> Tensor:
    """Of a narrow type only without a rule that adds up means: no rank would know what rounding
    takes from them, and the sum of all means would leave what the ranks have sent."""
    return gradient.matrix if RULES[settings.error_feedback].keeps_mean else gradient.tensor


def _nonfinite_flag(tensor: Tensor) -> float:
    return 0.0 if is_finite(tensor) else math.nan
