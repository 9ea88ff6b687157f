"""The arguments of ShardedOptimizer, checked, and as all ranks must pass them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from lossycoll.errors import OptionError
from lossycoll.options.ranges import is_whole
from lossycoll.train.common.delivery import Recovery, Wire
from lossycoll.train.compress.arc_topk import ARCTopKState

AUTO: Final = "auto"


@dataclass(frozen=True)
class ShardedSettings:
    """Arguments of :class:`.optimizer.ShardedOptimizer` besides parameters, group, optimizer."""

    max_age: int | str | None
    max_missing: float | None
    repair: int | None
    error_feedback: bool
    compression: ARCTopKState | None
    bucket_bytes: int
    on_nonfinite: str
    wire: str | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        if self.max_age not in (None, AUTO) and not is_whole(self.max_age, 0):
            raise OptionError(
                f"max_age is {self.max_age!r}, wanted a number of steps from 0 on, {AUTO!r} or None"
            )
        Recovery.of(self.max_missing, self.repair)
        if not is_whole(self.bucket_bytes, 1):
            raise OptionError(
                f"bucket_bytes is {self.bucket_bytes!r}, wanted a number of bytes from 1 on"
            )
        if self.on_nonfinite not in ("raise", "skip"):
            raise OptionError(f"on_nonfinite is {self.on_nonfinite!r}, wanted 'raise' or 'skip'")
        for name in ("whole", "error_feedback"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} is {getattr(self, name)!r}, wanted True or False")
        if self.compression is not None and not isinstance(self.compression, ARCTopKState):
            raise OptionError(
                f"compression is {self.compression!r}, wanted an ARCTopKState or None"
            )
        if self.compression is not None and self.error_feedback:
            raise OptionError(
                "error_feedback is True, wanted False with compression, whose state has its own "
                "(ARCTopKState(error_feedback=...))"
            )
        if Wire.of(self.wire).gradients not in (None, "same") and self.compression is not None:
            raise OptionError(
                f"wire is {self.wire!r}, wanted None or 'same/...' with compression, whose rows "
                f"travel as its state says (ARCTopKState(wire=...))"
            )

    @property
    def encodings(self) -> Wire:
        found = Wire.of(self.wire)
        return found if self.compression is None else Wire(None, found.parameters)

    @property
    def recovery(self) -> Recovery:
        return Recovery.of(self.max_missing, self.repair)

    def agreed(self, optimizer_class: Callable[..., Any]) -> dict[str, Any]:
        compression = None if self.compression is None else self.compression.settings
        name = getattr(optimizer_class, "__name__", "")
        return {"optimizer_class": name, **vars(self), "compression": compression}
