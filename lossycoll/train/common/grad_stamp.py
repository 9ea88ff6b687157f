"""The identity of a gradient: recognises it later without keeping it alive."""

from __future__ import annotations

import weakref

from torch import Tensor


class GradStamp:
    """The identity and version of a parameter's ``grad`` as it is now."""

    __slots__ = ("_grad", "_version")

    def __init__(self, grad: Tensor | None) -> None:
        self._grad = None if grad is None else weakref.ref(grad)
        self._version = 0 if grad is None else grad._version

    def fits(self, grad: Tensor | None) -> bool:
        """Whether a gradient is the same tensor, not written to since, or None as it was then."""
        if grad is None or self._grad is None:
            return grad is None and self._grad is None
        return grad is self._grad() and grad._version == self._version
