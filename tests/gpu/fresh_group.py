"""A default group with options of its own, within a check."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from tests.support.harness import init


@contextlib.contextmanager
def fresh_group(**rest: Any) -> Iterator[None]:
    """In place of the group that is there; afterwards there is one without them."""
    dist.barrier()
    dist.destroy_process_group()
    init(timeout=15, **rest)
    yield
    dist.barrier()
    dist.destroy_process_group()
    init(timeout=15)
