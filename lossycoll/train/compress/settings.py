"""The arguments of an ARCTopKState, and which values are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from lossycoll.errors import OptionError
from lossycoll.options.ranges import is_number, is_whole
from lossycoll.train.common.wire import Wire

from .error_memory import RULES

METHODS: Final = ("arc", "randk", "topk")
"""Rows by a common sketch, rows drawn at random, and each rank's own largest entries."""
SKETCH_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ON_NONFINITE: Final = ("pass", "raise")
DENSE_BELOW: Final = 1024


@dataclass(frozen=True)
class ARCTopKSettings:
    """The arguments of an :class:`~lossycoll.ARCTopKState`, the same on all ranks."""

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
        """True if each rank sends rows of its own choice."""
        return self.method == "topk"
