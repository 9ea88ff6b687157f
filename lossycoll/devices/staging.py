"""Float32 values of tensors in host memory, for what runs beside the caller's compute."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lossycoll.plan.codec import Floats

from .registry import device_of, is_served


class Staging:
    """Host memory for all elements of tensors, and their way there and back.

    Copies from a device take a stream of their own: they wait for what the caller has queued until
    :meth:`mark`, not for later kernels, and later kernels don't wait for them.

    ``tensors``: of one device, or of the CPU; others later have the same shapes. ``values`` has the
    elements of one after another, and ``parts`` a view of each.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        ends = list(accumulate(tensor.numel() for tensor in tensors))
        self._layer = self._stream = None
        if tensors and is_served(tensors[0]):
            device = device_of(tensors[0])
            self._layer, lane = device.layer, device.take_lane()
            self._stream = lane.to_host
            weakref.finalize(self, device.give_back, lane)
            nbytes = ends[-1] * np.dtype(np.float32).itemsize
            values = self._layer.memory(nbytes).view(torch.float32).numpy()
        else:
            values = np.empty(ends[-1], np.float32)
        self.values: Final[Floats] = values
        flat = torch.from_numpy(self.values)
        self.parts: Final = [
            flat[end - tensor.numel() : end].view(tensor.shape)
            for end, tensor in zip(ends, tensors, strict=True)
        ]

    def mark(self) -> Any:
        """The place in the caller's stream, for :meth:`fill`; None on the CPU."""
        return None if self._layer is None else self._layer.current().record()

    def fill(self, tensors: Sequence[Tensor], after: Any = None) -> None:
        """Copies the tensors to ``values``, and waits until they are there. ``after``:
        :meth:`mark`'s; None: this thread's stream as it is now."""
        self._copy(zip(self.parts, tensors, strict=True), after or self.mark())

    def spill(self, tensors: Sequence[Tensor]) -> None:
        """Copies ``values`` to the tensors, and waits until they are there."""
        self._copy(zip(tensors, self.parts, strict=True), None)

    def _copy(self, pairs: Any, after: Any) -> None:
        if self._stream is None:
            for to, source in pairs:
                to.copy_(source)
            return
        if after is not None:
            self._stream.wait_for(after)
        for to, source in pairs:
            self._stream.run(partial(to.detach().copy_, source.detach(), non_blocking=True))
        self._stream.record().wait()
