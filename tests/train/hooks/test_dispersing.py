"""Interleaving a bucket over packets; what that does to a mean is in tests/train/drift."""

from __future__ import annotations

import pytest
import torch

from lossycoll.train.hooks import dispersing


@pytest.mark.parametrize("length", [1, 2, 351, 352, 5000, 70_001])
def test_dispersed_gradients_come_back_in_order(length: int) -> None:
    flat = torch.arange(1.0, length + 1)
    packets = dispersing._prime_from(length / 352)
    assert packets in (2, 3, 5, 17, 199)
    sent = dispersing._interleaved(flat, packets)
    assert len(sent) == -(-length // packets) * packets
    assert torch.equal(dispersing._restored(sent, packets, length), flat)
    for packet in sent.view(packets, -1):
        assert bool((packet[packet > 0].diff() == packets).all())
