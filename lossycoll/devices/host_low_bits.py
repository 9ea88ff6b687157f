"""Floats of a device in few bits, encoded by the host: where the device has no kernels for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lossycoll.plan.lowbit import Floats, LowBit
from lossycoll.runtime.engine import codecs


class HostLowBits:
    """Low-bit codec (layer.LowBits) by the host: it waits for the device, and copies all."""

    def encode(
        self,
        values: Tensor,
        packets: Tensor,
        to_bytes: Tensor,
        how: LowBit,
        *,
        most_elements: int,
        key: int = 0,
    ) -> Tensor:
        """Encodes, and is done when it returns."""
        del most_elements
        x, data = values.detach().cpu().numpy(), to_bytes.cpu()
        found = 0
        for first, n, at in packets.tolist():
            part = x[first : first + n]
            codecs.encode(how, part, data.numpy()[at : at + how.wire_bytes(n)], key << 32 | first)
            found += _groups_of_none(how, part)
        to_bytes.copy_(data)
        return torch.tensor([found], dtype=torch.int32, device=values.device)

    def decode(
        self,
        from_bytes: Tensor,
        packets: Tensor,
        to_values: Tensor,
        how: LowBit,
        *,
        most_elements: int,
    ) -> None:
        """Decodes, and is done when it returns."""
        del most_elements
        data, x = from_bytes.cpu().numpy(), to_values.detach().cpu()
        for first, n, at in packets.tolist():
            codecs.decode(how, data[at : at + how.wire_bytes(n)], x.numpy()[first : first + n])
        with torch.inference_mode():
            to_values.copy_(x)


def _groups_of_none(how: LowBit, x: Floats) -> int:
    if np.isfinite(x).all():
        return 0
    starts = range(0, len(x), how.group)
    return sum(not np.isfinite(x[at : at + how.group]).all() for at in starts)
