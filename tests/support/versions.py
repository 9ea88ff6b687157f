"""Versions that tests go by where torch's own behaviour has changed."""

from __future__ import annotations

from importlib import metadata
from typing import Final

TORCH: Final = tuple(int(part) for part in metadata.version("torch").split(".")[:2])
"""(major, minor)."""
SAYS_FACTORS: Final = TORCH >= (2, 13)
"""Whether a backend sees the factor of a PREMUL_SUM."""


def name_as_today() -> None:
    """Gives torch.distributed the names that its calls have from torch 2.13 on.

    A machine with a GPU may have an older torch, which nothing claims to serve but the tests of
    CUDA tensors have to do with.
    """
    import torch.distributed as dist

    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    ):
        if not hasattr(dist, new):
            setattr(dist, new, getattr(dist, old))
