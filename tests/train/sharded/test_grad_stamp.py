"""The identity of a gradient."""

from __future__ import annotations

import torch

from lossycoll.train.sharded.backward_pass import GradStamp


def test_a_stamp_fits_the_same_tensor_until_it_is_written_to() -> None:
    grad = torch.ones(3)
    stamp = GradStamp(grad)
    assert stamp.fits(grad)
    assert not stamp.fits(grad.clone())
    assert not stamp.fits(None)
    grad.mul_(2)
    assert not stamp.fits(grad)


def test_a_stamp_of_nothing_fits_nothing_and_none_keeps_a_gradient() -> None:
    assert GradStamp(None).fits(None)
    assert not GradStamp(None).fits(torch.ones(1))
    gone = GradStamp(torch.ones(1))
    assert not gone.fits(None)
    assert not gone.fits(torch.ones(1))
