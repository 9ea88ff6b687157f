"""Interleaving a bucket over packets; what that does to a mean is in tests/train/drift."""

from __future__ import annotations

import pytest
import torch

from lossycoll.train import hooks


@pytest.mark.parametrize("length", [1, 2, 351, 352, 5000, 70_001])
def test_dispersed_gradients_come_back_in_order(length: int) -> None:
    flat = torch.arange(1.0, length + 1)
    packets = hooks._prime_from(length / 352)
    assert packets in (2, 3, 5, 17, 199)
    sent = hooks._interleaved(flat, packets)
    assert len(sent) == -(-length // packets) * packets
    assert torch.equal(hooks._restored(sent, packets, length), flat)
    for packet in sent.view(packets, -1):
        assert bool((packet[packet > 0].diff() == packets).all())


@pytest.mark.parametrize("packets", [17, 199, 2003])
def test_a_burst_of_packets_takes_no_neighbours(packets: int) -> None:
    """Whatever 8 consecutive packets are lost, no two of them carry elements next to each other."""
    sent = hooks._interleaved(torch.arange(4.0 * packets), packets).view(packets, -1)
    for begin in range(packets - 8):
        lost = (sent[begin : begin + 8, 0] % packets).sort().values
        assert float(lost.diff().min()) >= max(1, packets // 20)
        if packets > 17:
            assert float(lost.diff().min()) > 1
