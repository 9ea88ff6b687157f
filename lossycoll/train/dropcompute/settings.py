"""The arguments of a DropCompute, and which values are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from lossycoll.errors import OptionError
from lossycoll.options.ranges import is_number, is_whole
from lossycoll.simulate.threshold import Cut

DIVISORS: Final = ("completed", "fixed")
LEAST: Final = {"micro_batches": 1, "warm_up": 2, "skip": 0, "window": 1}
"""The smallest value of each whole number."""
SAME_ON_ALL_RANKS: Final = (
    "micro_batches",
    "threshold",
    "drop_rate",
    "divisor",
    "warm_up",
    "skip",
    "cut",
)


@dataclass(frozen=True)
class DropSettings:
    """The arguments of a :class:`~lossycoll.DropCompute`, which says what they mean."""

    micro_batches: int
    threshold: float | str = "auto"
    drop_rate: float | None = None
    divisor: str = "completed"
    warm_up: int = 44
    skip: int = 5
    window: int = 32
    tolerance: float = 0.25
    cut: Cut = "started"

    def __post_init__(self) -> None:
        self._check_threshold()
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not is_whole(value, least):
                raise OptionError(f"{name} is {value!r}, wanted a whole number, at least {least}")
        if self.divisor not in DIVISORS:
            raise OptionError(f"divisor is {self.divisor!r}, wanted 'completed' or 'fixed'")
        if self.cut not in get_args(Cut):
            raise OptionError(f"cut is {self.cut!r}, wanted one of {', '.join(get_args(Cut))}")
        if not is_number(self.tolerance) or not self.tolerance > 0:
            raise OptionError(f"tolerance is {self.tolerance!r}, wanted a share above 0")

    def _check_threshold(self) -> None:
        threshold, rate = self.threshold, self.drop_rate
        if threshold == "auto":
            if rate is not None and not (is_number(rate) and 0 <= rate < 1):
                raise OptionError(f"drop_rate is {rate!r}, wanted a share, at least 0 and below 1")
            return
        if not is_number(threshold) or not threshold > 0:
            raise OptionError(f"threshold is {threshold!r}, wanted seconds above 0, or 'auto'")
        if rate is not None:
            raise OptionError(
                f"threshold is {threshold!r} and drop_rate {rate!r}, wanted one of them; a drop "
                f"rate goes with threshold='auto'"
            )

    @property
    def seconds(self) -> float | None:
        """The threshold in seconds; None if it is to be measured."""
        return None if self.threshold == "auto" else float(self.threshold)

    @property
    def fixed_divisor(self) -> bool:
        """True if gradients are divided by what was wanted, rather than by what was completed."""
        return self.divisor == "fixed"

    def shared(self) -> Mapping[str, Any]:
        """The arguments that must be the same on all ranks."""
        return {name: getattr(self, name) for name in SAME_ON_ALL_RANKS}
